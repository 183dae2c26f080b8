"""The checkpoint format: what a file must hold, and how to read it so that no file can do harm."""

import os
import re
import zipfile
from pathlib import Path

import torch

from nanonag.checkpoint import shards
from nanonag.checkpoint.checksum import digest, is_stored
from nanonag.checkpoint.folder import history
from nanonag.cli import UserError, first_line, warn, world

VERSION = 1

# The keys of best.pt, all of which ckpt.pt has too; `shards` only where the weights are sharded.
BEST_KEYS = ('version', 'model', 'shards', 'gpt_config', 'step', 'best_val_loss', 'tokenizer')


def is_dict(value):
    return isinstance(value, dict)


def is_dict_of_dicts(value):
    return isinstance(value, dict) and all(map(is_dict, value.values()))


def is_count(value):
    return type(value) is int and value >= 0  # not isinstance: True is no count


def is_float(value):
    return isinstance(value, float)


def is_text_or_none(value):
    return value is None or isinstance(value, str)


def is_split_digests(value):
    """Whether it is {'train': text, 'val': text}."""
    if not isinstance(value, dict) or value.keys() != {'train', 'val'}:
        return False
    return all(isinstance(sha, str) for sha in value.values())


def is_rng_states(value):
    """Whether it is a list, by rank, of non-empty lists of tensors."""
    return isinstance(value, list) and all(map(is_rng_state, value))


def is_rng_state(value):
    return isinstance(value, list) and len(value) > 0 and all(map(torch.is_tensor, value))


def is_weights(value, sharded):
    """Whether it is a dict of floating-point tensors by name.

    With `sharded` the tensors are stored elsewhere and may be None.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    return all(is_weight(item) or (sharded and item is None) for item in value.values())


def is_weight(value):
    return torch.is_tensor(value) and value.is_floating_point()


# The entries of any checkpoint that have to be dicts where they are present.
CONFIGS = ('gpt_config', 'train_config', 'shards')

# What a resumed run takes from a full state as it is, with the predicate for each value. Together
# with `train_config`, BEST_KEYS and `digest` these are all the keys of ckpt.pt.
RESUMABLE = {
    'step': is_count,
    'skipped': is_count,
    'best_val_loss': is_float,
    'wandb_id': is_text_or_none,
    'data': is_split_digests,
    'rng': is_rng_states,
    'optimizer': is_dict_of_dicts,
    'scaler': is_dict,
}


def read(path, whole=True):
    """The checked dict in a checkpoint file of ours or of nanoGPT; no code in the file is run.

    The tensors of a sharded checkpoint are read and put together; with whole=False they are only
    checked and are None in the dict. Raises UserError for a file that is not a whole checkpoint.
    """
    state = load(path)
    if 'shards' not in state:
        return state
    return with_shards(state, Path(path).parent, whole)


def read_latest(folder, whole=True, best=False):
    """The newest readable full state in a run's folder, as a dict; None if there is no file.

    With best=True best.pt is preferred if it is readable; `whole` is that of `read`. Falls back to
    an older file with a warning. Raises UserError if there are files and none is readable.
    """
    folder = Path(folder)
    candidates = [folder / 'ckpt.pt', *history(folder)]
    if best:
        candidates.insert(0, folder / 'best.pt')
    candidates = [path for path in candidates if os.path.exists(path)]
    if not candidates:
        return None
    for path, fallback in zip(candidates, candidates[1:]):
        try:
            return read(path, whole)
        except UserError as error:
            if world()[0] == 0:
                warn(f'{error}; falling back to {fallback.name}')
    return read(candidates[-1], whole)


def with_shards(state, folder, whole=True):
    """A sharded checkpoint's dict, its tensors read from `folder` and put in.

    With whole=False the shards are only checked and the dict is returned as it is. Raises UserError
    if a shard is missing or damaged.
    """
    prefix = '' if 'optimizer' in state else 'model.'  # best.pt needs the weights only
    tensors = shards.read(folder, state['shards'], whole, prefix)
    return shards.join(state, tensors, folder) if whole else state


def load(path):
    """As `read`, but the tensors of a sharded checkpoint stay None and its shards unread."""
    if os.path.exists(path) and not os.path.isfile(path):
        # Reading a device or a pipe might never end.
        raise UserError(f'{path}: not a readable checkpoint (not a file)')
    try:
        require_uncompressed(path)
        content = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        return checked(content, path)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(
            f'{path}: no such checkpoint; train one first or give the right --out_dir'
        ) from None
    except Exception as error:  # a damaged or hostile file can fail anywhere in the unpickler
        raise UserError(f'{path}: not a readable checkpoint ({first_line(error):.200})') from None


def require_uncompressed(path):
    """ValueError for a compressed archive: a small file could expand to any amount of memory."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError('compressed: it could expand to any amount of memory')


def checked(content, path):
    """The dict for what torch.load found in a file, translated if it is nanoGPT's.

    Raises UserError, or ValueError from `examine`, unless it is a complete checkpoint.
    """
    if is_dict(content) and 'model_args' in content:
        state = from_nanogpt(content)
        examine(state)
    else:
        require_version(content, path)
        examine(content)
        if content.get('digest') != digest(content):
            raise UserError(f'{path}: its contents do not match its digest; the file is damaged')
        state = content
    require_usable(state, path)
    return state


def require_version(content, path):
    """UserError unless the content is a dict of this program's version."""
    version = content.get('version') if is_dict(content) else None
    if not isinstance(version, (int, str)):
        # Any other object could take forever to print, or to compare.
        version = f'a {type(version).__name__}'
    if version != VERSION:
        raise UserError(
            f'{path}: not a checkpoint of this program (version {version!r:.20}, '
            f'expected {VERSION})'
        )


def require_usable(state, path):
    """UserError naming the first entry that is missing or of a wrong kind."""
    if not is_weights(state.get('model'), sharded='shards' in state):
        raise UserError(f'{path}: holds no weights under `model`')
    if 'gpt_config' not in state:
        raise UserError(f'{path}: holds no `gpt_config`')
    predicates = dict.fromkeys(CONFIGS, is_dict)
    if 'train_config' in state:  # a full state
        predicates |= RESUMABLE
    for name, is_usable in predicates.items():
        if name in state and not is_usable(state[name]):
            raise UserError(f'{path}: holds no usable `{name}`')


def examine(value):
    """ValueError unless `value` is made of dicts, lists, tuples, plain values and stored tensors.

    A container may stand in one place only: a small file could otherwise unfold to any size for
    whoever walks through it.
    """
    _examine(value, set())


def _examine(value, seen):
    """`seen` holds the ids of the containers met so far."""
    if isinstance(value, torch.Tensor):
        # is_stored raises an exception for a sparse tensor, which has no storage.
        if value.device.type != 'cpu' or not is_stored(value):
            raise ValueError('a tensor that is not stored whole')
    elif isinstance(value, (dict, list, tuple)):
        if value and id(value) in seen:
            raise ValueError('the same container in two places')
        seen.add(id(value))
        for item in children(value):
            _examine(item, seen)
    elif not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f'a {type(value).__name__} that has no place in a checkpoint')


def tensors(value):
    """Yields all tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in children(value):
            yield from tensors(item)


def children(container):
    """The values of a dict, the items of a list or tuple."""
    return container.values() if isinstance(container, dict) else container


def from_nanogpt(content):
    """A nanoGPT checkpoint's dict in our terms: its weights, with update='gd'."""
    arguments = content['model_args'] if is_dict(content['model_args']) else {}
    wrappers = re.compile(r'^(_orig_mod\.|module\.)+')  # of torch.compile and DDP
    weights = {}
    for name, weight in content['model'].items():
        if not name.endswith('.attn.bias'):  # a causal mask, which nanoGPT stores as a buffer
            weights[wrappers.sub('', name)] = weight
    return {
        'version': VERSION,
        'model': weights,
        'gpt_config': {'update': 'gd', **arguments},
        'step': content.get('iter_num', 0),
    }
