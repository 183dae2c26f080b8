"""Checkpoints: written so that a kill or a full disk at any moment leaves a good one, read so that
no file can do harm.

A run's folder holds ckpt.pt (the whole state), ckpt-STEP.pt (the keep_last before it), best.pt (the
weights of the best validation loss) and `lock`, held by the run. A checkpoint is a dict of tensors
and plain types with a digest of its contents. With --save_sharded the tensors lie beside it in
shards-STEP/, and the dict names them (shards.py).

    python checkpoint.py out/ckpt.pt whole.pt      one file of a sharded checkpoint
"""

import os
import re
import zipfile
from pathlib import Path

import torch

from nanonag.checkpoint import shards
from nanonag.checkpoint.checksum import digest, is_stored
from nanonag.cli import UserError, warn, world

VERSION = 1
RESUMABLE = {  # what a resume takes from a full state as it is, and what that has to be
    'step': lambda value: type(value) is int and value >= 0,
    'skipped': lambda value: type(value) is int and value >= 0,
    'best_val_loss': lambda value: isinstance(value, float),
    'wandb_id': lambda value: value is None or isinstance(value, str),
    'data': lambda value: (
        isinstance(value, dict)
        and value.keys() == {'train', 'val'}
        and {type(sha) for sha in value.values()} == {str}
    ),
    'rng': lambda value: (
        isinstance(value, list)
        and all(isinstance(one, list) and one and all(map(torch.is_tensor, one)) for one in value)
    ),
    'optimizer': lambda value: (
        isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())
    ),
    'scaler': lambda value: isinstance(value, dict),
}
# what best.pt holds of a state
WEIGHTS = ('version', 'model', 'shards', 'gpt_config', 'step', 'best_val_loss', 'tokenizer')


def examine(value, seen):
    """ValueError unless `value` is nested of dicts, lists, tuples, plain values and whole tensors
    in main memory.

    No container may stand in two places (`seen` holds their ids): a small file could be of any size
    to who walks it."""
    if isinstance(value, torch.Tensor):
        # a sparse one has no storage to ask and fails, too
        if value.device.type != 'cpu' or not is_stored(value):
            raise ValueError('a tensor that is not stored whole')
    elif isinstance(value, (dict, list, tuple)):
        if value and id(value) in seen:
            raise ValueError('the same container in two places')
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            examine(item, seen)
    elif not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f'a {type(value).__name__} that has no place in a checkpoint')


def tensors(value):
    """All tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def run_files(folder):
    """The files of a run that are in the folder."""
    named = (Path(folder) / name for name in ('ckpt.pt', 'best.pt', 'metrics.jsonl'))
    return [path for path in named if path.exists()] + history(folder) + shards.folders(folder)


def history(folder):
    """The ckpt-STEP.pt files, newest first."""
    return sorted(
        (p for p in Path(folder).glob('ckpt-*.pt') if re.fullmatch(r'ckpt-\d{8,}\.pt', p.name)),
        reverse=True,
    )


def read(path, whole=True):
    """The checked dict in a checkpoint file of ours or of nanoGPT; UserError for anything else. No
    code of it is run.

    The tensors of a sharded checkpoint are read and put together, or with whole=False only checked,
    and None in the dict."""
    state = load(path)
    return with_shards(state, Path(path).parent, whole) if 'shards' in state else state


def with_shards(state, folder, whole=True):
    """A sharded checkpoint's dict with its tensors, put together; with whole=False as it is, the
    shards only checked."""
    tensors = shards.read(
        folder, state['shards'], whole, prefix='' if 'optimizer' in state else 'model.'
    )
    return shards.joined(state, tensors, folder) if whole else state


def load(path):
    """`read` without the shards."""
    if os.path.exists(path) and not os.path.isfile(path):
        # a device or pipe has no end
        raise UserError(f'{path}: not a readable checkpoint (not a file)')
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError('packed: it would take any amount of memory')
        return checked(torch.load(path, map_location='cpu', weights_only=True, mmap=True), path)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(
            f'{path}: no such checkpoint; train one first or give the right --out_dir'
        ) from None
    except Exception as error:  # a damaged or hostile file can fail anywhere in the unpickler
        raise UserError(
            f'{path}: not a readable checkpoint ({(str(error).strip() or type(error).__name__).splitlines()[0]:.200})'
        ) from None


def checked(state, path):
    """The dict that was in a file, in our terms; UserError if it is not a whole checkpoint."""
    nanogpt = isinstance(state, dict) and 'model_args' in state
    if nanogpt:
        state = from_nanogpt(state)
    elif not isinstance(state, dict) or state.get('version') != VERSION:
        version = state.get('version') if isinstance(state, dict) else None
        # which may print without end
        version = version if isinstance(version, (int, str)) else f'a {type(version).__name__}'
        raise UserError(
            f'{path}: not a checkpoint of this program (version {version!r:.20}, expected {VERSION})'
        )
    examine(state, set())
    if not nanogpt and state.get('digest') != digest(state):
        raise UserError(f'{path}: its contents do not match its digest; the file is damaged')
    weights, elsewhere = state.get('model'), 'shards' in state
    if not isinstance(weights, dict) or not all(
        isinstance(name, str)
        and (w is None and elsewhere or torch.is_tensor(w) and w.is_floating_point())
        for name, w in weights.items()
    ):
        raise UserError(f'{path}: holds no weights under `model`')
    for config, required in (('gpt_config', True), ('train_config', False), ('shards', False)):
        if not isinstance(state.get(config, None if required else {}), dict):
            raise UserError(f'{path}: holds no `{config}`')
    if wrong := [
        name
        for name, is_good in RESUMABLE.items()
        if 'train_config' in state and name in state and not is_good(state[name])
    ]:
        raise UserError(f'{path}: holds no usable `{wrong[0]}`')
    return state


def read_latest(folder, whole=True, best=False):
    """The newest readable full state of a run's folder (`whole` as in read), or its best weights if
    they are asked for and readable; None if there is no file at all, UserError if none is
    readable."""
    folder, failed = Path(folder), None
    candidates = [
        p
        for p in ([folder / 'best.pt'] * best + [folder / 'ckpt.pt', *history(folder)])
        if os.path.exists(p)
    ]
    for path, following in zip(candidates, [*candidates[1:], None]):
        try:
            return read(path, whole)
        except UserError as error:
            if following and world()[0] == 0:
                warn(f'{error}; falling back to {following.name}')
            failed = error
    if failed:
        raise failed
    return None


def from_nanogpt(state):
    """A nanoGPT checkpoint's dict in our terms: its weights, in update='gd'."""
    arguments = state['model_args'] if isinstance(state['model_args'], dict) else {}
    prefix = re.compile(r'^(_orig_mod\.|module\.)+')  # compile's and DDP's
    weights = {prefix.sub('', name): w for name, w in state['model'].items()}
    # its causal mask
    weights = {name: w for name, w in weights.items() if not name.endswith('.attn.bias')}
    return {
        'version': VERSION,
        'model': weights,
        'gpt_config': {'update': 'gd', **arguments},
        'step': state.get('iter_num', 0),
    }
