"""Writing checkpoints: at whatever moment a run dies or a disk fails, a complete one is left."""

import builtins
import errno
import functools
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import TOKENIZER, acting, names, save, state
from conftest import ROOT, SMALL, arguments, train

from nanonag import checkpoint, files
from nanonag.checkpoint import Saver, digest, read, read_latest
from nanonag.checkpoint import saver as saver_module
from nanonag.checkpoint.format import tensors

# what is written


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(plain, value))
    return value is None or type(value) in (torch.Tensor, str, int, float, bool)


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
    """Training continues while the file is being written."""
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
    assert names(tmp_path) == [f'ckpt-{step:08d}.pt' for step in kept] + ['ckpt.pt']
    for step in kept:
        assert read(tmp_path / f'ckpt-{step:08d}.pt')['step'] == step
    assert read_latest(tmp_path)['step'] == 4


def test_a_snapshot_is_made_in_the_memory_of_the_one_before(tmp_path):
    tied = torch.ones(2, 3)
    value = {'a': tied, 'b': [tied, torch.zeros(2)], 'c': (1, {'d': torch.ones(())}), 'e': tied.t()}
    first = saver_module.snapshot(value)
    before = [t.data_ptr() for t in tensors(first)]
    assert (
        before[0] == before[1] and len(set(before)) == 4
    )  # tied weights stay tied, and are stored once
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


def test_no_thread_stays_after_a_write(tmp_path):
    """A thread that stays holds OpenMP workers, which slow training down after the first save."""
    before = set(threading.enumerate())
    saver = Saver(tmp_path)
    for step in (1, 2):
        saver.save(state(step))
        assert saver.wait()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


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


# kills


class Killed(BaseException):
    """Stands for the end of the process."""


CALLS = ['torch.save', 'open', 'os.fsync', 'os.link', 'os.replace', 'os.unlink']


def break_call(monkeypatch, call, error, before=True):
    """Makes one of the calls of a save raise `error`, before or after its work."""
    owners = {'torch.save': (torch, 'save'), 'open': (files, 'open'), 'os.unlink': (Path, 'unlink')}
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
    """The file that replaced a damaged ckpt.pt in a resume stays until a new ckpt.pt is there."""
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


# faults


class Faults:
    """Records the calls to the operating system that a save makes and lets one of them fail.

    fault: an errno, raised by one call or (`lasting`) by all from there on; 'short': half of a
    write is lost silently; 'vanished': the folder is moved away before the call.
    """

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
        # The test makes thousands of saves; none has to reach the disk.
        patch.setattr(os, 'fsync', self.watched('fsync', lambda descriptor: None))
        patch.setattr(
            files,
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
    """The old checkpoint stays whole and a warning is printed.

    The next save writes what is missing, best.pt too, and leaves no other file.
    """
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
        elif fault != 'short' and calls[at] != 'link':  # without links the file is renamed
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
        if (
            fault != 'vanished' or best['step'] != 3
        ):  # best.pt was written before the folder vanished
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
    """Snapshots share their memory, which must not hold the weights that wait for another try."""
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
    """Linux's /dev/full gives the kernel's own ENOSPC without root's permissions."""
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
    """Only a run's own folder is.

    A parent that is gone may be an unmounted disk, in whose place nothing may be written.
    """
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


def test_content_and_rename_are_synchronized_in_this_order(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def watched_fsync(descriptor):
        calls.append('folder' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'file')
        fsync(descriptor)

    def watched_replace(source, target):
        calls.append('rename')
        replace(source, target)

    monkeypatch.setattr(os, 'fsync', watched_fsync)
    monkeypatch.setattr(os, 'replace', watched_replace)
    save(tmp_path, 1)
    assert calls == ['file', 'rename', 'folder']


def test_a_file_whose_rename_was_not_synchronized_is_kept_under_its_own_step(tmp_path, monkeypatch):
    saver = save(tmp_path, 1, 2)

    def failing(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(saver_module, 'sync_folder', failing)
        saver.save(state(3))
        assert not saver.wait()
    saver.save(state(4))
    assert saver.wait() and names(tmp_path) == ['ckpt-00000003.pt', 'ckpt.pt']
    assert read(tmp_path / 'ckpt-00000003.pt')['step'] == 3


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


# signals during a save


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
        # Other threads print too, perhaps on the same line.
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
    save, made = torch.save, []
    monkeypatch.setattr(torch, 'save', lambda content, file: (time.sleep(0.5), save(content, file)))
    # When step 2 begins, its checkpoint is still being written.
    twice = {2: lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]}
    at_step(acting(twice, made))
    assert train(data_folder, tmp_path, max_iters=9, save_interval=2).code == 75
    assert (
        made == [0, 1, 2]
        and read(tmp_path / 'ckpt.pt')['step'] == 3
        and read(tmp_path / 'ckpt-00000002.pt')['step'] == 2
    )
