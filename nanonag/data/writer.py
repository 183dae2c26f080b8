"""The one writer of data folders: text -> tokens -> train.bin, val.bin, meta.json (dataset.py says
what they hold).

The text streams through: it is read and written here and tokenized by `num_proc` other processes
(threads of one process do not scale: two give 1.3 times one's speed), the results in order, so
memory is bounded and the bytes do not depend on num_proc. Everything is written under temporary
names first and renamed at the end, meta.json last. A run that was killed is continued by the next
one with the same inputs and options, to the same bytes."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from collections import deque
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanonag.cli import UserError
from nanonag.configurator import at_least, between, build, parse
from nanonag.data import source, tokenizer
from nanonag.data.folder import SPLITS, token_dtype
from nanonag.help import show_help
from nanonag.workers import worker_pool

CHUNK = 2**20  # characters tokenized by one process at a time
SAVE_EVERY = 10  # seconds of work that a kill may cost
MIN_TOKENS = 2  # of a split: a token and its successor
PART, PROGRESS = '.part', 'progress.json.part'  # what an unfinished preparation leaves


@dataclass(frozen=True)
class PrepareConfig:
    # files, folders, patterns (.txt, .jsonl, .parquet; field or column `text`)
    input: tuple[str, ...] = ()
    # the same for validation; if not given, a part of --input is held out
    val_input: tuple[str, ...] = ()
    out_dir: str = ''  # where the data goes; if not given, beside the script
    # tokenizing processes; None: as many as cores, up to 8, where reading becomes the limit
    num_proc: int | None = None
    encoding: str = 'utf-8'  # of the .txt and .jsonl files
    # how much is held out for validation; None: the data set's own choice
    val_fraction: float | None = None
    seed: int = 2357  # which documents are held out
    # stop after so many documents (of each given split): a small sample
    max_docs: int | None = None
    # commit, tag or branch of the Hugging Face data set; meta.json records the commit
    revision: str = 'main'

    def __post_init__(self):
        at_least(self, num_proc=1, max_docs=1)
        between(self, num_proc=(0, 62))  # Windows' limit of a pool
        if self.val_fraction is not None and not 0 < self.val_fraction <= 0.5:
            raise UserError(f'--val_fraction={self.val_fraction}: must be above 0 and at most 0.5')


def prepare(
    argv, script, doc, download, kind, hub=False, continuous=False, separator=None, val_fraction=0.1
):
    """What every prepare.py does.

    download(cfg) -> ({'train': source[, 'val': source]}, facts for meta.json) is where the text
    comes from without --input; `hub`: it brings its own splits. kind: 'char' or 'gpt2'. continuous:
    one text rather than documents, so there is no end-of-text token and the end is held out.
    separator: stands between the documents of a .txt file."""
    show_help(doc, 'nanonag/data/writer.py:PrepareConfig')
    options = parse(argv, PrepareConfig)
    cfg = build(PrepareConfig, options)
    refuse_unused(cfg, options, hub, continuous)
    out_dir = Path(cfg.out_dir or Path(script).resolve().parent)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if kind == 'gpt2':
            tokenizer.gpt2_encoding()  # a missing vocabulary is better known before a long download
        files = local_files(cfg)
        if files:
            sources = {
                split: functools.partial(source.read_files, files[split], cfg.encoding, separator)
                for split in files
            }
            facts = {
                'files': {
                    split: [
                        {'name': path.name, 'bytes': path.stat().st_size} for path in files[split]
                    ]
                    for split in files
                },
                'encoding': cfg.encoding,
            }
        else:
            sources, facts = download(cfg)
        sources = {
            split: source.first_documents(pieces, cfg.max_docs) for split, pieces in sources.items()
        }
        described = {'kind': 'gpt2'}
        if kind == 'char':
            chars = sorted(set().union(*(source.survey(pieces)[1] for pieces in sources.values())))
            # no text at all is reported as too little
            described = {'kind': 'char', 'chars': chars or ['\n']}
        if 'val' in sources:
            pieces, rule = source.split_as_given(sources), 'given'
        else:
            val_fraction = cfg.val_fraction or val_fraction
            pieces, rule = source.split_by_rule(
                sources['train'], val_fraction, cfg.seed, continuous
            )
        versions = {
            name: importlib.metadata.version(name)
            for name in ('tiktoken', 'datasets', 'pyarrow')
            if importlib.util.find_spec(name)
        }
        facts = {
            'prepared_by': f'data/{Path(script).resolve().parent.name}/prepare.py',
            **facts,
            'split': rule,
            'max_docs': cfg.max_docs,
            'versions': {'python': platform.python_version(), **versions},
        }
        stamps = [[str(path.resolve()), path.stat().st_mtime_ns] for path in chain(*files.values())]
        meta = write(
            out_dir,
            tokenizer.from_description(described),
            pieces,
            facts,
            stamps,
            cfg.num_proc or min(8, usable_cores()),
            end_documents=not continuous,
        )
    except OSError as error:
        raise UserError(f'{error.filename or out_dir}: {error.strerror or error}') from error
    except BrokenProcessPool:
        raise UserError(
            'a tokenizing process was killed, perhaps for memory; start again, with a lower --num_proc: it goes on'
        ) from None
    for split in SPLITS:
        print(
            f'{out_dir / split}.bin: {meta["tokens"][split]:,} tokens, sha256 {meta["sha256"][split]}'
        )


def usable_cores():
    """Those that this process may run on, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def refuse_unused(cfg, options, hub, continuous):
    """UserError for an option that would have no effect."""
    unused = set() if cfg.input else {'val_input', 'encoding'}
    unused |= {'revision'} if cfg.input or not hub else set()
    unused |= {'val_fraction', 'seed'} if cfg.val_input or (hub and not cfg.input) else set()
    unused |= {'seed'} if continuous else set()
    for key in sorted(unused & options.keys()):
        raise UserError(
            f'--{key} has no effect here: '
            + {
                'val_input': 'it goes with --input',
                'encoding': 'it is for the files of --input',
                'revision': 'nothing is read from Hugging Face',
                'val_fraction': 'the validation split is given',
                'seed': 'validation documents are not chosen',
            }[key]
        )


def local_files(cfg):
    """{'train': the files of --input, 'val': those of --val_input}, as far as they are given."""
    inputs = {'train': cfg.input, 'val': cfg.val_input}
    files = {split: source.find_files(inputs[split]) for split in SPLITS if inputs[split]}
    trained_on = {path.resolve() for path in files.get('train', ())}
    for path in files.get('val', ()):
        if path.resolve() in trained_on:
            raise UserError(
                f'--val_input: {path} is in --input too; validation text must not be trained on'
            )
    return files


def write(out_dir, tokens, pieces, facts, stamps=(), num_proc=1, end_documents=True):
    """Tokenize the pieces (split, text, last) into `out_dir`; returns meta.json's content.

    facts: what meta.json tells of the source. stamps: what else must be as it was for a killed run
    to be continued."""
    dtype = token_dtype(tokens.vocab_size)
    identity = json.loads(json.dumps([tokens.description, facts, list(stamps), end_documents]))

    done = read_progress(out_dir, identity)
    paths = {split: out_dir / f'{split}.bin{PART}' for split in SPLITS}
    bins = {
        split: Bin(paths[split], dtype, tokens.byte_lengths, done['bytes'][split])
        for split in SPLITS
    }
    bar = tqdm(
        disable=None,
        unit=' tokens',
        unit_scale=True,
        initial=sum(b.tokens for b in bins.values()),
        mininterval=1,
    )
    saved = time.monotonic()
    try:
        for ids, ended, read in encode_all(
            tokens, end_documents, in_chunks(islice(pieces, done['pieces'], None)), num_proc
        ):
            for split in SPLITS:
                bins[split].append(ids[split])
                done['documents'][split] += ended[split]
            done['pieces'] += read
            bar.update(sum(map(len, ids.values())))
            if time.monotonic() - saved > SAVE_EVERY:
                done['bytes'] = {split: bins[split].sync() for split in SPLITS}
                write_json(out_dir / PROGRESS, done)
                saved = time.monotonic()
        for split in SPLITS:
            bins[split].sync()
        few = [
            f'{split} has {bins[split].tokens}'
            for split in SPLITS
            if bins[split].tokens < MIN_TOKENS
        ]
        if few:
            raise UserError(
                f'too little text: {" and ".join(few)} tokens, and each of train and val needs at least '
                f'{MIN_TOKENS} (to train on it, block_size + 1); give more text or a larger --val_fraction'
            )
    except UserError:  # the input has to change, so nothing here can be continued
        for path in (*paths.values(), out_dir / PROGRESS):
            path.unlink(missing_ok=True)
        raise
    finally:
        bar.close()
        for split in SPLITS:
            bins[split].file.close()
    meta = {
        'version': 1,
        'tokenizer': tokens.description,
        'vocab_size': tokens.vocab_size,
        'dtype': dtype,
        'tokens': {split: bins[split].tokens for split in SPLITS},
        'max_id': {split: bins[split].max_id for split in SPLITS},
        'bytes': {split: bins[split].bytes for split in SPLITS},
        'sha256': {split: bins[split].sha256.hexdigest() for split in SPLITS},
        'source': {**facts, 'documents': done['documents']},
    }
    (out_dir / 'meta.json').unlink(missing_ok=True)  # an older preparation ends here
    for split in SPLITS:
        os.replace(paths[split], out_dir / f'{split}.bin')
    write_json(out_dir / 'meta.json', meta)
    (out_dir / PROGRESS).unlink(missing_ok=True)
    return meta


class Bin:
    """A split on its way to disk, with what meta.json says of it; `keep` bytes of an interrupted
    run are continued."""

    def __init__(self, path, dtype, byte_lengths, keep=0):
        self.dtype, self.byte_lengths, self.vocab_size = (
            np.dtype(dtype).newbyteorder('<'),
            byte_lengths,
            len(byte_lengths),
        )
        self.tokens, self.bytes, self.max_id, self.sha256 = 0, 0, -1, hashlib.sha256()
        self.file = open(path, 'r+b' if keep else 'wb')
        while self.file.tell() < keep:
            self.note(
                np.frombuffer(self.file.read(min(2**24, keep - self.file.tell())), self.dtype)
            )
        self.file.truncate()

    def append(self, ids):
        if ids.size and ids.max() >= self.vocab_size:  # would wrap around silently
            raise UserError(
                f'{self.file.name}: token id {ids.max()} does not fit a vocabulary of {self.vocab_size}'
            )
        ids = ids.astype(self.dtype)
        self.file.write(ids)
        self.note(ids)

    def note(self, ids):
        self.tokens += len(ids)
        # of text: what bits per byte are reckoned with
        self.bytes += int(self.byte_lengths[ids].sum())
        self.max_id = max(self.max_id, int(ids.max(initial=0)))
        self.sha256.update(ids)

    def sync(self):
        """Bring everything to the disk; the bytes there."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()


def read_progress(out_dir, identity):
    """How far an interrupted run with the same inputs and options came, else the beginning."""
    begin = {
        'identity': identity,
        'pieces': 0,
        'documents': dict.fromkeys(SPLITS, 0),
        'bytes': dict.fromkeys(SPLITS, 0),
    }
    try:
        done = json.loads((out_dir / PROGRESS).read_text(encoding='utf-8'))
        good = (
            done.keys() == begin.keys()
            and done['identity'] == identity
            and all(
                (out_dir / f'{split}.bin{PART}').stat().st_size >= done['bytes'][split]
                for split in SPLITS
            )
        )
    except FileNotFoundError:
        return begin
    except (ValueError, AttributeError):
        good = False
    if not good:
        print(
            f'{out_dir}: the unfinished preparation there had other inputs or options; starting over'
        )
        return begin
    print(
        f'{out_dir}: continuing the unfinished preparation after {sum(done["documents"].values()):,} documents'
    )
    return done


def in_chunks(pieces):
    """Lists of pieces, of about CHUNK characters together."""
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece[1]) + 1
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode(tokens, end_documents, chunk):
    """{split: its ids}, {split: documents ended in it}, number of pieces."""

    def ids(pieces):
        if end_documents and tokens.eot is not None:
            return tokens.encode_documents(pieces)
        return np.concatenate(
            [np.empty(0, np.uint32), *(tokens.encode_array(text) for text, _ in pieces)]
        )

    parts = {split: [piece for name, *piece in chunk if name == split] for split in SPLITS}
    documents = {split: sum(last for _, last in parts[split]) for split in SPLITS}
    return {split: ids(parts[split]) for split in SPLITS}, documents, len(chunk)


# made by the first chunk
worker_tokens = functools.cache(
    lambda description: tokenizer.from_description(json.loads(description))
)


def encode_in_worker(description, end_documents, chunk):
    return encode(worker_tokens(description), end_documents, chunk)


def encode_all(tokens, end_documents, chunks, num_proc):
    """`encode` of each chunk, in order, by num_proc processes if there is enough to do for them."""
    first = list(islice(chunks, 2 if num_proc > 1 else 0))
    if len(first) < 2:
        yield from map(functools.partial(encode, tokens, end_documents), chain(first, chunks))
        return
    work = functools.partial(encode_in_worker, json.dumps(tokens.description), end_documents)
    with worker_pool(num_proc) as pool:
        yield from ordered_map(pool, work, chain(first, chunks), 2 * num_proc)


def ordered_map(pool, function, items, ahead):
    """map(function, items) by the workers of a pool, in order, with at most `ahead` items waiting
    behind the one yielded."""
    futures = deque()
    for item in items:
        futures.append(pool.submit(function, item))
        if len(futures) > ahead:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


def write_json(path, value):
    """Write under another name and rename, so that the file is whole whenever it is there."""
    temporary = Path(f'{path}.tmp')
    with open(temporary, 'w', encoding='utf-8') as file:
        json.dump(value, file, indent=1)
        file.write('\n')
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
