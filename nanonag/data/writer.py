"""The one writer of data folders: text -> tokens -> train.bin, val.bin and meta.json.

folder.py says what these files hold. The text streams through: it is read here, tokenized by
encoder.py and written here, so memory is bounded. Everything is written under temporary names first
and renamed at the end, meta.json last. A preparation that was killed is continued by the next one
with the same inputs and options, to the same bytes.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from tqdm import tqdm

from nanonag.cli import UserError
from nanonag.configurator import at_least, between, build, parse
from nanonag.data import tokenizer
from nanonag.data.bin import Bin
from nanonag.data.encoder import encode_stream
from nanonag.data.folder import SPLITS, VERSION, token_dtype
from nanonag.data.holdout import hold_out
from nanonag.data.source import find_files, first_documents, read_files
from nanonag.help import show_help

SAVE_EVERY = 10  # seconds of work that a kill may cost
MIN_TOKENS = 2  # of a split: a token and its successor
PART = '.part'  # suffix of an unfinished file
PROGRESS = f'progress.json{PART}'  # how far an unfinished preparation came


@dataclass(frozen=True)
class PrepareConfig:
    # text to prepare: files, folders or patterns such as 'text/*.txt'; .txt, .jsonl (field `text`)
    # and .parquet (column `text`) are read; if not given, the data set's own text
    input: tuple[str, ...] = ()
    # text for validation, given like --input; if not given, a part of --input is held out
    val_input: tuple[str, ...] = ()
    # folder that train.bin, val.bin and meta.json go to; if not given, the folder of the script
    out_dir: str = ''
    # number of tokenizing processes; None: one per core, at most 8, where reading becomes the limit
    num_proc: int | None = None
    # encoding of the .txt and .jsonl files, such as utf-8, utf-16 or latin-1
    encoding: str = 'utf-8'
    # fraction of the text held out for validation, at most 0.5; None: the data set's own choice
    val_fraction: float | None = None
    # which documents are held out for validation
    seed: int = 2357
    # read only this many documents (of each split, if both are given): a small sample; None: all
    max_docs: int | None = None
    # commit, tag or branch of the Hugging Face data set; meta.json records the commit
    revision: str = 'main'

    def __post_init__(self):
        at_least(self, num_proc=1, max_docs=1)
        between(self, num_proc=(0, 62))  # Windows' limit of a pool
        if self.val_fraction is not None and not 0 < self.val_fraction <= 0.5:
            raise UserError(f'--val_fraction={self.val_fraction}: must be above 0 and at most 0.5')


# ---- the command


def prepare(
    argv, script, doc, download, kind, hub=False, continuous=False, separator=None, val_fraction=0.1
):
    """What every data/NAME/prepare.py does with its arguments `argv`.

    script, doc: the script's path and docstring.
    download(cfg): returns ({'train': source[, 'val': source]}, facts for meta.json), the text to
    prepare without --input; source.py says what a source is.
    kind: of the tokenizer, 'char' or 'gpt2'.
    hub: whether `download` reads Hugging Face and brings its own validation split.
    continuous: one text rather than documents, so there is no end-of-text token and the end is held
    out.
    separator: what stands between the documents of a .txt file.
    val_fraction: the default of --val_fraction.

    Raises UserError for what a user can mend; an earlier preparation in the folder stays then.
    """
    show_help(doc, 'nanonag/data/writer.py:PrepareConfig')
    options = parse(argv, PrepareConfig)
    cfg = build(PrepareConfig, options)
    refuse_unused(cfg, options, hub, continuous)
    out_dir = Path(cfg.out_dir or Path(script).resolve().parent)
    with failures_as_user_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        if kind == 'gpt2':
            tokenizer.gpt2_encoding()  # a missing vocabulary is better known before a long download
        files = local_files(cfg)
        sources, facts = open_files(files, cfg, separator) if files else download(cfg)
        for split in sources:
            sources[split] = first_documents(sources[split], cfg.max_docs)
        tokens = make_tokenizer(kind, sources)
        fraction = cfg.val_fraction or val_fraction
        pieces, rule = hold_out(sources, fraction, cfg.seed, continuous)
        facts = {
            'prepared_by': f'data/{Path(script).resolve().parent.name}/prepare.py',
            **facts,
            'split': rule,
            'max_docs': cfg.max_docs,
            'versions': versions(),
        }
        num_proc = cfg.num_proc or min(8, usable_cores())
        end_documents = not continuous
        meta = write(out_dir, tokens, pieces, facts, time_stamps(files), num_proc, end_documents)
    for split in SPLITS:
        n_tokens = meta['tokens'][split]
        print(f'{out_dir / split}.bin: {n_tokens:,} tokens, sha256 {meta["sha256"][split]}')


def refuse_unused(cfg, options, hub, continuous):
    """Raise UserError for a given option that would have no effect."""
    reasons = {}
    if not cfg.input:
        reasons['val_input'] = 'it goes with --input'
        reasons['encoding'] = 'it is for the files of --input'
    if cfg.input or not hub:
        reasons['revision'] = 'nothing is read from Hugging Face'
    if cfg.val_input or (hub and not cfg.input):
        reasons['val_fraction'] = 'the validation split is given'
        reasons['seed'] = 'validation documents are not chosen'
    if continuous:
        reasons['seed'] = 'validation documents are not chosen'
    for key in sorted(reasons.keys() & options.keys()):
        raise UserError(f'--{key} has no effect here: {reasons[key]}')


@contextlib.contextmanager
def failures_as_user_errors(out_dir):
    """Raise UserError for failing files and killed processes; `out_dir` is for the message."""
    try:
        yield
    except OSError as error:
        raise UserError(f'{error.filename or out_dir}: {error.strerror or error}') from error
    except BrokenProcessPool:
        raise UserError(
            'a tokenizing process was killed, perhaps because memory ran out; '
            'run the command again with a lower --num_proc: it continues where it stopped'
        ) from None


def local_files(cfg):
    """{'train': the files of --input, 'val': those of --val_input}, without what is not given.

    Raises UserError for a file that is in both.
    """
    files = {}
    for split, inputs in (('train', cfg.input), ('val', cfg.val_input)):
        if inputs:
            files[split] = find_files(inputs)
    train_files = {path.resolve() for path in files.get('train', ())}
    for path in files.get('val', ()):
        if path.resolve() in train_files:
            raise UserError(
                f'--val_input: {path} is in --input too; validation text must not be trained on'
            )
    return files


def open_files(files, cfg, separator):
    """The sources of local files {split: paths}, and what meta.json tells about the files."""
    sources, descriptions = {}, {}
    for split, paths in files.items():
        sources[split] = functools.partial(read_files, paths, cfg.encoding, separator)
        descriptions[split] = [{'name': path.name, 'bytes': path.stat().st_size} for path in paths]
    return sources, {'files': descriptions, 'encoding': cfg.encoding}


def make_tokenizer(kind, sources):
    """GPT-2's tokenizer, or one of all characters that occur in the sources."""
    if kind == 'gpt2':
        return tokenizer.GPT2Tokenizer()
    chars = set()
    for source in sources.values():
        for text, _ in source():
            chars.update(text)
    # without any text there must be some character; `write` reports that the text is too short
    return tokenizer.CharTokenizer(sorted(chars) or ['\n'])


def versions():
    """{name: version} of Python and of the installed packages that text and tokens come from."""
    packages = {
        name: importlib.metadata.version(name)
        for name in ('tiktoken', 'datasets', 'pyarrow')
        if importlib.util.find_spec(name)
    }
    return {'python': platform.python_version(), **packages}


def time_stamps(files):
    """[path, time of change in ns] of each local file: a changed file starts a preparation over."""
    paths = chain.from_iterable(files.values())
    return [[str(path.resolve()), path.stat().st_mtime_ns] for path in paths]


def usable_cores():
    """The number of cores that this process may run on, where the system tells; else of all."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- writing


def write(out_dir, tokens, pieces, facts, stamps=(), num_proc=1, end_documents=True):
    """Tokenize pieces (split, text, last) and write them as a data folder.

    tokens: the tokenizer. facts: what meta.json tells about the source. stamps: what else must be
    the same for an unfinished preparation to be continued. num_proc: of tokenizing processes.
    end_documents: whether an end-of-text token follows each document.

    Returns the content of meta.json. Raises UserError for text that cannot be used, and then leaves
    no unfinished files.
    """
    # through JSON, to compare with what was read from it
    identity = json.loads(json.dumps([tokens.description, facts, list(stamps), end_documents]))
    progress = read_progress(out_dir, identity)
    dtype = token_dtype(tokens.vocab_size)
    bins = {}
    for split in SPLITS:
        path = out_dir / f'{split}.bin{PART}'
        bins[split] = Bin(path, dtype, tokens.byte_lengths, keep=progress['bytes'][split])
    rest = islice(pieces, progress['pieces'], None)
    encoded = encode_stream(tokens, rest, end_documents, num_proc)
    try:
        fill(bins, encoded, progress, out_dir / PROGRESS)
        check_lengths(bins)
    except UserError:  # the input has to change, so nothing here can be continued
        for path in (*(bins[split].path for split in SPLITS), out_dir / PROGRESS):
            path.unlink(missing_ok=True)
        raise
    meta = {
        'version': VERSION,
        'tokenizer': tokens.description,
        'vocab_size': tokens.vocab_size,
        'dtype': dtype,
        'tokens': {split: bins[split].tokens for split in SPLITS},
        'max_id': {split: bins[split].max_id for split in SPLITS},
        'bytes': {split: bins[split].bytes for split in SPLITS},
        'sha256': {split: bins[split].sha256.hexdigest() for split in SPLITS},
        'source': {**facts, 'documents': progress['documents']},
    }
    (out_dir / 'meta.json').unlink(missing_ok=True)  # an older preparation ends here
    for split in SPLITS:
        os.replace(bins[split].path, out_dir / f'{split}.bin')
    write_json(out_dir / 'meta.json', meta)
    (out_dir / PROGRESS).unlink(missing_ok=True)
    return meta


def fill(bins, encoded, progress, path):
    """Append the encoded chunks to the bins, {split: Bin}, bring them to the disk and close them.

    Keeps `progress` up to date and saves it as `path` every SAVE_EVERY seconds.
    """
    n_tokens = sum(part.tokens for part in bins.values())
    bar = tqdm(disable=None, unit=' tokens', unit_scale=True, initial=n_tokens, mininterval=1)
    saved = time.monotonic()
    try:
        for ids, documents, n_pieces in encoded:
            for split in SPLITS:
                bins[split].append(ids[split])
                progress['documents'][split] += documents[split]
                bar.update(len(ids[split]))
            progress['pieces'] += n_pieces
            if time.monotonic() - saved > SAVE_EVERY:
                progress['bytes'] = {split: bins[split].sync() for split in SPLITS}
                write_json(path, progress)
                saved = time.monotonic()
        for split in SPLITS:
            bins[split].sync()
    finally:
        bar.close()
        for split in SPLITS:
            bins[split].file.close()


def check_lengths(bins):
    """Raise UserError unless each split has MIN_TOKENS tokens."""
    few = [
        f'{split} has {bins[split].tokens}' for split in SPLITS if bins[split].tokens < MIN_TOKENS
    ]
    if few:
        raise UserError(
            f'too little text: {" and ".join(few)} tokens, and each of train and val needs at '
            f'least {MIN_TOKENS} (to train on it, block_size + 1); '
            'give more text or a larger --val_fraction'
        )


def read_progress(out_dir, identity):
    """How far an unfinished preparation in the folder came: a dict with the number of pieces read,
    and of documents and bytes written for each split.

    All zero if there is none with this `identity`: the inputs and options it was made with.
    """
    beginning = {
        'identity': identity,
        'pieces': 0,
        'documents': dict.fromkeys(SPLITS, 0),
        'bytes': dict.fromkeys(SPLITS, 0),
    }
    try:
        progress = json.loads((out_dir / PROGRESS).read_text(encoding='utf-8'))
        usable = progress.keys() == beginning.keys() and progress['identity'] == identity
        if usable:
            sizes = {split: (out_dir / f'{split}.bin{PART}').stat().st_size for split in SPLITS}
            usable = all(sizes[split] >= progress['bytes'][split] for split in SPLITS)
    except FileNotFoundError:
        return beginning
    except (ValueError, AttributeError):
        usable = False
    if not usable:
        print(
            f'{out_dir}: the unfinished preparation there had other inputs or options; '
            'starting over'
        )
        return beginning
    n_documents = sum(progress['documents'].values())
    print(f'{out_dir}: continuing the unfinished preparation after {n_documents:,} documents')
    return progress


def write_json(path, value):
    """Write `value` as JSON under another name and rename, so that the file is always whole."""
    temporary = Path(f'{path}.tmp')
    with open(temporary, 'w', encoding='utf-8') as file:
        json.dump(value, file, indent=1)
        file.write('\n')
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
