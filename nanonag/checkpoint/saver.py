"""Writing checkpoints: a thread for each write, a lock for each run, and a good file at any moment."""

import errno
import math
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from nanonag.checkpoint import shards
from nanonag.checkpoint.checksum import digest
from nanonag.checkpoint.format import WEIGHTS, history, load, run_files, tensors
from nanonag.cli import UserError, warn, world
from nanonag.files import sync_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def is_finite(tensor):
    """As tensor.isfinite().all(), but 30 times as fast: NaN and infinity show in the extremes."""
    return not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax())


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
            state, parts = shards.split(state)
            folder = self.folder / f'shards-{state["step"]:08d}'
            try:
                state['shards'] = {
                    'folder': folder.name,
                    'files': shards.write(folder, parts, self.group),
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


def remove_idle_shards(folder, pending=None):
    """Deletes the shards that no readable checkpoint of the folder names, nor the dict
    `pending`."""
    if not (idle := {path.name: path for path in shards.folders(folder)}):
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
