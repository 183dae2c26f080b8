"""The writing of train.bin and val.bin, one split at a time."""

import hashlib
import os

import numpy as np

from nanonag.cli import UserError


class Bin:
    """A split on its way to disk, with what meta.json says about it.

    path: of the unfinished file. dtype: of the ids on disk. byte_lengths: (vocab_size,) the bytes
    of text that each id stands for. keep: the number of bytes of an unfinished file to continue
    after.
    """

    def __init__(self, path, dtype, byte_lengths, keep=0):
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder('<')
        self.byte_lengths = byte_lengths
        self.tokens = 0
        self.bytes = 0  # of text, to compute bits per byte with
        self.max_id = -1
        self.sha256 = hashlib.sha256()
        self.file = open(path, 'r+b' if keep else 'wb')
        while self.file.tell() < keep:
            size = min(2**24, keep - self.file.tell())
            self.count(np.frombuffer(self.file.read(size), self.dtype))
        self.file.truncate()

    def append(self, ids):
        """Write an array of ids; UserError for an id beyond the vocabulary."""
        vocab_size = len(self.byte_lengths)
        if ids.size and ids.max() >= vocab_size:  # would wrap around silently
            raise UserError(
                f'{self.path}: token id {ids.max()} does not fit a vocabulary of {vocab_size}'
            )
        ids = ids.astype(self.dtype)
        self.file.write(ids)
        self.count(ids)

    def count(self, ids):
        """Update what meta.json says about the split with ids that are in the file."""
        self.tokens += len(ids)
        self.bytes += int(self.byte_lengths[ids].sum())
        self.max_id = max(self.max_id, int(ids.max(initial=0)))
        self.sha256.update(ids)

    def sync(self):
        """Bring everything to the disk; returns the number of bytes there."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()
