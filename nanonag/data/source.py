"""Where the text comes from: local files, Hugging Face data sets, or one downloaded file.

A source is a function that starts an iterator of pieces (text, last), the same ones at every call:
a document is one piece, a long text file several, and `last` marks the piece that ends a document.
Memory stays bounded."""

import codecs
import glob
import hashlib
import http.client
import json
import os
import re
import urllib.request
from itertools import islice
from pathlib import Path

from nanonag.cli import UserError
from nanonag.data.tokenizer import replace_surrogates

SUFFIXES = ('.txt', '.jsonl', '.parquet')
BLOCK = 2**20  # bytes read at a time
# characters of a document that must be held as a whole, such as a line of a .jsonl file
LONGEST = 2**24
# Before a space or a line break that follows something visible, GPT-2's pattern always starts a new
# word: a text cut
# there has the same tokens as the whole.
CUT = re.compile(r'.*\S(?=[ \n])', re.DOTALL)


# ---- local files


def find_files(inputs):
    """The files that the names, folders and patterns stand for: sorted within each, none twice."""
    files = {}
    for name in map(os.path.expanduser, inputs):
        if os.path.isdir(name):
            found = [
                path
                for path in sorted(Path(name).rglob('*'))
                if path.suffix in SUFFIXES and path.is_file()
            ]
        elif os.path.exists(name):
            found = [Path(name)]
        elif glob.has_magic(name):
            found = [
                Path(path)
                for path in sorted(glob.glob(name, recursive=True))
                if os.path.isfile(path)
            ]
        else:
            raise UserError(
                f'--input {name}: no such file or folder (the current folder is {os.getcwd()})'
            )
        if not found:
            raise UserError(
                f'--input {name}: no file there matches; wanted are {", ".join(SUFFIXES)} files'
            )
        files.update((path.resolve(), path) for path in found)
    for path in files.values():
        if path.suffix not in SUFFIXES:
            raise UserError(
                f'--input {path}: files of this kind are not read; allowed are {", ".join(SUFFIXES)}'
            )
    return list(files.values())


def read_files(files, encoding='utf-8', separator=None):
    """Pieces of .txt (a document, or several with a `separator` between), .jsonl and .parquet
    files."""
    for path in files:
        if path.suffix == '.parquet':
            yield from read_parquet(path)
        elif path.suffix == '.jsonl':
            yield from read_jsonl(path, encoding)
        elif separator:
            parts = (part.strip() for part in split(read_text(path, encoding), separator, path))
            yield from ((part, True) for part in parts if part)
        else:
            yield from cut(read_text(path, encoding))


def read_text(path, encoding):
    """The decoded text in blocks; UserError with the offset of the first byte that is not
    `encoding`, or 0 in UTF-8."""
    try:
        '-'.encode(encoding)  # refuses codecs that are not for text, such as zip
        decoder = codecs.getincrementaldecoder(encoding)()
    except (LookupError, UnicodeError):
        raise UserError(
            f'--encoding={encoding}: unknown to Python; usual are utf-8, utf-16, latin-1, cp1252'
        ) from None
    with open(path, 'rb') as file:
        # Windows editors' mark is no text
        if codecs.lookup(encoding).name != 'utf-8' or file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
        block = b'-'
        while block:
            block = file.read(BLOCK)
            try:
                text = decoder.decode(block, final=not block)
                if encoding == 'utf-8' and '\0' in text:
                    raise UnicodeDecodeError(
                        encoding, block, block.index(0), block.index(0) + 1, 'a zero'
                    )
            except UnicodeError as error:  # some codecs do not tell where
                # bytes kept from before count
                offset = (
                    file.tell() - len(getattr(error, 'object', block)) + getattr(error, 'start', 0)
                )
                raise UserError(
                    f'{path}: byte {offset} is not {encoding} text ({getattr(error, "reason", error)}); name its encoding, such '
                    f'as --encoding={"utf-16" if 0 in block[:100] else "latin-1"}, or convert the file'
                ) from None
            yield text


def cut(blocks):
    """One document in pieces of about a block each, cut where the tokenizer does not notice."""
    text = ''
    for block in blocks:
        text += block
        match = CUT.match(text)
        if match or len(text) > LONGEST:
            end = match.end() if match else len(text) - 1
            yield text[:end], False
            text = text[end:]  # never empty, so that the last piece is not
    if text:
        yield text, True


def split(blocks, separator, path):
    """The parts of a text between separators."""
    rest = ''
    for block in blocks:
        *parts, rest = (rest + block).split(separator)
        yield from parts
        if len(rest) > LONGEST:
            raise UserError(
                f'{path}: more than {LONGEST} characters without {separator!r}; is it of the right kind?'
            )
    yield rest


def read_jsonl(path, encoding):
    for number, line in enumerate(split(read_text(path, encoding), '\n', path), 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f'{path}:{number}: not valid JSON ({error}); each line must be an object'
            ) from None
        text = row.get('text') if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{path}:{number}: no field 'text' with a string in it; "
                'each line must be like {"text": "..."}'
            )
        yield replace_surrogates(text), True


def read_parquet(path):
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            f'{path}: reading it needs the package pyarrow: pip install pyarrow'
        ) from None
    row = 0
    try:
        with ParquetFile(path, buffer_size=BLOCK) as file:
            if 'text' not in file.schema_arrow.names:
                raise UserError(
                    f"{path}: no column 'text'; it has {', '.join(file.schema_arrow.names)}"
                )
            for batch in file.iter_batches(batch_size=1000, columns=['text']):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise UserError(
                            f"{path}: row {row}: column 'text' must hold strings, not {str(text)[:40]}"
                        )
                    yield text, True
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: not a readable parquet file ({error})') from None


# ---- downloads


def load_hub(name, revision, num_proc=1):
    """(the splits of a Hugging Face data set, the commit they are from)."""
    try:
        import datasets
        import huggingface_hub

        commit = huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
        return datasets.load_dataset(name, revision=commit, num_proc=num_proc), commit
    except ImportError as error:
        raise UserError(
            f'downloading {name} needs the package datasets ({error}): pip install datasets'
        ) from None
    # many libraries lie below: no network, no such revision, a full disk, ...
    except Exception as error:
        raise UserError(
            f'{name} at {revision!r} cannot be had from Hugging Face ({type(error).__name__}: {error}); '
            'try again later, another --revision, or give files of it with --input'
        ) from error


def read_rows(rows):
    """Pieces of one split of a Hugging Face data set."""
    for batch in rows.iter(batch_size=1000):
        yield from ((text, True) for text in batch['text'])


def fetch(url, sha256):
    """The bytes at `url`, which must have this digest."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read(2**30)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f'{url}: cannot be downloaded ({error}); get it by other means, give it with --input'
        ) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(
            f'{url}: not the file this script was written for (SHA-256 differs); give yours with --input'
        )
    return data


# ---- the validation split


def survey(pieces):
    """(number of characters, the sorted characters that occur)."""
    count, chars = 0, set()
    for text, _ in pieces():
        count += len(text)
        chars.update(text)
    return count, sorted(chars)


def first_documents(pieces, count):
    """`pieces`, ended after `count` documents (None: all)."""

    def start():
        left = count
        for text, last in pieces():
            yield text, last
            left -= last
            if not left:
                return

    return start if count else pieces


def split_as_given(sources):
    """Pieces (split, text, last) of sources that are splits."""
    for split, pieces in sources.items():
        for text, last in pieces():
            yield split, text, last


def split_by_position(pieces, characters):
    """The same, of a source whose first `characters` characters are for training and whose rest is
    for validation."""
    left = characters
    for text, last in pieces():
        head, tail = text[:left], text[left:]
        left -= len(head)
        if head:
            yield 'train', head, last and not tail
        if tail or not head:
            yield 'val', tail, last


def split_by_document(pieces, every, seed):
    """The same, of a source of whose documents one in `every` is for validation; `seed` tells
    which."""
    number = 0
    for text, last in pieces():
        yield 'val' if number % every == seed % every else 'train', text, last
        number += last


def split_by_rule(pieces, val_fraction, seed, continuous):
    """(pieces (split, text, last), the rule in words): by position in one continuous text or a
    single document, else by document. A set of few documents still gets one for validation."""
    every = round(1 / max(val_fraction, 1e-9))
    documents = sum(1 for _ in islice((last for _, last in pieces() if last), every))
    if continuous or documents == 1:
        characters = int(survey(pieces)[0] * (1 - val_fraction))
        return split_by_position(
            pieces, characters
        ), f'the first {characters} characters train, the rest is val'
    every = max(2, min(every, documents))
    return split_by_document(
        pieces, every, seed
    ), f'of each {every} documents, number {seed % every} (from 0) is val'
