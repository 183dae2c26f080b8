"""Kills training runs with SIGKILL at random moments, resumes them, and holds what comes out
against runs left alone.

    python tests/chaos.py --seed=1 --kills=100       about a second a kill
    python tests/chaos.py --kills=20 --fresh=True    a new python for every start
    python tests/chaos.py --kills=3 --torchrun=True  two processes under torchrun --max_restarts

By default a run is a child of this process, which has torch loaded; under torchrun one of the two
processes is killed. A run saves all the time, from its own thread. After each kill every file in
the folder has to be whole and no saved step may be lost; at the end weights, optimizer, random
numbers, best.pt and records have to be those of the run left alone, bit for bit."""

import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from conftest import SMALL, arguments, records, write_data  # noqa: E402

import train  # noqa: E402
from nanonag import checkpoint  # noqa: E402
from nanonag.cli import UserError, run
from nanonag.configurator import at_least, build, parse  # noqa: E402

PATIENCE = 90  # seconds that a run may take before it counts as hung
UPDATES = 40  # of a run
SAME = ('model', 'optimizer', 'rng', 'step', 'best_val_loss', 'skipped', 'scaler', 'data')


@dataclass(frozen=True)
class ChaosConfig:
    seed: int = 1  # of the runs and of the moments
    kills: int = 100
    fresh: bool = False
    torchrun: bool = False

    def __post_init__(self):
        at_least(self, seed=0, kills=0)


class Forked:
    """train.py in a child of this process, as Popen would give it; torch is loaded already, so it
    starts at once."""

    def __init__(self, argv, log, env=None):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                for descriptor in (1, 2):
                    os.dup2(log.fileno(), descriptor)
                os.environ.update(env or {})
                sys.argv = ['train.py', *argv]
                run(train.main)
                code = 0
            except SystemExit as error:
                code = (
                    error.code
                    if isinstance(error.code, int)
                    else print(error.code, file=sys.stderr, flush=True) or 1
                )
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def python(argv, log):
    return subprocess.Popen(
        [sys.executable, ROOT / 'train.py', *argv], cwd=ROOT, stdout=log, stderr=log
    )


class Failure(Exception):
    pass


def expect(condition, *message):
    if not condition:
        raise Failure(' '.join(map(str, message)))


def wait_for(condition, process, seconds=PATIENCE):
    """Whether `condition` came true while the process lived; Failure if neither happens in time."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if condition():
            return True
        expect(time.monotonic() < deadline, 'the run hangs')
        time.sleep(0.0002)
    return False


def wait(process):
    wait_for(lambda: False, process)
    return process.returncode


# ---- what has to hold


def check_files(folder, before):
    """Every file is whole, whatever moment it is; returns the newest saved step, at least
    `before`."""
    for path in [folder / 'ckpt.pt', folder / 'best.pt', *checkpoint.history(folder)]:
        if path.exists():
            content = checkpoint.read(path)  # UserError if it is damaged
            expect(
                path.name in ('ckpt.pt', 'best.pt') or path.stem == f'ckpt-{content["step"]:08d}',
                path,
                'holds step',
                content['step'],
            )
    state = checkpoint.read_latest(folder)
    step = state['step'] if state else 0
    expect(step >= before, f'step {before} was saved, now {folder} has step {step}')
    if (folder / 'metrics.jsonl').exists():
        *lines, last = (folder / 'metrics.jsonl').read_text().split('\n')
        expect(not last or last.startswith('{'), 'metrics.jsonl: damaged')
        steps = [record['step'] for record in map(json.loads, lines) if 'loss' in record]
        expect(
            steps[:step] == list(range(1, step + 1)),
            'metrics.jsonl lacks records of saved steps or has some twice:',
            steps,
        )
    return step


def outcome(folder):
    """What a finished run is: digests of its state and of best.pt, its records without speeds and
    starts."""
    state, best = (checkpoint.read(folder / name) for name in ('ckpt.pt', 'best.pt'))
    kept = [
        {key: value for key, value in record.items() if key != 'tokens_per_s'}
        for record in records(folder)
        if 'config' not in record
    ]
    return {
        'state': {key: checkpoint.digest(state[key]) for key in SAME},
        'best': best['digest'],
        'records': kept,
    }


def check_outcome(folder, alone, max_iters):
    expected, found = outcome(alone), outcome(folder)
    for key in expected:
        expect(
            expected[key] == found[key],
            f"{folder}: {key} differ from the uninterrupted run's\n{expected[key]}\n{found[key]}",
        )
    expect(
        [record['step'] for record in found['records'] if 'loss' in record]
        == list(range(1, max_iters + 1)),
        'steps lost or twice',
    )


# ---- kills


def options(draw, data, folder):
    """A run that saves at every update or two, its best weights now and then."""
    return arguments(
        {
            **SMALL,
            'dataset': data,
            'out_dir': folder,
            'init_from': 'auto',
            'update': draw.choice(['gd', 'lt_nag', 'euler_nag']),
            'optimizer': 'muon',
            'dropout': 0.1,
            'gradient_accumulation_steps': 2,
            'max_iters': UPDATES,
            'eval_interval': 3,
            'save_interval': draw.choice([1, 2, 6]),
            'keep_last': draw.choice([0, 1, 2]),
            'seed': draw.randrange(1000),
        }
    )


def strike(process, folder, draw):
    """Kills the process at a moment of a random kind; False if it ended before."""
    kind = draw.choice(['start', 'any time', 'save', 'save', 'save', 'save', 'metrics'])
    if kind in ('start', 'any time'):
        end = time.monotonic() + draw.uniform(0, 0.25 if kind == 'start' else 1.5)
        wait_for(lambda: time.monotonic() > end, process)
    else:
        names, nth = (
            (('metrics.tmp',), 1)
            if kind == 'metrics'
            else (('ckpt.tmp', 'best.tmp'), draw.randint(1, 12))
        )
        seen, there = 0, False

        def begun():  # the nth time that such a file appears
            nonlocal seen, there
            before, there = there, any((folder / name).exists() for name in names)
            seen += there and not before
            return seen >= nth

        wait_for(begun, process)
        time.sleep(draw.choice([0, draw.uniform(0, 0.012)]) if kind == 'save' else 0)
    if process.poll() is None:
        process.kill()
    return wait(process) == -signal.SIGKILL


def chaos(cfg, folder, data):
    """Runs under fire until `kills` processes were killed; Failure if anything was lost."""
    draw, begin, killed, runs, resumed, starts = (
        random.Random(cfg.seed),
        (python if cfg.fresh else Forked),
        Counter(),
        0,
        [],
        0,
    )
    while sum(killed.values()) < cfg.kills or not runs:
        runs += 1
        out, alone = folder / f'run{runs}', folder / f'alone{runs}'
        argv = options(draw, data, out)
        with open(folder / f'run{runs}.log', 'w') as log:
            expect(
                wait(Forked([*argv, f'--out_dir={alone}'], log)) == 0,
                f'the run left alone failed: {log.name}',
            )
            step = 0
            while True:
                process = begin(argv, log)
                starts += 1
                struck = sum(killed.values()) < cfg.kills and strike(process, out, draw)
                if wait(process) == 0:
                    break
                expect(struck, f'exit code {process.returncode}: {log.name}')
                left = [path.stem for path in out.glob('*.tmp')] if out.exists() else []
                killed[
                    'inside a save'
                    if {'ckpt', 'best'} & set(left)
                    else 'inside the rewriting of metrics'
                    if left
                    else 'between the updates'
                    if step
                    else 'before the first checkpoint'
                ] += 1
                step = check_files(out, step)
                resumed.append(step)
        check_outcome(out, alone, UPDATES)
        for done in (out, alone):
            shutil.rmtree(done)
    print(
        f'{sum(killed.values())} kills in {runs} runs, {starts} starts: '
        + ', '.join(f'{n} {kind}' for kind, n in killed.most_common())
    )
    print(
        f'resumed from {len(set(resumed) - {0})} different steps, {resumed.count(0)} times from '
        'none; nothing unreadable, nothing lost, all results as without kills'
    )


# ---- torchrun


def two_processes(argv, log):
    """The run in two children, without torchrun: what the killed run is held against."""
    with socket.socket() as free:
        free.bind(('localhost', 0))
        port = str(free.getsockname()[1])
    env = {'WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': port}
    return [Forked(argv, log, env | {'RANK': rank, 'LOCAL_RANK': rank}) for rank in ('0', '1')]


def workers(process):
    found = subprocess.run(
        ['pgrep', '-P', str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    return [int(pid) for pid in found]


def has_saved(folder, step):
    return (folder / 'ckpt.pt').exists() and checkpoint.read_latest(folder)['step'] >= step


def has_lost(process, worker):
    return worker not in workers(process)


def chaos_torchrun(cfg, folder, data):
    draw, alone, out = random.Random(cfg.seed), folder / 'alone', folder / 'run'
    steps = 60 * max(1, cfg.kills)
    argv = [
        *options(draw, data, out),
        f'--max_iters={steps}',
        '--save_interval=5',
        '--keep_last=1',
        '--eval_interval=20',
    ]
    with open(folder / 'run.log', 'w') as log:
        left_alone = two_processes([*argv, f'--out_dir={alone}'], log)
        expect(
            [wait(process) for process in left_alone] == [0, 0],
            f'the run left alone failed: {log.name}',
        )
        command = [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--standalone',
            '--nproc_per_node=2',
            f'--max_restarts={cfg.kills}',
            str(ROOT / 'train.py'),
            *argv,
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {'OMP_NUM_THREADS': '1'}
        )
        try:
            step, resumed = 0, []
            for kill in range(cfg.kills):
                alive = wait_for(functools.partial(has_saved, out, step + 5), process)
                expect(alive, f'the run ended before kill {kill}: {log.name}')
                time.sleep(draw.uniform(0, 0.1))
                rank0 = int((out / 'lock').read_text().split()[0])
                victim = (
                    rank0
                    if draw.random() < 0.5
                    else next(pid for pid in workers(process) if pid != rank0)
                )
                os.kill(victim, signal.SIGKILL)
                restarted = wait_for(functools.partial(has_lost, process, victim), process)
                expect(restarted, 'torchrun did not restart')
                step = check_files(out, step)
                resumed.append(f'rank {0 if victim == rank0 else "1"} at step {step}')
            expect(wait(process) == 0, f'exit code {process.returncode}: {log.name}')
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    starts = [record['step'] for record in records(out) if 'config' in record]
    expect(len(starts) == cfg.kills + 1, 'starts', starts)
    check_outcome(out, alone, steps)
    print(
        f'torchrun, two processes: killed {", ".join(resumed)}; went on from {starts[1:]}; '
        'all results as without kills'
    )


def main(argv):
    cfg = build(ChaosConfig, parse(argv, ChaosConfig))
    folder, t0 = Path(tempfile.mkdtemp(prefix='chaos-')), time.monotonic()
    try:
        (chaos_torchrun if cfg.torchrun else chaos)(cfg, folder, write_data(folder / 'data'))
    except (Failure, UserError) as error:
        raise SystemExit(f'LOST with --seed={cfg.seed}: {error}\nsee {folder}') from None
    shutil.rmtree(folder)
    print(f'{time.monotonic() - t0:.0f} s')


if __name__ == '__main__':
    run(main)
