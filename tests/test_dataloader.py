"""The order of the data: every window once an epoch, and only (seed, sequence number) decides which
comes when.
"""

import hashlib
import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanonag.cli import UserError
from nanonag.data import loader as dataloader
from nanonag.data.loader import Split, TrainLoader, eval_windows, sequence_windows, shuffled


def make_split(folder, ids, block_size=4, vocab_size=50, dtype='uint16', tokens=None):
    """A Split of train.bin with these ids; `tokens`: what meta.json claims as their count."""
    folder.mkdir(exist_ok=True)
    np.asarray(ids).astype(np.dtype(dtype).newbyteorder('<')).tofile(folder / 'train.bin')
    meta = {
        'vocab_size': vocab_size,
        'dtype': dtype,
        'tokens': {'train': len(ids) if tokens is None else tokens},
        'sha256': {'train': hashlib.sha256((folder / 'train.bin').read_bytes()).hexdigest()},
    }
    return Split(folder, 'train', meta, block_size)


@pytest.fixture
def split(tmp_path):
    """23 windows of 4 tokens; the token at a place is its number."""
    return make_split(tmp_path, np.arange(95), vocab_size=95)


def batches(split, count, batch_size=2, accum_steps=2, seed=1, **options):
    """The first `count` micro-batches of a loader, as lists of window numbers."""
    found = []
    loader = TrainLoader(split, batch_size, accum_steps, seed, **options)
    for x, y in itertools.islice(loader, count):
        assert (
            x.shape == y.shape == (batch_size, split.block_size)
            and x.dtype == y.dtype == torch.int64
        )
        assert torch.equal(y, x + 1)  # each target is the next token
        assert (x[:, 0] % 4 == 0).all() and torch.equal(x, x[:, :1] + torch.arange(4))
        found.append((x[:, 0] // 4).tolist())
    return found


def sequences(*args, **options):
    return [window for batch in batches(*args, **options) for window in batch]


# the order


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 600), key=st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(size, key):
    assert sorted(shuffled(np.arange(size), size, key)) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_window_once(size, seed, epoch):
    assert sorted(sequence_windows(np.arange(size) + epoch * size, size, seed)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 2**63 - 1),
    numbers=st.lists(st.integers(0, 2000), min_size=1, max_size=30),
)
def test_a_sequence_depends_on_seed_and_number_only(size, seed, numbers):
    together = sequence_windows(np.array(numbers), size, seed)
    assert list(together) == [sequence_windows(np.array([n]), size, seed)[0] for n in numbers]


def test_the_order_stays_what_it_is():
    """Runs of different versions compare only if this never changes."""
    assert sequence_windows(np.arange(12), 10, 1337).tolist() == [
        6,
        5,
        4,
        9,
        0,
        8,
        1,
        7,
        3,
        2,
        7,
        3,
    ]


def test_seeds_and_epochs_differ():
    orders = {
        tuple(sequence_windows(np.arange(50) + 50 * epoch, 50, seed))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400
    assert list(range(50)) not in map(list, orders)


def test_every_place_of_an_epoch_is_equally_likely():
    """Chi-squared over (place, window) of 40 windows in 1,600 orders: 1521 degrees of freedom, 5
    deviations.
    """
    counts = np.zeros((40, 40))
    for seed in range(160):
        numbers = np.arange(400)
        np.add.at(counts, (numbers % 40, sequence_windows(numbers, 40, seed)), 1)
    assert ((counts - 40) ** 2 / 40).sum() < 1521 + 5 * np.sqrt(2 * 1521)


def test_neighbours_are_scattered():
    order = sequence_windows(np.arange(10_000), 10_000, 5)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001


def test_an_order_takes_no_memory():
    """10^15 windows: whatever stored a permutation would fail."""
    windows = sequence_windows(np.array([0, 1, 10**15 + 5]), 10**15, 3)
    assert len(set(windows)) == 3 and (windows >= 0).all() and (windows < 10**15).all()


# the loader


@pytest.mark.parametrize(
    'batch_size, accum_steps, world_size',
    [(8, 1, 1), (4, 2, 1), (4, 2, 2), (2, 4, 2), (1, 8, 4), (1, 8, 8)],
)
def test_the_split_into_micro_batches_and_ranks_changes_nothing(
    split, batch_size, accum_steps, world_size
):
    """8 sequences a step, however they are divided: each step holds the same ones, in the same
    order.
    """
    local = accum_steps // world_size
    by_rank = [
        batches(split, 6 * local, batch_size, accum_steps, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in range(6):
        micro_batches = [
            by_rank[m % world_size][step * local + m // world_size] for m in range(accum_steps)
        ]
        assert [window for batch in micro_batches for window in batch] == list(
            sequence_windows(np.arange(8) + 8 * step, split.n_windows, 1)
        )


def test_starting_at_a_step_is_skipping(split):
    whole = batches(split, 20, accum_steps=2)
    assert batches(split, 14, accum_steps=2, step=3) == whole[6:]
    two_ranks = batches(split, 10, accum_steps=2, rank=1, world_size=2)
    assert two_ranks == whole[1::2]
    assert batches(split, 7, accum_steps=2, step=3, rank=1, world_size=2) == two_ranks[3:]


def test_epochs_follow_each_other_without_a_short_batch(split):
    found = sequences(split, 46, batch_size=2)  # 92 sequences, four epochs of 23
    for epoch in range(4):
        assert sorted(found[23 * epoch : 23 * epoch + 23]) == list(range(23))
    assert found[:23] != found[23:46]


def test_seeds_differ_and_repeat(split):
    assert (
        sequences(split, 11, seed=1) == sequences(split, 11, seed=1) != sequences(split, 11, seed=2)
    )


def test_reading_ahead_hands_over_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, 'SCAN', 0)
    ids = np.zeros(41, int)
    ids[30] = 99
    with pytest.raises(UserError, match='id 99 at token 30'):
        list(itertools.islice(TrainLoader(make_split(tmp_path, ids), 2, 1, seed=0), 5))


# memory


def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@pytest.mark.skipif(
    not os.path.exists('/proc/self/statm'), reason="reads Linux's own count of resident memory"
)
def test_memory_does_not_grow_with_the_data(tmp_path):
    tokens = 15_000_000_000
    with open(tmp_path / 'train.bin', 'wb') as file:
        file.truncate(2 * tokens)  # sparse: 30 GB of zeros that take no room
    before = resident()
    split = Split(
        tmp_path, 'train', {'vocab_size': 5, 'dtype': 'uint16', 'tokens': {'train': tokens}}, 4096
    )
    # mapped, it would be some 200 MB of pages
    for _ in itertools.islice(TrainLoader(split, 16, 1, seed=0), 200):
        pass
    assert resident() - before < 100e6


# the bins


@pytest.mark.parametrize(
    'damage, message',
    [
        (lambda path: path.unlink(), r'train\.bin: No such file.*prepare'),
        (lambda path: path.write_bytes(b''), r'train\.bin: 0 bytes.*20 tokens = 40 bytes'),
        (lambda path: os.truncate(path, 39), r'train\.bin: 39 bytes.*20 tokens = 40 bytes'),
        (lambda path: os.truncate(path, 42), r'train\.bin: 42 bytes.*20 tokens = 40 bytes'),
        (
            lambda path: path.write_bytes(b'\x32\0' * 20),
            r'train\.bin: id 50 at token 0.*50 entries',
        ),
        (
            lambda path: path.write_bytes(b'\0' * 38 + b'\xff\xff'),
            r'train\.bin: id 65535 at token 19',
        ),
    ],
    ids=['missing', 'empty', 'truncated', 'too-long', 'bad-ids', 'bad-last-id'],
)
def test_a_damaged_bin_is_named_with_its_numbers(tmp_path, damage, message):
    meta = {
        'vocab_size': 50,
        'dtype': 'uint16',
        'tokens': {'train': 20},
        'sha256': {'train': hashlib.sha256(bytes(40)).hexdigest()},
    }
    make_split(tmp_path, np.zeros(20, int))
    damage(tmp_path / 'train.bin')
    with pytest.raises(UserError, match=f'(?s){message}') as caught:
        Split(tmp_path, 'train', meta, 4)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_in_place_of_a_bin(tmp_path):
    (tmp_path / 'train.bin').mkdir()
    with pytest.raises(UserError, match=r'train\.bin: Is a directory'):
        Split(tmp_path, 'train', {'vocab_size': 50, 'dtype': 'uint16', 'tokens': {'train': 20}}, 4)


@pytest.mark.parametrize('count, windows', [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_whole_windows_with_a_successor(tmp_path, count, windows):
    if windows:
        assert make_split(tmp_path, np.zeros(count, int)).n_windows == windows
    else:
        with pytest.raises(
            UserError, match=rf'train\.bin: {count} tokens, fewer than the block_size \+ 1 = 5'
        ):
            make_split(tmp_path, np.zeros(count, int))


def test_large_splits_are_checked_as_they_are_read(tmp_path, monkeypatch):
    ids = np.arange(41) % 50
    ids[22] = 60  # in window 5 and no other
    with pytest.raises(UserError, match='id 60 at token 22'):
        make_split(tmp_path, ids)
    monkeypatch.setattr(dataloader, 'SCAN', 40)
    split = make_split(tmp_path, ids)
    split.batch([0, 4, 6, 9])
    with pytest.raises(UserError, match=r'train\.bin: id 60 at token 22'):
        split.batch([0, 5])


def test_a_bin_cut_off_during_the_run(tmp_path):
    split = make_split(tmp_path, np.zeros(41, int))
    os.truncate(tmp_path / 'train.bin', 60)
    split.batch([0])
    with pytest.raises(UserError, match=r'train\.bin: ends early'):
        split.batch([9])


def test_uint32(tmp_path):
    ids = np.arange(9) + 70_000
    split = make_split(tmp_path, ids, vocab_size=70_009, dtype='uint32')
    x, y = split.batch([0, 1])
    assert (
        x.tolist() == ids[:8].reshape(2, 4).tolist()
        and y.tolist() == ids[1:].reshape(2, 4).tolist()
    )
    with pytest.raises(UserError, match='id 70008 at token 8'):
        make_split(tmp_path, ids, vocab_size=70_008, dtype='uint32')


@settings(max_examples=60, deadline=None)
@given(n_windows=st.integers(1, 5000), count=st.integers(1, 6000))
def test_evaluation_windows_are_fixed_distinct_and_even(n_windows, count):
    windows = eval_windows(n_windows, count)
    assert list(windows) == list(eval_windows(n_windows, count))
    assert len(set(windows)) == len(windows) == min(count, n_windows)
    assert windows[0] == 0 and windows.max() < n_windows
    gaps = np.diff(np.append(windows, n_windows))
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


def test_a_bin_of_other_contents_is_refused(tmp_path):
    """As long and as valid as the one that was prepared: only the digest tells."""
    make_split(tmp_path, np.arange(20))
    meta = {
        'vocab_size': 50,
        'dtype': 'uint16',
        'tokens': {'train': 20},
        'sha256': {'train': '0' * 64},
    }
    with pytest.raises(UserError, match=r'train\.bin: sha256 .* meta\.json says 000000000000'):
        Split(tmp_path, 'train', meta, 4)
