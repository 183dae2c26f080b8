"""Batches as a pure function of counters: the n-th sequence of a run depends on (seed, n) and on
nothing else.

Neither the scheme, the number of processes, the split into micro-batches, the evaluation cadence
nor a resume changes what a run reads, and no permutation is ever stored.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from nanonag.cli import UserError
from nanonag.data.folder import how_to_prepare

# Splits of up to this many tokens are checked as a whole at the start; of longer ones, only the ids
# that are read.
SCAN = 2**26


class Split:
    """One bin of a data folder, cut into windows of block_size tokens and their successors.

    Reads with pread: a mapped file would grow the resident memory by every page ever touched.
    `meta` is the content of the folder's meta.json, `name` is 'train' or 'val'. Raises UserError
    for a missing, damaged or too short bin, and for ids beyond the vocabulary where they are read.
    """

    def __init__(self, folder, name, meta, block_size):
        self.path = Path(folder) / f'{name}.bin'
        self.block_size = block_size
        self.vocab_size = meta['vocab_size']
        self.dtype = np.dtype(meta['dtype']).newbyteorder('<')
        self.n_tokens = meta['tokens'][name]
        self.n_windows = (self.n_tokens - 1) // block_size
        try:
            self.file = open(self.path, 'rb', buffering=0)
        except OSError as error:
            raise self.error(error.strerror) from None
        self.check_size()
        if self.n_tokens <= SCAN:
            self.check_digest(meta['sha256'][name])

    def error(self, problem):
        """A UserError that names the bin, the problem and the command that prepares the data."""
        return UserError(f'{self.path}: {problem}; {how_to_prepare(self.path.parent)}')

    def check_size(self):
        size = os.fstat(self.file.fileno()).st_size
        expected = self.n_tokens * self.dtype.itemsize
        if size != expected:
            raise self.error(
                f'{size} bytes, but meta.json promises {self.n_tokens} tokens = {expected} bytes; '
                'the copy is incomplete or of another data set'
            )
        if self.n_windows < 1:
            raise UserError(
                f'{self.path}: {self.n_tokens} tokens, fewer than the block_size + 1 = '
                f'{self.block_size + 1} of one window; lower block_size or prepare more text'
            )

    def check_digest(self, expected):
        digest = hashlib.sha256(self.read(0, self.n_tokens)).hexdigest()
        if digest != expected:
            raise self.error(
                f'sha256 {digest[:12]}, but meta.json says {expected[:12]}: '
                'damaged or of another data set'
            )

    def read(self, start, count):
        """`count` token ids from token `start` on, as an array of the bin's dtype."""
        itemsize = self.dtype.itemsize
        data = os.pread(self.file.fileno(), count * itemsize, start * itemsize)
        ids = np.frombuffer(data, dtype=self.dtype)
        if len(ids) < count:
            raise UserError(
                f'{self.path}: ends early, before its {self.n_tokens} tokens; prepare it again'
            )
        if ids.max() >= self.vocab_size:
            raise UserError(
                f'{self.path}: id {ids.max()} at token {start + ids.argmax()}, beyond the '
                f'vocabulary of {self.vocab_size} entries; prepare it again'
            )
        return ids

    def batch(self, windows):
        """Window numbers (B) -> inputs and targets, (B, T) int64 each."""
        T = self.block_size
        ids = np.stack([self.read(int(i) * T, T + 1) for i in windows]).astype(np.int64)
        # Copied by numpy: in a thread that lives on, torch would start OpenMP workers beside those
        # of training.
        inputs = np.ascontiguousarray(ids[:, :-1])
        targets = np.ascontiguousarray(ids[:, 1:])
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def shuffled(n, size, key):
    """The n-th elements of a pseudo-random permutation of range(size) that `key` chooses.

    n: array of ints below `size`; returns an int64 array of its shape. A six-round Feistel network
    permutes the numbers of an even count of bits; those that land outside range(size) walk on until
    they fall inside (Black and Rogaway, 2002). Nothing is stored, whatever the size.
    """
    n_bits = max(1, (int(size - 1).bit_length() + 1) // 2)  # of each half of a number
    half = np.uint64(n_bits)
    mask = np.uint64((1 << n_bits) - 1)
    n = np.array(n, dtype=np.uint64)
    outside = np.ones(n.shape, dtype=bool)
    while outside.any():
        left, right = n[outside] >> half, n[outside] & mask
        for round_number in range(6):
            left, right = right, left ^ (mix(right, key, round_number) & mask)
        n[outside] = left << half | right
        outside = n >= size
    return n.astype(np.int64)


def mix(x, *keys):
    """Hash 64-bit numbers (a uint64 array) under integer keys.

    Applies splitmix64's finalizer after each key (Steele, Lea and Flood, 2014).
    """
    for key in keys:
        x = x ^ np.uint64((key + 1) * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        x = x ^ x >> np.uint64(31)
    return x


def sequence_windows(n, n_windows, seed):
    """Sequence numbers (array) -> window numbers: each epoch visits every window once, in an order
    of its own.
    """
    n = np.asarray(n, dtype=np.int64)
    windows = np.empty_like(n)
    for epoch in np.unique(n // n_windows):
        in_epoch = n // n_windows == epoch
        key = int(mix(np.array([seed], dtype=np.uint64), int(epoch))[0])
        windows[in_epoch] = shuffled(n[in_epoch] % n_windows, n_windows, key)
    return windows


class TrainLoader:
    """Iterates over this rank's micro-batches, on the device, from optimizer step `step` on; reads
    one ahead.

    Micro-batch m of a step (of all accum_steps, over all ranks) holds the sequences (step *
    accum_steps + m) * batch_size and following; rank r takes every m = r modulo world_size. Yields
    inputs and targets, (batch_size, block_size) int64 each.
    """

    def __init__(
        self, split, batch_size, accum_steps, seed, step=0, rank=0, world_size=1, device='cpu'
    ):
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.device = torch.device(device)
        self.next = step * accum_steps + rank
        self.stride = world_size

    def micro_batch(self, m):
        """The run's m-th micro-batch, counted over all steps and ranks, in host memory."""
        numbers = m * self.batch_size + np.arange(self.batch_size)
        batch = self.split.batch(sequence_windows(numbers, self.split.n_windows, self.seed))
        return tuple(t.pin_memory() for t in batch) if self.device.type == 'cuda' else batch

    def __iter__(self):
        is_cuda = self.device.type == 'cuda'
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.micro_batch, self.next)
            while True:
                batch = ahead.result()
                self.next += self.stride
                ahead = pool.submit(self.micro_batch, self.next)
                yield tuple(t.to(self.device, non_blocking=is_cuda) for t in batch)


def eval_windows(n_windows, count):
    """`count` window numbers spread evenly over a split: the same ones for every run, seed and
    world size.
    """
    count = min(count, n_windows)
    return np.arange(count) * n_windows // count
