"""What a prepared data folder holds: train.bin and val.bin (raw little-endian token ids) and
meta.json, which tells what they are. A folder may come from a stranger: meta.json is read as JSON,
bounded in size, and every entry checked."""

import json
import os
import re
from pathlib import Path

from nanonag.cli import UserError
from nanonag.configurator import nearest
from nanonag.data import tokenizer
from nanonag.files import ROOT

SPLITS = ('train', 'val')
MAX_BYTES = 2**25  # of meta.json: room for a vocabulary of all of Unicode


def token_dtype(vocab_size):
    """The dtype of the ids on disk, always little-endian there ('<u2', '<u4')."""
    return 'uint16' if vocab_size <= 65535 else 'uint32'


def find_data(dataset):
    """The folder of `dataset`: a name under data/ or a path."""
    named = ROOT / 'data' / dataset
    # which does not mind names of any length
    return named if os.path.isdir(named) else Path(dataset)


def read_meta(folder):
    """meta.json of a data folder as a dict with checked entries; UserError says what is wrong and
    what to do."""
    folder = Path(folder)
    path = folder / 'meta.json'
    try:
        with open(path, 'rb') as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}; {how_to_prepare(folder)}') from None
    if len(text) > MAX_BYTES:
        raise UserError(
            f'{path}: larger than the {MAX_BYTES} bytes it may have; {how_to_prepare(folder)}'
        )
    try:
        meta = json.loads(text.decode('utf-8'))
    except (ValueError, RecursionError) as error:
        reason = 'nested too deeply' if isinstance(error, RecursionError) else error
        raise UserError(f'{path}: not valid JSON ({reason}); {how_to_prepare(folder)}') from None
    check_meta(meta, path)
    return meta


def check_meta(meta, path):
    """UserError unless every entry is there and makes sense beside the others."""

    def require(condition, rule, *keys):
        if not condition:
            value = meta
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            raise UserError(
                f'{path}: {".".join(keys) or "the file"} must be {rule}, not {tokenizer.shorten(value)}; '
                f'{how_to_prepare(path.parent)}'
            )

    require(isinstance(meta, dict), 'a JSON object')
    require(
        is_int(meta.get('version')) and meta['version'] == 1,
        '1, the version this program reads',
        'version',
    )
    try:
        entries = tokenizer.from_description(meta.get('tokenizer')).vocab_size
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
    vocab_size = meta.get('vocab_size')
    require(
        is_int(vocab_size) and vocab_size == entries, f"the tokenizer's {entries}", 'vocab_size'
    )
    dtype = token_dtype(entries)
    require(meta.get('dtype') == dtype, f'{dtype!r} for {entries} entries', 'dtype')
    for key in ('tokens', 'max_id', 'sha256', *('bytes',) * ('bytes' in meta)):
        value = meta.get(key)
        require(
            isinstance(value, dict) and value.keys() == set(SPLITS),
            'an object with train and val',
            key,
        )
    for split in SPLITS:
        count, max_id, digest = (meta[key][split] for key in ('tokens', 'max_id', 'sha256'))
        require(is_int(count) and 0 < count < 2**48, 'a positive count', 'tokens', split)
        require(is_int(max_id) and 0 <= max_id < entries, f'an id below {entries}', 'max_id', split)
        is_digest = isinstance(digest, str) and re.fullmatch('[0-9a-f]{64}', digest)
        require(is_digest, '64 hexadecimal digits', 'sha256', split)
        size = meta.get('bytes', meta['tokens'])[split]
        require(is_int(size) and 0 <= size < 2**56, 'a count', 'bytes', split)
    require(isinstance(meta.get('source'), dict), 'an object', 'source')


def is_int(value):
    return type(value) is int  # True is no number


def how_to_prepare(folder):
    """The command that makes the data folder, or the names of those that can be made."""
    scripts = {
        script.parent.name: script.relative_to(ROOT)
        for script in sorted(ROOT.glob('data/*/prepare.py'))
    }
    if folder.name in scripts:
        same = folder.resolve() == (ROOT / 'data' / folder.name).resolve()
        return f'run: python {scripts[folder.name]}' + ('' if same else f' --out_dir={folder}')
    if near := nearest(folder.name, scripts):
        return f'no data set of that name{near}'
    return f'prepare it with: python data/NAME/prepare.py --out_dir={folder} (NAME: {", ".join(scripts)})'
