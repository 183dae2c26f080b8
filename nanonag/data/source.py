"""Text from local files.

A source is a function that returns a new iterator of pieces (text, last), the same ones at every
call. A document is one piece, a long text file several; `last` is True for the piece that ends a
document. Memory stays bounded, however long the text.

find_files decides which files an --input stands for, read_file how a file is read by its suffix,
and read_text how text is opened and decoded.
"""

import codecs
import glob
import json
import os
import re
from pathlib import Path

from nanonag.cli import UserError
from nanonag.data.tokenizer import replace_surrogates

SUFFIXES = ('.txt', '.jsonl', '.parquet')
BLOCK = 2**20  # bytes read at a time
# characters of a document that must be held as a whole, such as a line of a .jsonl file
LONGEST = 2**24
# Before a space or a line break that follows something visible, GPT-2's pattern always starts a new
# word: a text cut there has the same tokens as the whole.
CUT = re.compile(r'.*\S(?=[ \n])', re.DOTALL)


def find_files(inputs):
    """The files that names, folders and patterns stand for, as Paths.

    Sorted within each input, none twice. Raises UserError for an input without a file and for files
    of a kind that is not read.
    """
    files: dict[Path, Path] = {}  # by their resolved paths
    for name in inputs:
        for path in match_files(os.path.expanduser(name)):
            files[path.resolve()] = path
    for path in files.values():
        if path.suffix not in SUFFIXES:
            raise UserError(
                f'--input {path}: files of this kind are not read; '
                f'allowed are {", ".join(SUFFIXES)}'
            )
    return list(files.values())


def match_files(name):
    """The files of one input, sorted: those in a folder with one of SUFFIXES, the file itself, or
    those that match a pattern. UserError if there is none.
    """
    if os.path.isdir(name):
        paths = [path for path in sorted(Path(name).rglob('*')) if path.suffix in SUFFIXES]
    elif os.path.exists(name):
        return [Path(name)]
    elif glob.has_magic(name):
        paths = [Path(path) for path in sorted(glob.glob(name, recursive=True))]
    else:
        raise UserError(
            f'--input {name}: no such file or folder (the current folder is {os.getcwd()})'
        )
    files = [path for path in paths if path.is_file()]
    if not files:
        raise UserError(
            f'--input {name}: no file there matches; {", ".join(SUFFIXES)} files are read'
        )
    return files


def read_files(files, encoding='utf-8', separator=None):
    """Yield the pieces of files; read_file says how."""
    for path in files:
        yield from read_file(path, encoding, separator)


def read_file(path, encoding, separator):
    """An iterator of the pieces of one file.

    A .parquet file holds a document in each row, a .jsonl file in each line, and a .txt file one
    document, or several if there is a `separator` that stands between them.
    """
    if path.suffix == '.parquet':
        return read_parquet(path)
    blocks = read_text(path, encoding)
    if path.suffix == '.jsonl':
        return read_jsonl(blocks, path)
    if separator:
        return read_separated(blocks, separator, path)
    return cut_document(blocks)


def read_text(path, encoding):
    """Yield the text of a file, decoded, in blocks of about BLOCK bytes.

    The byte order mark that Windows editors put before UTF-8 is dropped. Raises UserError with the
    offset of the first byte that is not text in `encoding`. Zero bytes are not text in UTF-8: they
    come from UTF-16, and would go unnoticed.
    """
    decoder = text_decoder(encoding)
    is_utf8 = codecs.lookup(encoding).name == 'utf-8'
    with open(path, 'rb') as file:
        if is_utf8 and file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        at_end = False
        while not at_end:
            block = file.read(BLOCK)
            at_end = not block
            try:
                text = decoder.decode(block, final=at_end)
                if is_utf8 and '\0' in text:
                    zero = block.index(0)
                    raise UnicodeDecodeError(encoding, block, zero, zero + 1, 'a zero')
            except UnicodeError as error:
                raise undecodable(path, encoding, block, file.tell(), error) from None
            yield text


def text_decoder(encoding):
    """An incremental decoder of `encoding`; UserError if Python has no such text encoding."""
    try:
        '-'.encode(encoding)  # refuses codecs that are not for text, such as zip
        return codecs.getincrementaldecoder(encoding)()
    except (LookupError, UnicodeError):
        raise UserError(
            f'--encoding={encoding}: unknown to Python; usual are utf-8, utf-16, latin-1, cp1252'
        ) from None


def undecodable(path, encoding, block, end, error):
    """The UserError for a decoder's `error` in the block of bytes that ends at offset `end`."""
    # Bytes that the decoder kept from before are part of error.object. Some codecs raise a plain
    # UnicodeError, which does not tell the place.
    data = getattr(error, 'object', block)
    offset = end - len(data) + getattr(error, 'start', 0)
    reason = getattr(error, 'reason', error)
    likely = 'utf-16' if 0 in block[:100] else 'latin-1'
    return UserError(
        f'{path}: byte {offset} is not {encoding} text ({reason}); '
        f'name its encoding, such as --encoding={likely}, or convert the file'
    )


def cut_document(blocks):
    """Yield one document in pieces of about a block each, cut where the tokens stay the same."""
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


def split_at(separator, blocks, path):
    """Yield the parts of a text between separators.

    Raises UserError for a part of more than LONGEST characters; `path` is for the message.
    """
    rest = ''
    for block in blocks:
        *parts, rest = (rest + block).split(separator)
        yield from parts
        if len(rest) > LONGEST:
            raise UserError(
                f'{path}: more than {LONGEST} characters without {separator!r}; '
                'is it of the right kind?'
            )
    yield rest


def read_separated(blocks, separator, path):
    """Yield the documents between separators, without the white space around each."""
    for part in split_at(separator, blocks, path):
        text = part.strip()
        if text:
            yield text, True


def read_jsonl(blocks, path):
    """Yield the documents of a .jsonl file: the field 'text' of the object in each line.

    Lines of white space are skipped. Raises UserError with the number of a line that is wrong.
    """
    for number, line in enumerate(split_at('\n', blocks, path), 1):
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
    """Yield the documents of a .parquet file: the rows of its column 'text'.

    Raises UserError if pyarrow is missing, if the file cannot be read, and for values that are not
    strings.
    """
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
            names = file.schema_arrow.names
            if 'text' not in names:
                raise UserError(f"{path}: no column 'text'; it has {', '.join(names)}")
            for batch in file.iter_batches(batch_size=1000, columns=['text']):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise UserError(
                            f"{path}: row {row}: column 'text' must hold strings, "
                            f'not {str(text)[:40]}'
                        )
                    yield text, True
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: not a readable parquet file ({error})') from None


def first_documents(source, count):
    """The source of the first `count` documents of another (None: of all)."""
    if count is None:
        return source

    def start():
        remaining = count
        for text, last in source():
            yield text, last
            if last:
                remaining -= 1
                if remaining == 0:
                    return

    return start
