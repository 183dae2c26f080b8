"""Batches as a pure function of counters: the n-th sequence of a run depends on (seed, n) and on
nothing else.

Neither the scheme, the number of processes, the split into micro-batches, the evaluation cadence
nor a resume changes what a run reads, and no permutation is ever stored."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from nanonag.cli import UserError
from nanonag.data.folder import how_to_prepare

# splits of up to that many tokens are checked whole at the start, the ids of longer ones as they
# are read
SCAN = 2**26


class Split:
    """One bin of a data folder, cut into windows of block_size tokens and their successors.

    Reads with pread: a mapped file would grow the resident memory by every page ever touched.
    Raises UserError for a missing, truncated or too short bin and for ids beyond the vocabulary.
    """

    def __init__(self, folder, name, meta, block_size):
        self.path = Path(folder) / f'{name}.bin'
        self.block_size, self.vocab_size = block_size, meta['vocab_size']
        self.dtype, self.n_tokens = np.dtype(meta['dtype']).newbyteorder('<'), meta['tokens'][name]
        try:
            self.file = open(self.path, 'rb', buffering=0)
        except OSError as error:
            raise UserError(
                f'{self.path}: {error.strerror}; {how_to_prepare(Path(folder))}'
            ) from None
        size, expected = os.fstat(self.file.fileno()).st_size, self.n_tokens * self.dtype.itemsize
        if size != expected:
            raise UserError(
                f'{self.path}: {size} bytes, but meta.json promises {self.n_tokens} tokens = {expected} bytes; '
                f'the copy is incomplete or of another set; {how_to_prepare(Path(folder))}'
            )
        self.n_windows = (self.n_tokens - 1) // block_size
        if self.n_windows < 1:
            raise UserError(
                f'{self.path}: {self.n_tokens} tokens, fewer than the block_size + 1 = {block_size + 1} of one '
                f'window; lower block_size or prepare more text'
            )
        if self.n_tokens <= SCAN:
            found = hashlib.sha256(self.read(0, self.n_tokens)).hexdigest()
            if found != meta['sha256'][name]:
                raise UserError(
                    f'{self.path}: sha256 {found[:12]}, but meta.json says {meta["sha256"][name][:12]}: damaged or of '
                    f'another set; {how_to_prepare(Path(folder))}'
                )

    def read(self, start, count):
        """`count` ids from token `start` on, as an array of the bin's dtype."""
        data = os.pread(
            self.file.fileno(), count * self.dtype.itemsize, start * self.dtype.itemsize
        )
        ids = np.frombuffer(data, dtype=self.dtype)
        if len(ids) < count or ids.max() >= self.vocab_size:
            what = (
                'ends early'
                if len(ids) < count
                else f'id {ids.max()} at token {start + ids.argmax()}'
            )
            raise UserError(
                f'{self.path}: {what}, beyond its {self.n_tokens} tokens of {self.vocab_size} kinds; prepare it again'
            )
        return ids

    def batch(self, windows):
        """Window numbers (B) -> inputs and targets, (B, T) int64 each."""
        T = self.block_size
        ids = np.stack([self.read(int(i) * T, T + 1) for i in windows]).astype(np.int64)
        # copied by numpy: in a thread that stays, torch would start OpenMP workers beside those of
        # training
        return tuple(
            torch.from_numpy(np.ascontiguousarray(part)) for part in (ids[:, :-1], ids[:, 1:])
        )


def shuffled(n, size, key):
    """The n-th elements (array of ints) of a pseudo-random permutation of range(size) that `key`
    chooses.

    A six-round Feistel network permutes the numbers of an even count of bits; those that land
    outside range(size) walk on until they fall inside (Black and Rogaway, 2002). Nothing is stored,
    whatever the size."""
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask, half = np.uint64((1 << half) - 1), np.uint64(half)
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
    """Hashes 64-bit numbers under the keys, splitmix64's finalizer after each (Steele, Lea and
    Flood, 2014)."""
    for key in keys:
        x = x ^ np.uint64((key + 1) * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        x = x ^ x >> np.uint64(31)
    return x


def sequence_windows(n, n_windows, seed):
    """Sequence numbers (array) -> window numbers: each epoch visits every window once, in an order
    of its own."""
    n = np.asarray(n, dtype=np.int64)
    windows = np.empty_like(n)
    for epoch in np.unique(n // n_windows):
        here = n // n_windows == epoch
        key = int(mix(np.array([seed], dtype=np.uint64), int(epoch))[0])
        windows[here] = shuffled(n[here] % n_windows, n_windows, key)
    return windows


class TrainLoader:
    """Iterates over this rank's micro-batches, on the device, from optimizer step `step` on; reads
    one ahead.

    Micro-batch m of a step (of all accum_steps, over all ranks) holds the sequences (step *
    accum_steps + m) * batch_size and following; rank r takes every m = r modulo world_size."""

    def __init__(
        self, split, batch_size, accum_steps, seed, step=0, rank=0, world_size=1, device='cpu'
    ):
        self.split, self.batch_size, self.seed, self.device = (
            split,
            batch_size,
            seed,
            torch.device(device),
        )
        self.next, self.stride = step * accum_steps + rank, world_size

    def micro_batch(self, m):
        """The run's m-th micro-batch, counted over all steps and ranks."""
        numbers = m * self.batch_size + np.arange(self.batch_size)
        batch = self.split.batch(sequence_windows(numbers, self.split.n_windows, self.seed))
        return tuple(t.pin_memory() for t in batch) if self.device.type == 'cuda' else batch

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.micro_batch, self.next)
            while True:
                batch = ahead.result()
                self.next += self.stride
                ahead = pool.submit(self.micro_batch, self.next)
                yield tuple(
                    t.to(self.device, non_blocking=self.device.type == 'cuda') for t in batch
                )


def eval_windows(n_windows, count):
    """`count` window numbers spread evenly over a split: the same ones for every run, seed and
    world size."""
    count = min(count, n_windows)
    return np.arange(count) * n_windows // count
