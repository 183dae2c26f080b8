"""Writing checkpoints in the background, so that a complete one is there at any moment."""

import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from nanonag.checkpoint import shards
from nanonag.checkpoint.checksum import digest
from nanonag.checkpoint.folder import history, run_files
from nanonag.checkpoint.format import BEST_KEYS, load, tensors
from nanonag.cli import UserError, first_line, warn, world
from nanonag.files import sync_folder, temporary_path, write_atomically


class Saver:
    """Writes the checkpoints of a run from a background thread.

    Training waits only while its state is copied in memory, and for the write before if that has
    not ended.

    folder: the run's folder. keep_last: how many ckpt-STEP.pt are kept beside ckpt.pt. last_step,
    best_val_loss: those of the ckpt.pt that is in the folder already, for a resumed run. group: a
    gloo process group for this Saver alone, if every rank has one and writes its own shard of the
    tensors; None if there is one Saver, on rank 0.
    """

    def __init__(self, folder, keep_last=1, last_step=None, best_val_loss=math.inf, group=None):
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.group = group
        self.last_step = last_step
        self.best_val_loss = best_val_loss
        self.pending_best = None  # what best.pt should hold and does not hold yet
        self.pending_write = None  # the future of the write under way, or of the last one
        self.memory = None  # the last snapshot, whose memory the next one takes over

    def save(self, state, best=False):
        """Hands over a full state to be written as ckpt.pt and, with best=True, as best.pt.

        A write that fails gives a warning, not an exception: the run goes on and the next save
        tries again. That save also writes the best.pt that is missing. Until then ckpt.pt keeps
        the best_val_loss of the best.pt in place, so that a run resumed from it replaces best.pt
        by anything better.
        """
        self.wait()
        self.memory = state = snapshot(state, self.memory)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        # A new thread for each write. A thread that stays keeps OpenMP workers, and once there are
        # more of those than cores, all of OpenMP changes from spinning to sleeping: small models
        # trained at 0.6 times the speed after their first save.
        pool = ThreadPoolExecutor(1)
        self.pending_write = pool.submit(self.write_all, state, best)
        pool.shutdown(wait=False)

    def wait(self):
        """Waits for the last write. Returns whether it succeeded, True if there was none."""
        return self.pending_write is None or self.pending_write.result()

    def write_all(self, state, best):
        """Writes the shards of a full state, best.pt and ckpt.pt; returns whether all succeeded."""
        if self.group is not None:
            shards_folder = self.folder / f'shards-{state["step"]:08d}'
            try:
                state = self.write_shards(state, shards_folder)
            except OSError as error:
                return self.failed(shards_folder, error)
            if world()[0] > 0:
                return True
        if not all(is_finite(t) for t in tensors([state['model'], state['optimizer']])):
            warn(
                f'{self.folder}: step {state["step"]} was NOT saved: it is not finite; '
                f'the previous checkpoint is untouched'
            )
            return False
        if best:
            self.pending_best = {key: state[key] for key in BEST_KEYS if key in state}
        # best.pt comes first: a run killed between the two writes resumes from before this step,
        # and comes to this best loss again.
        if self.pending_best is not None:
            if self.write('best.pt', self.pending_best):
                self.pending_best = None
            else:
                # A copy, since the next save overwrites this snapshot.
                self.pending_best = snapshot(self.pending_best)
        if self.pending_best is None:
            self.best_val_loss = state['best_val_loss']
        written = self.write('ckpt.pt', {**state, 'best_val_loss': self.best_val_loss})
        return written and self.pending_best is None

    def write_shards(self, state, folder):
        """Writes this rank's shard; returns the state without its sharded tensors.

        The entry `shards` names the files of all ranks. Raises OSError, on all ranks, if one of
        them could not write.
        """
        state, sharded_tensors = shards.split(state)
        files = shards.write(folder, sharded_tensors, self.group)
        return {**state, 'shards': {'folder': folder.name, 'files': files}}

    def write(self, name, state):
        """Writes the state, with its digest, as the file `name`; returns whether it succeeded."""
        path = self.folder / name
        is_latest = name == 'ckpt.pt'

        def before_rename(temporary):
            # Read back, while the old file is still there: a disk can store something else.
            load(temporary)
            if is_latest:
                self.retire(path)

        try:
            self.restore_folder()
            content = {**state, 'digest': digest(state)}
            write_atomically(path, lambda file: torch.save(content, file), before_rename)
            if is_latest:
                self.last_step = state['step']
            sync_folder(self.folder)
        # torch.save turns errors of the disk into RuntimeError; UserError is a ValueError.
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            delete([temporary_path(path)])
            return self.failed(path, error)
        if is_latest:  # only then is it certain which files are still needed
            delete(history(self.folder)[self.keep_last :])
            remove_unused_shards(self.folder, self.pending_best)
        return True

    def restore_folder(self):
        """Makes the run's folder again, with a warning, if it has been removed.

        Nothing above it is made: if a disk was unmounted, nothing may be written in its place.
        """
        if not self.folder.exists():
            warn(f'{self.folder} has VANISHED with all that it held; making it again')
            self.folder.mkdir()

    def failed(self, path, error):
        """Warns that `path` could not be written; returns False."""
        warn(
            f'{path} was NOT saved: {first_line(error)}; the previous one is untouched; '
            f'will try again at the next save'
        )
        return False

    def retire(self, path):
        """Keeps the ckpt.pt in place as ckpt-STEP.pt, before another file takes its name."""
        if not path.exists() or self.last_step is None or self.keep_last == 0:
            return
        kept = path.with_name(f'ckpt-{self.last_step:08d}.pt')
        if kept.exists():
            # ckpt.pt was damaged and the run resumed from this file, which has to stay.
            return
        try:
            os.link(path, kept)  # so that there is no moment without a ckpt.pt
        except OSError:
            os.replace(path, kept)  # on a file system without links


def snapshot(value, previous=None):
    """A copy, in main memory, of nested dicts, lists and tuples of tensors and plain values.

    `previous`, an earlier snapshot, gives its memory to tensors of the same place, shape and dtype:
    fresh memory costs more than the copy. Tensors that share their memory, as tied weights do,
    share it in the copy too. Copies from a GPU go to page-locked memory, which is several times as
    fast, and are asynchronous: the caller has to synchronize. Tuples become lists.
    """
    return _snapshot(value, previous, {})


def _snapshot(value, previous, copies):
    """`copies`: the tensors copied so far, by the memory that they were copied from."""
    if isinstance(value, DTensor):
        return value.detach().to('cpu', copy=True)
    if isinstance(value, torch.Tensor):
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if memory not in copies:
            copies[memory] = copy_tensor(value, previous)
        return copies[memory]
    if isinstance(value, dict):
        if not isinstance(previous, dict):
            previous = {}
        return {key: _snapshot(item, previous.get(key), copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if not isinstance(previous, list) or len(previous) != len(value):
            previous = [None] * len(value)
        return [_snapshot(item, old, copies) for item, old in zip(value, previous)]
    return value


def copy_tensor(tensor, previous):
    """A copy of a tensor in main memory: in `previous` if that is a tensor that fits."""
    fits = (
        isinstance(previous, torch.Tensor)
        and previous.shape == tensor.shape
        and previous.dtype == tensor.dtype
    )
    if not fits:
        previous = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return previous.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def is_finite(tensor):
    """Whether all elements are finite.

    NaN and infinity show in the minimum or the maximum, which takes a thirtieth of the time of
    tensor.isfinite().all().
    """
    return tensor.numel() == 0 or all(extreme.isfinite() for extreme in tensor.aminmax())


def delete(paths):
    """Deletes files that are not needed; warns of one that cannot be deleted and takes up space."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            warn(f'{path}: cannot be deleted ({error.strerror})')


def remove_unused_shards(folder, pending):
    """Deletes the folders of shards that neither a readable checkpoint nor `pending` names.

    `pending`: the dict of a checkpoint that is still to be written, or None.
    """
    shard_folders = shards.folders(folder)
    if not shard_folders:
        return
    states = [] if pending is None else [pending]
    for path in run_files(folder):
        if path.suffix == '.pt':
            try:
                states.append(load(path))
            except UserError:
                pass  # nothing can be restored from it, with or without its shards
    used = {str(state['shards'].get('folder')) for state in states if 'shards' in state}
    for path in shard_folders:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)
