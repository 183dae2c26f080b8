"""Checkpoints: the format of the files, writing them while training goes on, and shards.

A run's folder holds ckpt.pt (the whole state), ckpt-STEP.pt (the keep_last before it), best.pt
(the weights of the best validation loss) and `lock`, held by the run. A checkpoint is a dict of
tensors and plain types with a digest of its contents. With --save_sharded the tensors lie beside it
in shards-STEP/, and the dict names them.
"""

from nanonag.checkpoint.checksum import digest
from nanonag.checkpoint.format import (
    RESUMABLE,
    VERSION,
    history,
    load,
    read,
    read_latest,
    run_files,
    with_shards,
)
from nanonag.checkpoint.saver import Saver, claim, clear

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
