"""The folder of a run: its lock, its files, and runs that resume from it or lose it."""

import errno
import math
import os
import re
import shutil
import signal
import tempfile
import types
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import acting, names, save
from conftest import train, write_data

from nanonag import checkpoint
from nanonag.checkpoint import digest, read, read_latest
from nanonag.checkpoint import folder as folder_module
from nanonag.cli import UserError

# which files are taken


def test_an_empty_folder_has_no_state(tmp_path):
    assert read_latest(tmp_path) is None and read_latest(tmp_path / 'nowhere') is None


def test_other_files_are_left_alone(tmp_path):
    others = ['ckpt-best.pt', 'ckpt-5.pt', 'notes.txt', 'ckpt-00000001.pt.bak']
    for name in others:
        (tmp_path / name).write_text('mine')
    save(tmp_path, 1, 2, 3, keep_last=1)
    checkpoint.clear(tmp_path)
    assert names(tmp_path) == sorted(others)


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


def test_resuming_from_best_alone_is_a_users_mistake(tmp_path, data_folder, finished):
    (tmp_path / 'ckpt.pt').write_bytes((finished / 'best.pt').read_bytes())
    outcome = train(data_folder, tmp_path, init_from='resume')
    assert outcome.code == 2 and re.search(r'ckpt\.pt', outcome.message)


# one run per folder


def child(work):
    """The pid of a forked process that has called `work` and then waits until it is killed."""
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
    """SIGKILL leaves no lock behind that a user would have to remove."""
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
        # An evaluation only reads, so it is allowed.
        assert train(data_folder, tmp_path / 'out', init_from='resume', eval_only=True).code == 0
        assert before == {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    finally:
        end(other)
    assert train(data_folder, tmp_path / 'out', max_iters=7, **options).code == 0
    assert int((tmp_path / 'out' / 'lock').read_text().split()[0]) == os.getpid()


def test_a_lock_is_not_inherited(tmp_path):
    """A child process that outlives the killed run, as wandb's may, does not hold the folder."""
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
        folder_module,
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


# folders that change during a run


@pytest.fixture
def powerless(data_folder):
    """A folder, with `data` in it, of a user to whom permissions apply, unlike root.

    The test then runs as that user.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        write_data(folder / 'data')
        # A run before the change of user imports what that user might not be able to read.
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
    out, made = powerless / 'out', []
    at_step(acting({2: lambda: out.chmod(0o555), 5: lambda: out.chmod(0o755)}, made))
    outcome = train(powerless / 'data', out, max_iters=8, save_interval=1)
    assert outcome.code == 0 and made == list(range(8))
    told = capsys.readouterr().err
    assert 1 <= told.count('NOT saved') <= 4 and 'Permission denied' in told
    assert read(out / 'ckpt.pt')['step'] == 8 and [
        record['step'] for record in outcome.records if 'loss' in record
    ] == list(range(1, 9))


def test_a_folder_that_vanishes_is_made_again(data_folder, tmp_path, at_step, capsys):
    out, made = tmp_path / 'out', []
    at_step(acting({3: lambda: out.rename(tmp_path / 'moved')}, made))
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
    made = []
    at_step(acting({3: lambda: (tmp_path / 'disk').rename(tmp_path / 'gone')}, made))
    outcome = train(data_folder, tmp_path / 'disk' / 'out', max_iters=6, save_interval=1)
    assert (
        made == list(range(6))
        and outcome.code == 1
        and 'final checkpoint could not be written' in outcome.message
    )
    assert capsys.readouterr().err.count('NOT saved') >= 3 and not (tmp_path / 'disk').exists()


# resume with float16's scaler


class Overflowing(torch.amp.GradScaler):
    """float16's gradient scaler, which also works on a CPU; gradients overflow at steps 0 and 4.

    `made`: the steps begun so far, to be set by the test.
    """

    made: list = []

    def scale(self, loss):
        return super().scale(loss * (math.inf if self.made[-1] in (0, 4) else 1))


def test_a_scaler_that_is_still_moving_resumes_bitwise(data_folder, tmp_path, at_step, monkeypatch):
    Overflowing.made = made = []
    at_step(made.append)
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
    """The scaler first halves its scale from 2^16; after that max_skipped counts as without it."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, 'GradScaler', lambda device, enabled: scaler(device, init_scale=math.inf)
    )
    outcome = train(data_folder, tmp_path, max_iters=60, max_skipped=3)
    assert (
        outcome.code == 1
        and 'step 23:' in outcome.message
        and '23 steps in a row' in outcome.message
    )
