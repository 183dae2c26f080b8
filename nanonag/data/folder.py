"""What a prepared data folder holds: train.bin and val.bin (raw little-endian token ids) and
meta.json, which describes them.

A folder may come from a stranger: meta.json is read as JSON, bounded in size, and every entry is
checked.
"""

import json
import os
import re
from pathlib import Path

from nanonag.cli import UserError
from nanonag.configurator import nearest
from nanonag.data import tokenizer
from nanonag.files import ROOT

SPLITS = ('train', 'val')
VERSION = 1  # of meta.json's format
MAX_META_BYTES = 2**25  # room for a vocabulary of all of Unicode


def token_dtype(vocab_size):
    """The dtype of token ids on disk: 'uint16' or 'uint32', stored little-endian."""
    return 'uint16' if vocab_size <= 65535 else 'uint32'


def find_data(dataset):
    """The folder of `dataset`, which is the name of a folder under data/ or a path, as a Path."""
    named = ROOT / 'data' / dataset
    # os.path.isdir: Path.is_dir raises OSError for a name that is too long
    return named if os.path.isdir(named) else Path(dataset)


def read_meta(folder):
    """Read and check meta.json of a data folder.

    Returns its content as a dict. Raises UserError, which names the command that prepares the data,
    if the file is missing, too large, not JSON or has a wrong entry.
    """
    folder = Path(folder)
    path = folder / 'meta.json'
    try:
        with open(path, 'rb') as file:
            data = file.read(MAX_META_BYTES + 1)
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}; {how_to_prepare(folder)}') from None
    if len(data) > MAX_META_BYTES:
        raise UserError(
            f'{path}: larger than the {MAX_META_BYTES} bytes allowed; {how_to_prepare(folder)}'
        )
    try:
        meta = json.loads(data.decode('utf-8'))
    except ValueError as error:
        raise UserError(f'{path}: not valid JSON ({error}); {how_to_prepare(folder)}') from None
    except RecursionError:
        raise UserError(
            f'{path}: not valid JSON (nested too deeply); {how_to_prepare(folder)}'
        ) from None
    check_meta(meta, path)
    return meta


def check_meta(meta, path):
    """Check that meta.json's content has every entry and that the entries agree with each other.

    Raises UserError for the first entry that does not; `path` is for the message.
    """
    require(isinstance(meta, dict), path, 'the file', meta, 'a JSON object')
    version = meta.get('version')
    readable = is_int(version) and version == VERSION
    require(readable, path, 'version', version, f'{VERSION}, the version this program reads')
    try:
        n_entries = tokenizer.from_description(meta.get('tokenizer')).vocab_size
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
    vocab_size = meta.get('vocab_size')
    agrees = is_int(vocab_size) and vocab_size == n_entries
    require(agrees, path, 'vocab_size', vocab_size, f"the tokenizer's {n_entries}")
    dtype = meta.get('dtype')
    expected = token_dtype(n_entries)
    require(dtype == expected, path, 'dtype', dtype, f'{expected!r} for {n_entries} entries')
    check_splits(meta, path, n_entries)
    origin = meta.get('source')
    require(isinstance(origin, dict), path, 'source', origin, 'an object')


def check_splits(meta, path, n_entries):
    """Check the entries of meta.json that hold a value for train and one for val.

    Folders without 'bytes' are valid: the entry is needed for bits per byte only.
    """

    def is_id(value):
        return is_int(value) and 0 <= value < n_entries

    rules = {
        'tokens': (is_token_count, 'a positive count'),
        'max_id': (is_id, f'an id below {n_entries}'),
        'sha256': (is_sha256, '64 hexadecimal digits'),
        'bytes': (is_byte_count, 'a count'),
    }
    if 'bytes' not in meta:
        del rules['bytes']
    for key, (is_valid, rule) in rules.items():
        values = meta.get(key)
        has_splits = isinstance(values, dict) and values.keys() == set(SPLITS)
        require(has_splits, path, key, values, 'an object with train and val')
        for split in SPLITS:
            require(is_valid(values[split]), path, f'{key}.{split}', values[split], rule)


def require(condition, path, entry, value, rule):
    """Raise UserError unless `condition` holds: `entry` must be what `rule` says, not `value`."""
    if not condition:
        raise UserError(
            f'{path}: {entry} must be {rule}, not {tokenizer.shorten(value)}; '
            f'{how_to_prepare(path.parent)}'
        )


def is_int(value):
    """Whether `value` is an integer; True and False are not."""
    return type(value) is int


def is_token_count(value):
    """Whether `value` can be the number of tokens of a split."""
    return is_int(value) and 0 < value < 2**48


def is_byte_count(value):
    """Whether `value` can be the number of bytes of text in a split."""
    return is_int(value) and 0 <= value < 2**56


def is_sha256(value):
    """Whether `value` is a SHA-256 digest as hexadecimal text."""
    return isinstance(value, str) and re.fullmatch('[0-9a-f]{64}', value) is not None


def how_to_prepare(folder):
    """What to do about a missing or damaged data folder, as the end of an error message.

    The command that prepares `folder` if data/ has a script of that name; else the nearest such
    name, or all of them.
    """
    scripts = {path.parent.name: path for path in sorted(ROOT.glob('data/*/prepare.py'))}
    if folder.name in scripts:
        script = scripts[folder.name]
        command = f'run: python {script.relative_to(ROOT)}'
        if folder.resolve() == script.parent.resolve():
            return command
        return f'{command} --out_dir={folder}'
    if near := nearest(folder.name, scripts):
        return f'no data set of that name{near}'
    names = ', '.join(scripts)
    return f'prepare it with: python data/NAME/prepare.py --out_dir={folder} (NAME: {names})'
