"""Checkpoints: whatever moment a run dies at, a good one is left; whatever a file holds, it can do
no harm."""

import builtins
import errno
import functools
import math
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, arguments, fresh, nontrivial, tokens, train, write_data

import train as script
from model import GPT, GPTConfig
from nanonag import checkpoint
from nanonag.checkpoint import Saver, digest, read, read_latest
from nanonag.checkpoint import saver as saver_module
from nanonag.checkpoint.format import tensors
from nanonag.cli import UserError
from start import build_model

TOKENIZER = {'kind': 'char', 'chars': list('abcdefghijklm')}


def state(step, update='gd', **kwargs):
    """A full state as train.py makes it, its weights telling the step."""
    model = fresh(update=update, n_layer=1, n_embd=4, n_head=1, **kwargs)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(step)
    return {
        'version': 1,
        'model': model.state_dict(),
        'gpt_config': asdict(model.cfg),
        'step': step,
        'best_val_loss': 2.5,
        'tokenizer': TOKENIZER,
        'optimizer': {'a': {'step': torch.tensor(3.0), 'exp_avg': torch.ones(2)}},
        'scaler': {},
        'train_config': {'seed': 1, 'min_lr': None},
        'skipped': 0,
        'rng': [[torch.get_rng_state()]],
        'data': {'train': 'x', 'val': 'y'},
        'wandb_id': None,
    }


def save(folder, *steps, **options):
    """A Saver that has written these steps."""
    saver = Saver(folder, **options)
    for step in steps:
        saver.save(state(step))
        assert saver.wait()
    return saver


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(plain, value))
    return value is None or type(value) in (torch.Tensor, str, int, float, bool)


# writing and reading back


def test_round_trip(tmp_path):
    save(tmp_path, 7)
    found = read(tmp_path / 'ckpt.pt')
    assert digest(found) == digest(state(7)) and found.keys() == state(7).keys() | {'digest'}
    assert (
        found['train_config'] == {'seed': 1, 'min_lr': None}
        and type(found['best_val_loss']) is float
    )


def test_a_file_holds_tensors_and_plain_types_only(finished):
    for name in ('ckpt.pt', 'best.pt'):
        found = torch.load(finished / name, weights_only=True)
        assert plain(found)
        assert not any(key.startswith(('_orig_mod.', 'module.')) for key in found['model'])


def test_best_holds_what_sampling_and_finetuning_need(tmp_path):
    saver = Saver(tmp_path)
    saver.save(state(3), best=True)
    saver.save(state(4), best=False)
    assert saver.wait()
    best = read(tmp_path / 'best.pt')
    assert best['step'] == 3 and best.keys() == {
        'version',
        'model',
        'gpt_config',
        'step',
        'best_val_loss',
        'tokenizer',
        'digest',
    }
    assert (best['model']['transformer.wte.weight'] == 3).all()
    assert read(tmp_path / 'ckpt.pt')['step'] == 4


def test_what_is_saved_is_a_copy(tmp_path):
    """The loop goes on training while the file is being written."""
    written = state(1)
    saver = Saver(tmp_path)
    saver.save(written)
    for weights in (
        written['model']['transformer.wte.weight'],
        written['optimizer']['a']['exp_avg'],
        written['rng'][0][0],
    ):
        weights.zero_()
    written['train_config']['seed'] = 5
    assert saver.wait()
    assert digest(read(tmp_path / 'ckpt.pt')) == digest(state(1))


@pytest.mark.parametrize('keep_last, kept', [(0, []), (1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_keep_last(tmp_path, keep_last, kept):
    save(tmp_path, 1, 2, 3, 4, keep_last=keep_last)
    assert names(tmp_path) == ['ckpt-%08d.pt' % step for step in kept] + ['ckpt.pt']
    for step in kept:
        assert read(tmp_path / f'ckpt-{step:08d}.pt')['step'] == step
    assert read_latest(tmp_path)['step'] == 4


def test_other_files_are_left_alone(tmp_path):
    others = ['ckpt-best.pt', 'ckpt-5.pt', 'notes.txt', 'ckpt-00000001.pt.bak']
    for name in others:
        (tmp_path / name).write_text('mine')
    save(tmp_path, 1, 2, 3, keep_last=1)
    checkpoint.clear(tmp_path)
    assert names(tmp_path) == sorted(others)


def test_an_empty_folder_has_no_state(tmp_path):
    assert read_latest(tmp_path) is None and read_latest(tmp_path / 'nowhere') is None


# dying and failing while writing


class Killed(BaseException):
    """The process ends here."""


CALLS = ['torch.save', 'open', 'os.fsync', 'os.link', 'os.replace', 'os.unlink']


def break_call(monkeypatch, call, error, before=True):
    """Makes a call that the saver makes raise `error`, before or after its work."""
    owners = {
        'torch.save': (torch, 'save'),
        'open': (saver_module, 'open'),
        'os.unlink': (Path, 'unlink'),
    }
    owner, name = owners.get(call, (os, call[3:]))
    original = getattr(owner, name, builtins.open)

    def broken(*args, **kwargs):
        if call == 'open' and 'w' not in args[1]:
            return original(*args, **kwargs)
        if not before:
            original(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, broken, raising=False)


@pytest.mark.parametrize('before', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('call', CALLS)
def test_a_kill_at_any_moment_leaves_a_good_one(tmp_path, monkeypatch, call, before):
    saver = save(tmp_path, 1, 2, keep_last=1)
    with monkeypatch.context() as patch:
        break_call(patch, call, Killed(), before)
        with pytest.raises(Killed):
            saver.write('ckpt.pt', state(3))
    latest = read_latest(tmp_path)
    assert latest['step'] in (2, 3) and read(tmp_path / 'ckpt.pt')['step'] == latest['step']
    save(tmp_path, 4, last_step=latest['step'])
    assert read_latest(tmp_path)['step'] == 4


@pytest.mark.parametrize('before', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('call', CALLS)
def test_a_kill_after_a_fall_back_leaves_a_good_one(tmp_path, monkeypatch, call, before):
    """ckpt.pt is damaged, the run went on from the one before: that one must stay until the new one
    is in place."""
    save(tmp_path, 1, 2, keep_last=1)
    (tmp_path / 'ckpt.pt').write_bytes(b'damaged')
    assert read_latest(tmp_path)['step'] == 1
    saver = Saver(tmp_path, keep_last=1, last_step=1)  # as train.py makes it on resume
    with monkeypatch.context() as patch:
        break_call(patch, call, Killed(), before)
        try:
            saver.write('ckpt.pt', state(3))
        except Killed:
            pass
    assert read_latest(tmp_path)['step'] in (1, 3)


class Faults:
    """Counts the calls to the operating system that a save makes and lets one of them fail.

    fault: an errno, raised once or (`lasting`) from there on; 'short': half of a write is lost in
    silence; 'vanished': the folder is moved away before the call."""

    def __init__(self, patch):
        self.folder, self.calls, self.at, self.fault, self.lasting = None, [], None, None, False
        for owner, name in (
            (os, 'open'),
            (os, 'link'),
            (os, 'replace'),
            (Path, 'unlink'),
            (torch, 'load'),
        ):
            patch.setattr(owner, name, self.watched(name, getattr(owner, name)))
        # thousands of saves are waited for here
        patch.setattr(os, 'fsync', self.watched('fsync', lambda descriptor: None))
        patch.setattr(
            saver_module,
            'open',
            lambda *args: FaultyFile(self.call('create', open, *args), self),
            raising=False,
        )

    def watched(self, name, function):
        return lambda *args, **kwargs: self.call(name, function, *args, **kwargs)

    def arm(self, folder, at, fault, lasting=False):
        self.folder, self.calls, self.at, self.fault, self.lasting = folder, [], at, fault, lasting

    def call(self, name, function, *args, **kwargs):
        now = len(self.calls)
        self.calls.append(name)
        if self.at is not None and (now == self.at or self.lasting and now > self.at):
            if type(self.fault) is int:
                raise OSError(self.fault, os.strerror(self.fault))
            if self.fault == 'vanished':
                os.rename(self.folder, self.folder.with_name(f'{self.folder.name} moved'))
            elif name == 'write':
                function(bytes(args[0])[: len(args[0]) // 2])
                return len(args[0])
        return function(*args, **kwargs)


class FaultyFile:
    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def __getattr__(self, name):
        method = getattr(self.file, name)
        return (
            functools.partial(self.faults.call, name, method)
            if name in ('write', 'flush')
            else method
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()
        if error[0] is None:
            self.faults.call('close', lambda: None)


def small_state(step, best_val_loss):
    return {
        'version': 1,
        'model': {'w': torch.full((3,), float(step))},
        'gpt_config': {},
        'step': step,
        'best_val_loss': best_val_loss,
        'tokenizer': TOKENIZER,
        'optimizer': {},
    }


@pytest.mark.parametrize(
    'fault, lasting',
    [
        (errno.ENOSPC, False),
        (errno.ENOSPC, True),
        (errno.EIO, False),
        (errno.EACCES, False),
        ('short', False),
        ('vanished', False),
    ],
    ids=lambda value: errno.errorcode.get(value) if type(value) is int else str(value),
)
def test_whatever_call_of_a_save_fails_nothing_is_lost(
    tmp_path, monkeypatch, capsys, fault, lasting
):
    """The one before is whole, a warning tells, and the next save makes up for it: best.pt too, and
    no file is left over."""
    saver, old, new, next_one = (
        Saver(tmp_path / 'start'),
        small_state(2, 2.5),
        small_state(3, 2.0),
        small_state(4, 2.0),
    )
    (tmp_path / 'start').mkdir()
    for content, best in ((small_state(1, 2.5), True), (old, False)):
        saver.save(content, best)
        assert saver.wait()
    faults, at, called = Faults(monkeypatch), 0, set()
    capsys.readouterr()
    while True:
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / 'start', folder)
        saver = Saver(folder, keep_last=1, last_step=2, best_val_loss=2.5)
        faults.arm(folder, at, fault, lasting)
        saver.save(new, best=True)
        succeeded, calls = saver.wait(), faults.calls
        where = f'call {at} of {len(calls)}: {calls[at : at + 1]}'
        if at >= len(calls):
            assert succeeded
            break
        faults.arm(folder, None, None)
        told, kept = (
            capsys.readouterr().err,
            folder.with_name(f'{at} moved') if fault == 'vanished' else folder,
        )
        if fault == 'vanished':
            assert re.search('NOT saved|VANISHED', told) or calls[at:] == ['fsync'], where
        elif fault != 'short' and calls[at] != 'link':  # without links the file is moved
            assert re.search('NOT saved' if calls[at] != 'unlink' else 'cannot be deleted', told), (
                where
            )
        latest, best = read_latest(kept), read(kept / 'best.pt')
        assert digest(latest['model']) == digest((old if latest['step'] == 2 else new)['model']), (
            where
        )
        assert fault == 'vanished' or not succeeded or latest['step'] == best['step'] == 3, where
        assert best['best_val_loss'] <= latest['best_val_loss'], (
            f'{where}: ckpt.pt promises a best.pt that is not there'
        )
        saver.save(next_one)
        assert saver.wait(), where
        latest = read_latest(folder)
        assert (
            digest(latest['model']) == digest(next_one['model']) and latest['best_val_loss'] == 2.0
        ), where
        if fault != 'vanished' or best['step'] != 3:  # it vanished when it was in place
            best = read(folder / 'best.pt')
            assert best['step'] == 3 and digest(best['model']) == digest(new['model']), where
        older = checkpoint.history(folder)
        assert len(older) <= 1 and all(
            read(path)['step'] == int(path.stem[5:]) for path in older
        ), where
        assert set(names(folder)) - {path.name for path in older} <= {'best.pt', 'ckpt.pt'}, where
        at += 1
        called.update(calls)
    assert at > 50 and called >= {
        'create',
        'write',
        'flush',
        'fsync',
        'close',
        'load',
        'link',
        'replace',
        'unlink',
    }


def test_a_best_that_failed_is_not_overtaken_by_the_next_snapshot(tmp_path, monkeypatch, capsys):
    """Snapshots share their memory; the weights that wait for another try must not be in it."""
    saver, save_truly = Saver(tmp_path), torch.save
    with monkeypatch.context() as patch:

        def failing(content, file):
            if 'optimizer' not in content:
                raise OSError(errno.ENOSPC, 'No space left on device')
            save_truly(content, file)

        patch.setattr(torch, 'save', failing)
        for step in (1, 2, 3):
            saver.save(small_state(step, 2.0), best=step == 1)
            assert not saver.wait() and read(tmp_path / 'ckpt.pt')['best_val_loss'] == math.inf
    saver.save(small_state(4, 2.0))
    assert saver.wait() and read(tmp_path / 'ckpt.pt')['best_val_loss'] == 2.0
    assert (read(tmp_path / 'best.pt')['model']['w'] == 1).all()


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 200 kB."""
    (tmp_path / 'disk').mkdir()
    if (
        shutil.which('mount') is None
        or subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=200k', 'none', tmp_path / 'disk'],
            capture_output=True,
        ).returncode
    ):
        pytest.skip('mounting a small file system is not allowed here')
    yield tmp_path / 'disk'
    subprocess.run(['umount', '-l', tmp_path / 'disk'], check=True)


def test_a_full_disk(full_disk, capsys):
    saver = save(full_disk, 1)
    (full_disk / 'ballast').write_bytes(
        bytes(200_000 - 4 * (full_disk / 'ckpt.pt').stat().st_size // 3)
    )
    saver.save(state(2))
    assert not saver.wait() and 'NOT saved' in capsys.readouterr().err
    assert digest(read(full_disk / 'ckpt.pt')) == digest(state(1)) and not list(
        full_disk.glob('*.tmp')
    )
    (full_disk / 'ballast').unlink()
    saver.save(state(3))
    assert saver.wait() and read_latest(full_disk)['step'] == 3


def test_a_device_without_room(tmp_path, capsys):
    """Linux' /dev/full: the kernel's own ENOSPC, without being root."""
    if not os.path.exists('/dev/full'):
        pytest.skip('this system has no /dev/full')
    saver = save(tmp_path, 1)
    (tmp_path / 'ckpt.tmp').symlink_to('/dev/full')
    saver.save(state(2))
    assert (
        not saver.wait()
        and 'No space left' in capsys.readouterr().err
        and read_latest(tmp_path)['step'] == 1
    )
    saver.save(state(3))
    assert (
        saver.wait()
        and names(tmp_path) == ['ckpt-00000001.pt', 'ckpt.pt']
        and read_latest(tmp_path)['step'] == 3
    )


def test_a_limit_on_the_size_of_files(tmp_path, capsys):
    resource = pytest.importorskip('resource')
    saver, limits = save(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        saver.save(state(2))
        succeeded = saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        not succeeded
        and 'NOT saved' in capsys.readouterr().err
        and read_latest(tmp_path)['step'] == 1
    )
    saver.save(state(3))
    assert (
        saver.wait()
        and names(tmp_path) == ['ckpt-00000001.pt', 'ckpt.pt']
        and read_latest(tmp_path)['step'] == 3
    )


def test_a_path_that_went_away_is_not_made_again(tmp_path, capsys):
    """A run's own folder is, but a whole path that is gone may be a disk that is gone; beside its
    mount point nothing is written."""
    saver = Saver(tmp_path / 'mount' / 'run')
    saver.save(state(1))
    assert (
        not saver.wait()
        and re.search('VANISHED.*\n.*NOT saved', capsys.readouterr().err)
        and names(tmp_path) == []
    )


@pytest.mark.parametrize(
    'number, succeeds',
    [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)],
    ids=errno.errorcode.get,
)
def test_a_file_system_that_cannot_synchronize_folders(tmp_path, monkeypatch, number, succeeds):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, 'fsync', fsync)
    saver = Saver(tmp_path)
    saver.save(state(1))
    assert saver.wait() == succeeds


def test_a_snapshot_is_made_in_the_memory_of_the_one_before(tmp_path):
    tied = torch.ones(2, 3)
    value = {'a': tied, 'b': [tied, torch.zeros(2)], 'c': (1, {'d': torch.ones(())}), 'e': tied.t()}
    first = saver_module.snapshot(value)
    before = [t.data_ptr() for t in tensors(first)]
    assert before[0] == before[1] and len(set(before)) == 4  # what is tied stays tied: stored once
    tied.fill_(7)
    value['b'][1] = torch.zeros(5)  # another shape
    second = saver_module.snapshot(value, first)
    assert digest(second) == digest(value)
    assert [a == t.data_ptr() for a, t in zip(before, tensors(second))] == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_a_disk_that_lies_is_found_out(tmp_path, monkeypatch, capsys):
    """The file is read back before it replaces the old one."""
    saver = save(tmp_path, 1)
    save_truly = torch.save

    def save_badly(obj, file):
        save_truly(obj, file)
        file.seek(file.tell() // 2)
        file.write(b'\xff' * 64)
        file.seek(0, 2)

    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', save_badly)
        saver.save(state(2))
        assert not saver.wait()
    assert read_latest(tmp_path)['step'] == 1


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_that_are_not_finite_never_replace_a_file(tmp_path, capsys, value):
    saver = save(tmp_path, 1)
    for part in ('model', 'optimizer'):
        bad = state(2)
        (
            bad['model']['transformer.ln_f.weight']
            if part == 'model'
            else bad['optimizer']['a']['exp_avg']
        )[1] = value
        saver.save(bad, best=True)
        assert not saver.wait()
    assert names(tmp_path) == ['ckpt.pt'] and read_latest(tmp_path)['step'] == 1
    assert 'not finite' in capsys.readouterr().err


# damaged files


def test_one_flipped_byte_anywhere_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole, original = (
        tmp_path / 'ckpt.pt',
        (tmp_path / 'ckpt.pt').read_bytes(),
        digest(state(1)),
    )
    caught = 0
    for place in range(0, len(whole), 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            assert digest(read(path)) == original, place  # padding, which holds nothing
        except UserError:
            caught += 1
    assert caught > 100


def test_one_flipped_bit_of_a_weight_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole = tmp_path / 'ckpt.pt', (tmp_path / 'ckpt.pt').read_bytes()
    with zipfile.ZipFile(path) as archive:
        tensors = [info for info in archive.infolist() if '/data/' in info.filename]
        contents = [archive.read(info) for info in tensors]
    assert len(tensors) > 10
    for content in contents:
        place = whole.index(content) + len(content) // 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r'ckpt\.pt: its contents do not match its digest'):
            read(path)


def test_a_file_cut_off_anywhere_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole = tmp_path / 'ckpt.pt', (tmp_path / 'ckpt.pt').read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r'ckpt\.pt: '):
            read(path)


def cyclic():
    value = []
    value.append(value)
    return value


def strange():
    """Contents that are no checkpoint of ours, made by torch.save."""
    good = state(1)
    return {
        'list': [1, 2],
        'number': 3,
        'empty dict': {},
        'text': 'x' * 10**6,
        'tensor': torch.zeros(3),
        'other version': good | {'version': 2},
        'no version': {key: value for key, value in good.items() if key != 'version'},
        'tensor version': good | {'version': torch.zeros(2)},
        'huge version': good | {'version': 'v' * 10**7},
        'no digest': good,
        'tensor digest': good | {'digest': torch.zeros(2)},
        'no model': {'version': 1},
        'mixed keys': good | {'digest': 'x', 'model': {1: 1, 'a': 2}},
        'cyclic': good | {'digest': 'x', 'rng': cyclic()},
        'sparse': good | {'digest': 'x', 'model': {'a': torch.eye(3).to_sparse()}},
        'bare state dict': good['model'],
        'nanogpt, model a number': {'model_args': {}, 'model': 5},
        'nanogpt, no model': {'model_args': {}},
        'nanogpt, model a list': {'model_args': {'n_layer': 1}, 'model': [torch.zeros(2)]},
        'nanogpt, numbered weights': {'model_args': {}, 'model': {0: torch.zeros(2)}},
        'nanogpt, weights of text': {'model_args': {}, 'model': {'transformer.wte.weight': 'x'}},
    }


@pytest.mark.parametrize('name', strange())
def test_other_contents_are_refused(tmp_path, name):
    torch.save(strange()[name], tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: ') as caught:
        read(tmp_path / 'ckpt.pt')
    assert len(str(caught.value)) < 600


def laughs():
    """A small object, exponentially large to who walks it."""
    value = ['ha']
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    'part', ['rng', 'gpt_config', 'scaler', 'model_args', 'version', 'digest', 'model', 'shards']
)
@pytest.mark.parametrize(
    'value',
    [
        laughs(),
        {'n_layer': laughs()},
        {'n_layer': {1, 2}},
        {'n_layer': b'x'},
        {'n_layer': 1j},
        {'n_layer': torch.zeros(2, device='meta')},
    ],
    ids=['laughs', 'laughs inside', 'set', 'bytes', 'complex', 'meta'],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_at_once(tmp_path, part, value):
    """Before anything walks or prints it, which would take for ever or fail."""
    torch.save(state(1) | {'digest': 'x', part: value}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: ') as caught:
        build_model(read(tmp_path / 'ckpt.pt'), tmp_path / 'ckpt.pt')
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    'value',
    [{1, 2}, b'x', 1j, torch.float64, laughs()],
    ids=['set', 'bytes', 'complex', 'dtype', 'laughs'],
)
def test_only_tensors_and_plain_values_are_read(tmp_path, value, monkeypatch):
    monkeypatch.setattr('nanonag.checkpoint.saver.digest', lambda state: 'valid')
    torch.save(state(1) | {'spare': [value], 'digest': 'valid'}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='has no place in a checkpoint|in two places'):
        read(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize(
    'part, value',
    [
        ('step', '3'),
        ('step', -1),
        ('step', True),
        ('skipped', None),
        ('best_val_loss', 'x'),
        ('best_val_loss', None),
        ('wandb_id', 3),
        ('data', {}),
        ('data', {'train': 1, 'val': 2}),
        ('rng', {}),
        ('rng', [3]),
        ('rng', [[]]),
        ('rng', [[3]]),
        ('optimizer', []),
        ('optimizer', {'a': 3}),
        ('scaler', None),
        ('model', {3: torch.zeros(2)}),
        ('model', {'a': torch.zeros(2, dtype=torch.int8)}),
        ('model', {'a': torch.zeros(2, dtype=torch.complex64)}),
    ],
    ids=repr,
)
def test_parts_that_a_resume_could_not_use_are_refused(tmp_path, part, value):
    content = state(1) | {part: value}
    torch.save(content | {'digest': digest(content)}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=rf'ckpt\.pt: holds no .*{part}'):
        read(tmp_path / 'ckpt.pt')


def test_a_packed_archive_is_refused(tmp_path):
    """A few bytes of it could unpack to any amount of memory."""
    save(tmp_path, 1)
    with (
        zipfile.ZipFile(tmp_path / 'ckpt.pt') as file,
        zipfile.ZipFile(tmp_path / 'small.pt', 'w', zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in file.namelist():
            packed.writestr(name, file.read(name))
    with pytest.raises(UserError, match='packed: it would take'):
        read(tmp_path / 'small.pt')


@pytest.mark.parametrize('target', ['/dev/zero', 'pipe', '.'])
def test_what_is_no_file_is_not_read(tmp_path, target):
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'ckpt.pt').symlink_to(target)
    with pytest.raises(UserError, match='not a file'):
        read(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize('part', ['model', 'gpt_config', 'train_config', 'shards'])
@pytest.mark.parametrize('value', ['x', None, 3, [1]], ids=repr)
def test_valid_digests_of_wrong_parts_are_refused(tmp_path, part, value):
    content = state(1) | {part: value}
    torch.save(content | {'digest': digest(content)}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=rf'ckpt\.pt: holds no .*{part}'):
        read(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\0' * 1000,
        b'PK\x03\x04' * 50,
        b'\x80\x02}q\x00.',
        b'not a checkpoint at all' * 100,
        b'\x80',
    ],
    ids=['empty', 'zeros', 'zip-like', 'pickle', 'text', 'one byte'],
)
def test_garbage_is_refused(tmp_path, content):
    (tmp_path / 'ckpt.pt').write_bytes(content)
    with pytest.raises(UserError, match=r'ckpt\.pt: not a'):
        read(tmp_path / 'ckpt.pt')


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(UserError, match='no such checkpoint.*--out_dir'):
        read(tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read(tmp_path)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize(
    'how', ['torch.save', 'inside a checkpoint', 'legacy torch.save', 'bare pickle']
)
def test_code_in_a_file_does_not_run(tmp_path, how):
    marker, path = str(tmp_path / 'ran'), tmp_path / 'ckpt.pt'
    if how == 'bare pickle':
        path.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        content = (
            Hostile(marker) if how == 'torch.save' else state(1) | {'wandb_id': Hostile(marker)}
        )
        torch.save(content, path, _use_new_zipfile_serialization=not how.startswith('legacy'))
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read(path)
    assert not os.path.exists(marker)


@pytest.mark.parametrize('nanogpt', [False, True], ids=['ours', 'nanogpt'])
def test_a_small_file_of_huge_tensors_is_refused(tmp_path, nanogpt):
    """One stored element can be a tensor of any size by strides of zero; nothing may be allocated
    for it."""
    config = {
        'update': 'gd',
        'n_layer': 1,
        'n_head': 1,
        'n_embd': 2**20,
        'vocab_size': 13,
        'block_size': 8,
    }
    with torch.device('meta'):
        # 13 TB for c_attn alone
        shapes = {name: w.shape for name, w in GPT(GPTConfig(**config)).state_dict().items()}
    huge = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    content = {'model': huge} | (
        {'model_args': config} if nanogpt else {'version': 1, 'gpt_config': config, 'digest': 'x'}
    )
    torch.save(content, tmp_path / 'ckpt.pt')
    assert os.path.getsize(tmp_path / 'ckpt.pt') < 100_000
    with pytest.raises(UserError, match=r'ckpt\.pt: '):
        build_model(read(tmp_path / 'ckpt.pt'), tmp_path / 'ckpt.pt')


# falling back


def test_a_damaged_file_falls_back_to_the_one_before(tmp_path, capsys):
    save(tmp_path, 1, 2, 3, keep_last=2)
    os.truncate(tmp_path / 'ckpt.pt', 500)
    assert read_latest(tmp_path)['step'] == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and 'ckpt.pt' in lines[0] and 'falling back' in lines[0]
    os.truncate(tmp_path / 'ckpt-00000002.pt', 500)
    assert read_latest(tmp_path)['step'] == 1
    os.truncate(tmp_path / 'ckpt-00000001.pt', 500)
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read_latest(tmp_path)


def test_a_kept_file_alone_is_enough(tmp_path):
    save(tmp_path, 1, 2, keep_last=1)
    (tmp_path / 'ckpt.pt').unlink()
    assert read_latest(tmp_path)['step'] == 1


# weights and configuration


def test_build_model_gives_the_same_logits(variant, tmp_path):
    model = nontrivial(torch.float32, **variant)
    built = build_model(
        {'model': model.state_dict(), 'gpt_config': asdict(model.cfg)}, 'here'
    ).eval()
    assert built.cfg == model.cfg
    assert torch.equal(
        built(tokens(), return_logits=True)[0], model(tokens(), return_logits=True)[0]
    )


@pytest.mark.parametrize(
    'change',
    [
        {'n_layer': 2},
        {'n_layer': 10**6},
        {'n_layer': 2**62},
        {'n_embd': 8},
        {'n_embd': 2**20},
        {'n_embd': 2**40},
        {'n_embd': 2**62},
        {'vocab_size': 14},
        {'vocab_size': 2**50},
        {'block_size': 9},
        {'block_size': 2**50},
        {'bias': True},
        {'update': 'lt_nag'},
        {'mlp': 'swiglu'},
        {'tie_weights': False, 'bias': True},
    ],
    ids=str,
)
def test_weights_that_do_not_fit_their_configuration(change):
    content = state(1)
    content['gpt_config'].update(change, vocab_used=None)
    if 'update' in change:
        kept = {key: value for key, value in content['gpt_config'].items() if value is not None}
        content['gpt_config'] = kept | change
    with pytest.raises(UserError, match='^here: '):
        build_model(content, 'here')


@pytest.mark.parametrize(
    'change, message',
    [
        ({'update': 'adam'}, 'adam'),
        ({'n_head': 3}, 'not divisible'),
        ({'n_layer': 0}, 'n_layer'),
        ({'n_layer': 'many'}, 'n_layer'),
        ({'dropout': float('nan')}, 'dropout'),
        ({'unheard': 1}, 'unheard'),
        ({'n_layer': torch.zeros(2)}, 'n_layer'),
        ({'vocab_used': 99}, 'vocab_used'),
    ],
    ids=str,
)
def test_a_configuration_from_a_file_is_checked(change, message):
    content = state(1)
    content['gpt_config'].update(change)
    with pytest.raises(UserError, match=message):
        build_model(content, 'here')


def test_missing_and_extra_weights_are_named():
    content = state(1)
    del content['model']['transformer.ln_f.weight']
    content['model']['transformer.spare'] = torch.zeros(1)
    with pytest.raises(
        UserError, match=r'here: .*transformer\.ln_f\.weight, transformer\.spare \(2 in all\)'
    ):
        build_model(content, 'here')


# nanoGPT's files


def nanogpt_file(path, model, prefix=''):
    """A file in nanoGPT's layout: prefixes of compile and DDP, causal masks as buffers, its own
    configuration."""
    weights = {prefix + name: w for name, w in model.state_dict().items()}
    for i in range(model.cfg.n_layer):
        weights[f'{prefix}transformer.h.{i}.attn.bias'] = torch.ones(
            1, 1, model.cfg.block_size, model.cfg.block_size
        ).tril()
    arguments = {
        key: getattr(model.cfg, key)
        for key in ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
    }
    torch.save(
        {
            'model': weights,
            'optimizer': {'state': {}, 'param_groups': []},
            'model_args': arguments,
            'iter_num': 5000,
            'best_val_loss': torch.tensor(1.2),
            'config': {'out_dir': 'out', 'learning_rate': 1e-3},
        },
        path,
    )


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize(
    'prefix', ['', '_orig_mod.', 'module.', '_orig_mod.module.', 'module._orig_mod.']
)
def test_nanogpt_files_load(tmp_path, prefix, bias):
    model = nontrivial(torch.float32, update='gd', bias=bias)
    nanogpt_file(tmp_path / 'ckpt.pt', model, prefix)
    found = read(tmp_path / 'ckpt.pt')
    built = build_model(found, tmp_path / 'ckpt.pt').eval()
    assert found['step'] == 5000 and built.cfg.update == 'gd'
    assert torch.equal(
        built(tokens(), return_logits=True)[0], model(tokens(), return_logits=True)[0]
    )


@pytest.mark.parametrize(
    'weight',
    [
        torch.empty(13, 16, device='meta'),
        torch.zeros(13, 16).to_sparse(),
        torch.zeros(13, 16, dtype=torch.int8),
        torch.zeros(1).expand(13, 16),
        torch.zeros(13, 16, dtype=torch.complex64),
    ],
    ids=['meta', 'sparse', 'int', 'expanded', 'complex'],
)
def test_weights_without_numbers_of_their_own_are_refused(tmp_path, weight):
    nanogpt_file(tmp_path / 'ckpt.pt', fresh(update='gd'))
    content = torch.load(tmp_path / 'ckpt.pt')
    content['model']['transformer.wte.weight'] = weight
    torch.save(content, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: '):
        read(tmp_path / 'ckpt.pt')


def test_finetuning_from_a_nanogpt_file(tmp_path, data_folder):
    nanogpt_file(
        tmp_path / 'nano.pt', fresh(update='gd', n_layer=1, n_embd=16, block_size=16), '_orig_mod.'
    )
    assert (
        train(
            data_folder, tmp_path / 'out', update='gd', init_from=tmp_path / 'nano.pt', max_iters=2
        ).code
        == 0
    )
    start, end = (
        read(path)['model'] for path in (tmp_path / 'nano.pt', tmp_path / 'out' / 'ckpt.pt')
    )
    moves = [(end[name] - start[name]).abs().max() for name in end]
    assert 0 < max(moves) < 0.2  # from there, not from scratch


def test_resuming_a_nanogpt_folder_is_a_users_mistake(tmp_path, data_folder):
    """Its file lacks what a resume needs; the message says how to go on from its weights."""
    nanogpt_file(tmp_path / 'ckpt.pt', fresh(update='gd', n_layer=1, n_embd=16, block_size=16))
    outcome = train(data_folder, tmp_path, update='gd', init_from='resume')
    assert outcome.code == 2 and re.search(r'ckpt\.pt', outcome.message)
    assert names(tmp_path) == ['ckpt.pt']


def test_resuming_from_best_alone_is_a_users_mistake(tmp_path, data_folder, finished):
    (tmp_path / 'ckpt.pt').write_bytes((finished / 'best.pt').read_bytes())
    outcome = train(data_folder, tmp_path, init_from='resume')
    assert outcome.code == 2 and re.search(r'ckpt\.pt', outcome.message)


# one run a folder


def child(work):
    """The pid of a forked process that has done `work` and lives on until it is killed."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            keep = work()  # noqa: F841
            os.write(there, b'.')
            signal.pause()
        finally:
            os._exit(1)
    os.close(there)
    done = os.read(here, 1)
    os.close(here)
    assert done, 'the child failed'
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    'options', [dict(init_from='resume'), dict(init_from='auto'), dict(overwrite=True)], ids=str
)
def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(
    options, data_folder, finished, tmp_path
):
    """SIGKILL leaves no lock behind that somebody would have to remove."""
    shutil.copytree(finished, tmp_path / 'out')
    other = child(lambda: checkpoint.claim(tmp_path / 'out'))
    try:
        before = {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
        outcome = train(data_folder, tmp_path / 'out', max_iters=7, **options)
        assert (
            outcome.code == 2
            and f'process {other} on ' in outcome.message
            and 'out_dir=' in outcome.message
        )
        # it only reads
        assert train(data_folder, tmp_path / 'out', init_from='resume', eval_only=True).code == 0
        assert before == {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    finally:
        end(other)
    assert train(data_folder, tmp_path / 'out', max_iters=7, **options).code == 0
    assert int((tmp_path / 'out' / 'lock').read_text().split()[0]) == os.getpid()


def test_a_lock_is_not_inherited(tmp_path):
    """A process that the killed run has left behind, as wandb's may be, does not hold the
    folder."""
    here, there = os.pipe()

    def with_a_child():
        lock, grandchild = checkpoint.claim(tmp_path), child(lambda: None)
        os.write(there, b'%d\n' % grandchild)
        return lock

    end(child(with_a_child))
    grandchild = int(os.read(here, 20))
    try:
        checkpoint.claim(tmp_path).close()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(here)
        os.close(there)


@pytest.mark.parametrize('missing', [True, False], ids=['no fcntl', 'no lock daemon'])
def test_without_locks_a_run_warns_and_trains(missing, data_folder, tmp_path, monkeypatch, capsys):
    def lockf(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(
        saver_module,
        'fcntl',
        None if missing else types.SimpleNamespace(lockf=lockf, LOCK_EX=2, LOCK_NB=4),
    )
    assert train(data_folder, tmp_path).code == 0
    assert capsys.readouterr().err.count('no locks on this file system') == 1


def test_what_a_killed_process_left_half_written_is_removed(data_folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'out')
    for name in ('ckpt.tmp', 'best.tmp', 'metrics.tmp', 'mine.tmp'):
        (tmp_path / 'out' / name).write_bytes(b'PK half a')
    assert train(data_folder, tmp_path / 'out', init_from='auto', max_iters=7).code == 0
    assert [name for name in names(tmp_path / 'out') if name.endswith('.tmp')] == ['mine.tmp']


# folders that change under a run


@pytest.fixture
def powerless(data_folder):
    """A folder (with `data` in it) of a user whom permissions hold back, which is who this test
    then is: root is not."""
    folder = Path(tempfile.mkdtemp())
    try:
        write_data(folder / 'data')
        # imports all that this user might not read
        train(folder / 'data', folder / 'warm-up', max_iters=1)
        folder.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        if not os.access(folder, os.W_OK, effective_ids=True):
            pytest.skip(f'{folder} is not reachable for an ordinary user')
        yield folder
    finally:
        os.seteuid(os.getuid())
        shutil.rmtree(folder)


@pytest.fixture
def at_step(monkeypatch):
    """Calls a function before the update number `step` (from 0); returns the list of all updates
    made."""
    multiplier, made, plans = script.lr_multiplier, [], {}

    def watched(step, cfg):
        made.append(step)
        if step in plans:
            plans[step]()
        return multiplier(step, cfg)

    monkeypatch.setattr(script, 'lr_multiplier', watched)
    return plans, made


@pytest.mark.parametrize('init_from', ['scratch', 'auto'])
def test_a_read_only_folder_at_the_start_is_a_users_mistake(powerless, init_from):
    out = powerless / 'out'
    if init_from == 'auto':
        assert train(powerless / 'data', out, max_iters=2).code == 0
    else:
        out.mkdir()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    out.chmod(0o555)
    for path in out.iterdir():
        path.chmod(0o444)
    outcome = train(powerless / 'data', out, init_from=init_from, max_iters=4)
    out.chmod(0o755)
    assert (
        outcome.code == 2
        and f'out_dir={out}: cannot be written (Permission denied)' in outcome.message
    )
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_folder_that_is_read_only_for_a_while_costs_nothing(powerless, at_step, capsys):
    out, (plans, made) = powerless / 'out', at_step
    plans.update({2: lambda: out.chmod(0o555), 5: lambda: out.chmod(0o755)})
    outcome = train(powerless / 'data', out, max_iters=8, save_interval=1)
    assert outcome.code == 0 and made == list(range(8))
    told = capsys.readouterr().err
    assert 1 <= told.count('NOT saved') <= 4 and 'Permission denied' in told
    assert read(out / 'ckpt.pt')['step'] == 8 and [
        record['step'] for record in outcome.records if 'loss' in record
    ] == list(range(1, 9))


def test_a_folder_that_vanishes_is_made_again(data_folder, tmp_path, at_step, capsys):
    out, (plans, made) = tmp_path / 'out', at_step
    plans[3] = lambda: out.rename(tmp_path / 'moved')
    outcome = train(data_folder, out, max_iters=8, save_interval=1)
    assert outcome.code == 0 and made == list(range(8)) and 'VANISHED' in capsys.readouterr().err
    assert read(out / 'ckpt.pt')['step'] == 8 and 'config' in outcome.records[0]
    assert [record['step'] for record in outcome.records if 'loss' in record][-4:] == [5, 6, 7, 8]
    assert read(tmp_path / 'moved' / 'ckpt.pt')['step'] <= 3
    assert train(data_folder, out, init_from='auto', max_iters=9).code == 0


def test_a_path_that_vanishes_for_good_is_told_at_the_end_too(
    data_folder, tmp_path, at_step, capsys
):
    (tmp_path / 'disk').mkdir()
    plans, made = at_step
    plans[3] = lambda: (tmp_path / 'disk').rename(tmp_path / 'gone')
    outcome = train(data_folder, tmp_path / 'disk' / 'out', max_iters=6, save_interval=1)
    assert (
        made == list(range(6))
        and outcome.code == 1
        and 'final checkpoint could not be written' in outcome.message
    )
    assert capsys.readouterr().err.count('NOT saved') >= 3 and not (tmp_path / 'disk').exists()


# signals within a save

SLOW = """
import sys, time, torch, train
from nanonag.cli import run
save = torch.save
def slow(state, file):
    save(state, file)
    if state['step'] == 4:
        print('SAVING\\n', end='', flush=True)
        time.sleep(60)
torch.save = slow
run(train.main)
"""


def test_a_second_interrupt_within_a_save_does_not_wait_for_it(data_folder, tmp_path):
    argv = arguments(
        {
            **SMALL,
            'dataset': data_folder,
            'out_dir': tmp_path / 'out',
            'max_iters': 10**6,
            'save_interval': 2,
        }
    )
    process = subprocess.Popen(
        [sys.executable, '-c', SLOW, *argv],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
    )
    try:
        # other threads print, too, perhaps on the same line
        while 'SAVING' not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and 'Traceback' not in stderr, stderr
    assert (
        read(tmp_path / 'out' / 'ckpt.pt')['step'] == 2 and (tmp_path / 'out' / 'ckpt.tmp').exists()
    )


def test_a_second_sigterm_within_a_save_changes_nothing(
    data_folder, tmp_path, at_step, monkeypatch
):
    save, (plans, made) = torch.save, at_step
    monkeypatch.setattr(torch, 'save', lambda content, file: (time.sleep(0.5), save(content, file)))
    # the save of step 2 is under way
    plans[2] = lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]
    assert train(data_folder, tmp_path, max_iters=9, save_interval=2).code == 75
    assert (
        made == [0, 1, 2]
        and read(tmp_path / 'ckpt.pt')['step'] == 3
        and read(tmp_path / 'ckpt-00000002.pt')['step'] == 2
    )


# float16's scaler


class Overflowing(torch.amp.GradScaler):
    """float16's scaler (which works on a CPU, too, though float16 is for CUDA), its gradients out
    of range at some updates."""

    made = ()

    def scale(self, loss):
        return super().scale(loss * (math.inf if self.made[-1] in (0, 4) else 1))


def test_a_scaler_that_is_still_moving_resumes_bitwise(data_folder, tmp_path, at_step, monkeypatch):
    Overflowing.made = at_step[1]
    monkeypatch.setattr(
        torch.amp, 'GradScaler', lambda device, enabled: Overflowing(device, growth_interval=2)
    )
    options = dict(max_iters=9, save_interval=1, keep_last=9, gradient_accumulation_steps=1)
    whole = train(data_folder, tmp_path / 'whole', **options)
    assert whole.code == 0 and [
        record['skipped'] for record in whole.records if 'loss' in record
    ] == [1, 0, 0, 0, 1, 0, 0, 0, 0]
    scales = [
        read(tmp_path / 'whole' / f'ckpt-{step:08d}.pt')['scaler']['scale'] for step in range(1, 9)
    ]
    assert [math.log2(scale) for scale in scales] == [15, 15, 16, 16, 15, 15, 16, 16]
    for step in (1, 2, 5):
        folder = tmp_path / str(step)
        folder.mkdir()
        shutil.copy(tmp_path / 'whole' / f'ckpt-{step:08d}.pt', folder / 'ckpt.pt')
        assert train(data_folder, folder, init_from='resume', **options).code == 0
        for part in ('model', 'optimizer', 'scaler', 'skipped'):
            assert digest(read(folder / 'ckpt.pt')[part]) == digest(
                read(tmp_path / 'whole' / 'ckpt.pt')[part]
            ), (step, part)


def test_a_scaler_gets_more_patience_than_others(data_folder, tmp_path, monkeypatch):
    """It halves its way down from 2^16 first; then max_skipped counts as for everyone."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, 'GradScaler', lambda device, enabled: scaler(device, init_scale=math.inf)
    )
    outcome = train(data_folder, tmp_path, max_iters=60, max_skipped=3)
    assert (
        outcome.code == 1
        and 'step 23:' in outcome.message
        and '23 updates in a row' in outcome.message
    )


def test_no_thread_stays_after_a_write(tmp_path):
    """Each that stays holds OpenMP workers; with more of those than cores, everything after the
    first save was slow."""
    before = set(threading.enumerate())
    saver = Saver(tmp_path)
    for step in (1, 2):
        saver.save(state(step))
        assert saver.wait()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
