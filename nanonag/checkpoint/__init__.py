"""Checkpoints of a training run, and the folder that holds them.

A run's folder holds ckpt.pt (the full state), ckpt-STEP.pt (the keep_last full states before it),
best.pt (the weights with the lowest validation loss) and `lock`, held by the running process.

A checkpoint is a dict of tensors and plain types, with a digest of its contents. With
--save_sharded=True the tensors are stored beside it in shards-STEP/, whose files the dict names. A
process killed, or a disk full, at any moment leaves a complete checkpoint.

- format.py: what a file must hold, and reading it safely
- saver.py: writing
- shards.py: tensors stored in several files, one for each process
- folder.py: the files of a run and its lock
- checksum.py: the digest
"""

from nanonag.checkpoint.checksum import digest
from nanonag.checkpoint.folder import claim, clear, history, run_files
from nanonag.checkpoint.format import RESUMABLE, VERSION, load, read, read_latest, with_shards
from nanonag.checkpoint.saver import Saver

__all__ = [
    'RESUMABLE',
    'VERSION',
    'Saver',
    'claim',
    'clear',
    'digest',
    'history',
    'load',
    'read',
    'read_latest',
    'run_files',
    'with_shards',
]
