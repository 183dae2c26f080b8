"""Checkpoints: written so that a kill or a full disk at any moment leaves a good one, read so that
no file can do harm.

A run's folder holds ckpt.pt (the whole state), ckpt-STEP.pt (the keep_last before it), best.pt (the
weights of the best validation loss) and `lock`, held by the run. A checkpoint is a dict of tensors
and plain types with a digest of its contents. With --save_sharded the tensors lie beside it in
shards-STEP/, and the dict names them (sharded.py).

    python checkpoint.py out/ckpt.pt whole.pt      one file of a sharded checkpoint
"""

import errno
import hashlib
import math
import os
import platform
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import sharded
from configurator import UserError, convert, run
from model import GPT, GPTConfig
from runtime import warn, world

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

VERSION = 1
PRETRAINED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # what GPT.from_pretrained downloads
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


def digest(value, sha=None):
    """SHA-256 over the contents of nested dicts and lists of tensors and plain values, but a key
    `digest`, as hex."""
    top, sha = sha is None, sha or hashlib.sha256()
    if top and isinstance(value, dict):
        value = {key: item for key, item in value.items() if key != 'digest'}
    if isinstance(value, torch.Tensor):
        if not is_stored(value):
            raise ValueError('a tensor larger than what the file stores of it')
        sha.update(f'{value.dtype}{tuple(value.shape)}'.encode())
        sha.update(value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    elif isinstance(value, (dict, list, tuple)):
        for item in sorted(value.items()) if isinstance(value, dict) else value:
            digest(item, sha)
        sha.update(f'end of {len(value)}'.encode())
    else:
        sha.update(repr(value).encode())
    return sha.hexdigest() if top else None


def is_stored(tensor):
    """Whether its memory holds all its elements: strides of zero would make a tensor of any size of
    one."""
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()


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


def is_finite(tensor):
    """As tensor.isfinite().all(), but 30 times as fast: NaN and infinity show in the extremes."""
    return not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax())


def tensors(value):
    """All tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def snapshot(value, into=None, copies=None):
    """A copy in main memory that training can't change any more, made in the memory of the snapshot
    `into` where it fits.

    Fresh memory costs more than the copy. From a GPU it is page-locked, which is several times as
    fast; the caller has to synchronize. Tensors that share their memory, as tied weights do, still
    do so (`copies`: those made so far)."""
    copies = {} if copies is None else copies
    if isinstance(value, DTensor):
        return value.detach().to('cpu', copy=True)
    if isinstance(value, torch.Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            if not isinstance(into, torch.Tensor) or (into.shape, into.dtype) != (
                value.shape,
                value.dtype,
            ):
                into = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            copies[key] = into.copy_(value.detach(), non_blocking=value.is_cuda)
        return copies[key]
    if isinstance(value, dict):
        return {
            key: snapshot(item, into.get(key) if isinstance(into, dict) else None, copies)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        before = into if isinstance(into, list) and len(into) == len(value) else [None] * len(value)
        return [snapshot(item, old, copies) for item, old in zip(value, before)]
    return value


class Saver:
    """Writes checkpoints into `folder` from a thread of its own: training waits for the copy in
    memory only.

    `group`: a gloo group of its own, if every rank writes its shard of the tensors; without, there
    is one Saver, on rank 0."""

    def __init__(self, folder, keep_last=1, last_step=None, best_val_loss=math.inf, group=None):
        self.folder, self.keep_last, self.group = Path(folder), keep_last, group
        self.last_step, self.best_val_loss = last_step, best_val_loss  # of the ckpt.pt in place
        self.best = None  # what best.pt shall hold and does not yet
        self.pending, self.memory = None, None

    def save(self, state, best=False):
        """Hands a full state over as ckpt.pt, and its weights as best.pt; waits for the write
        before it only.

        What goes wrong is told, not raised: the run goes on and tries again at the next save. Then
        best.pt gets the weights it should have had; until it has them, ckpt.pt keeps the
        best_val_loss of the best.pt in place, so that a run resumed from there replaces it with
        whatever is better."""
        self.wait()
        self.memory = state = snapshot(state, self.memory)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        # A thread for each write: one that stays keeps OpenMP workers, and as soon as there are
        # more of them than cores, all
        # of OpenMP changes from spinning to sleeping. Small models trained at 0.6 times the speed
        # after their first save.
        pool = ThreadPoolExecutor(1)
        self.pending = pool.submit(self.write_all, state, best)
        pool.shutdown(wait=False)

    def wait(self):
        """Returns whether the last write succeeded (True if there was none)."""
        return self.pending is None or self.pending.result()

    def write_all(self, state, best):
        if self.group is not None:
            state, shards = sharded.split(state)
            folder = self.folder / f'shards-{state["step"]:08d}'
            try:
                state['shards'] = {
                    'folder': folder.name,
                    'files': sharded.write(folder, shards, digest, self.group),
                }
            except OSError as error:
                return self.failed(folder, error)
            if world()[0] > 0:
                return True
        if not all(is_finite(t) for t in tensors([state['model'], state['optimizer']])):
            warn(
                f'{self.folder}: step {state["step"]} was NOT saved: it is not finite; the previous checkpoint is untouched'
            )
            return False
        if best:
            self.best = {key: state[key] for key in WEIGHTS if key in state}
        if self.best:  # first: after a kill between the two, it is found again
            # `memory` is overwritten at the next save
            self.best = None if self.write('best.pt', self.best) else snapshot(self.best)
        self.best_val_loss = self.best_val_loss if self.best else state['best_val_loss']
        return (
            self.write('ckpt.pt', {**state, 'best_val_loss': self.best_val_loss}) and not self.best
        )

    def write(self, name, state):
        path = self.folder / name
        temporary = path.with_suffix('.tmp')
        try:
            if not self.folder.exists():
                warn(f'{self.folder} has VANISHED with what it held; making it again')
                # but nothing above it: a disk that is gone must not be written beside
                self.folder.mkdir()
            state['digest'] = digest(state)
            with open(temporary, 'wb') as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            load(temporary)  # a disk that lies is found out while the old file is still there
            if name == 'ckpt.pt':
                self.retire(path)
            os.replace(temporary, path)
            if name == 'ckpt.pt':
                self.last_step = state['step']
            sync_folder(self.folder)
        # torch's writer turns disk errors into RuntimeError
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            delete([temporary])
            return self.failed(path, error)
        if name == 'ckpt.pt':  # not before: it names the newest shards
            delete(history(self.folder)[self.keep_last :])
            remove_idle_shards(self.folder, self.best)
        return True

    def failed(self, path, error):
        warn(
            f'{path} was NOT saved: {(str(error) or type(error).__name__).splitlines()[0]}; the previous one is untouched; will '
            f'try again at the next save'
        )
        return False

    def retire(self, path):
        """Keeps the ckpt.pt in place as ckpt-STEP.pt, too, before another takes its name."""
        if path.exists() and self.last_step is not None and self.keep_last:
            old = path.with_name(f'ckpt-{self.last_step:08d}.pt')
            if old.exists():  # what a damaged ckpt.pt was resumed from
                return
            try:
                os.link(path, old)  # both names at once: no moment without a ckpt.pt
            except OSError:
                os.replace(path, old)  # a file system without links


def delete(paths):
    """Deletes files that nobody needs any more; what can't be deleted is told, as it takes room."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            warn(f'{path}: cannot be deleted ({error.strerror})')


def claim(folder):
    """Makes the folder if need be and locks it for this process -> the open lock file, to be kept
    open for as long.

    The lock is the system's (POSIX, on the file `lock`): it ends with the process, however that
    ends, is not inherited by others, and holds between machines where the file system passes it on.
    Deletes what a killed process left half written. Raises UserError if another process holds the
    lock or the folder cannot be written."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / 'lock', 'a+', encoding='utf-8')
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            raise UserError(
                f'out_dir={folder}: process {lock.read().strip()} is training in it; wait for it or stop it, or choose '
                f'another --out_dir'
            ) from None
        except OSError as error:
            warn(
                f'{folder}: no locks on this file system ({error.strerror}); see to it yourself that no second run writes into it'
            )
        lock.truncate(0)
        lock.write(f'{os.getpid()} on {platform.node()}\n')
        lock.flush()
        for name in ('ckpt.tmp', 'best.tmp', 'metrics.tmp'):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f'out_dir={folder}: cannot be written ({error.strerror}); choose another --out_dir'
        ) from None
    return lock


def clear(folder):
    """Deletes the files of a run in the folder; UserError if that cannot be done."""
    try:
        for path in run_files(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise UserError(
            f'out_dir={folder}: cannot be written ({error.strerror}); choose another --out_dir'
        ) from None


def run_files(folder):
    """The files of a run that are in the folder."""
    named = (Path(folder) / name for name in ('ckpt.pt', 'best.pt', 'metrics.jsonl'))
    return [path for path in named if path.exists()] + history(folder) + sharded.folders(folder)


def pretrained(name, **overrides):
    """GPT.from_pretrained; UserError if transformers or the weights are not to be had."""
    try:
        return GPT.from_pretrained(name, **overrides)
    except (ImportError, OSError) as error:
        raise UserError(
            f'init_from={name}: {str(error).splitlines()[0]:.200}; needs `pip install transformers` and a connection '
            f'(or its cache)'
        ) from None


def history(folder):
    """The ckpt-STEP.pt files, newest first."""
    return sorted(
        (p for p in Path(folder).glob('ckpt-*.pt') if re.fullmatch(r'ckpt-\d{8,}\.pt', p.name)),
        reverse=True,
    )


def sync_folder(folder):
    """Makes a rename last, where folders can be opened (not on Windows) and synchronized (not on
    some network file systems)."""
    if hasattr(os, 'O_DIRECTORY'):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def remove_idle_shards(folder, pending=None):
    """Deletes the shards that no readable checkpoint of the folder names, nor the dict
    `pending`."""
    if not (idle := {path.name: path for path in sharded.folders(folder)}):
        return
    states = [pending or {}]
    for path in run_files(folder):
        try:
            states += [load(path)] if path.suffix == '.pt' else []
        except UserError:  # what it named is of no use
            pass
    for name in idle.keys() - {
        str(state['shards'].get('folder')) for state in states if 'shards' in state
    }:
        shutil.rmtree(idle[name], ignore_errors=True)


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
    tensors = sharded.read(
        folder, state['shards'], digest, whole, prefix='' if 'optimizer' in state else 'model.'
    )
    return sharded.joined(state, tensors, folder) if whole else state


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


def build_model(state, where, **overrides):
    """The GPT of a checkpoint's dict; `overrides` replace fields of its GPTConfig. UserError if
    weights and config differ.

    Under torch.device('meta') it holds no numbers, and those of the dict may be None.
    """
    arguments = convert(GPTConfig, {**state['gpt_config'], **overrides}, where)
    try:
        cfg = GPTConfig(**arguments)
    except UserError as error:
        raise UserError(f'{where}: {error}') from None
    weights = state['model']
    layers = len({name.split('.')[2] for name in weights if name.startswith('transformer.h.')})
    if cfg.n_layer != layers:  # before anything is allocated for a config that a file made up
        raise UserError(f'{where}: weights of {layers} layers, but n_layer={cfg.n_layer}')
    table = weights.get('transformer.wte.weight')
    if 'shards' not in state and (table is None or table.shape != (cfg.vocab_size, cfg.n_embd)):
        raise UserError(
            f'{where}: weights that do not fit its configuration: transformer.wte.weight'
        )
    with torch.device('meta'):
        expected = GPT(cfg).state_dict()
    wrong = [
        name
        for name in expected.keys() | weights.keys()
        if name not in expected
        or name not in weights
        or weights[name] is not None
        and expected[name].shape != weights[name].shape
    ]
    if wrong:
        raise UserError(
            f'{where}: weights that do not fit its configuration: {", ".join(sorted(wrong)[:3])} ({len(wrong)} in all)'
        )
    model = GPT(cfg)
    if not next(model.parameters()).is_meta:
        model.load_state_dict(weights)
    return model


def main(argv):
    if len(argv) != 2 or any(argument.startswith('-') for argument in argv):
        raise UserError(
            f'{" ".join(argv) or "no arguments"}: write python checkpoint.py SOURCE TARGET, two names of files'
        )
    source, target = map(Path, argv)
    if target.exists():
        raise UserError(f'{target} exists already; choose another name')
    state = read(source)
    state.pop('shards', None)
    if not Saver(target.parent).write(target.name, state):
        raise SystemExit(1)
    print(f'{target}: {target.stat().st_size:,} bytes')


if __name__ == '__main__':
    run(main)
