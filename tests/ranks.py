"""Launches of several ranks without torchrun, forked from a process that has torch loaded.

A launch costs no import this way. `python tests/ranks.py` reads one request per line from standard
input, {"processes": N, "runs": [[arguments of train.py, step], ...]}, and answers with the list of
the ranks' exit codes. The runs of a request take turns in one process group; rank 1 is sent a
SIGTERM at `step` of its run, unless that is null. Each rank leaves rank<N>.json in a run's folder:
its exit code, its last message and the digest of its weights.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import torch.distributed
from conftest import call, on_steps

import train
from nanonag import checkpoint

PATIENCE = 120  # seconds of a request


class Launcher:
    """A process that forks the ranks; use as a context manager."""

    def __init__(self, folder):
        self.errors = folder / 'ranks.stderr'

    def __enter__(self):
        with open(self.errors, 'w') as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {'OMP_NUM_THREADS': '1'},
            )
        return self

    def launch(self, processes, runs):
        """Does the runs, a list of (arguments, step of the signal or None), in that many ranks."""
        request = {'processes': processes, 'runs': runs}
        self.process.stdin.write(json.dumps(request) + '\n')
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline() or 'null')
        assert codes == [0] * processes, (codes, self.errors.read_text()[-3000:])

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def do_runs(rank, runs):
    """What each rank does: the runs, one after the other in one process group."""
    torch.distributed.init_process_group('gloo')
    stop, make, current = train.runtime.stop, train.configure_optimizer, {}

    def watched(model, *args):
        current['model'] = model
        return make(model, *args)

    def signal_rank_1(step):
        if step == current['stop_at'] and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the other ranks have to learn of it

    train.configure_optimizer = watched
    on_steps(signal_rank_1)
    for i, (argv, current['stop_at']) in enumerate(runs):
        torch.distributed.barrier()  # rank 0 is done with its files
        train.runtime.stop = stop if i == len(runs) - 1 else lambda: None
        code, message = call(train.main, argv)
        out_dir = next(option for option in argv if option.startswith('--out_dir=')).split('=')[1]
        sharded = '--parallel=fsdp' in argv
        weights = '' if sharded else checkpoint.digest(current['model'].state_dict())
        Path(out_dir, f'rank{rank}.json').write_text(
            json.dumps({'code': code, 'message': message, 'weights': weights})
        )
    assert not torch.distributed.is_initialized()


def fork_rank(rank, processes, port, runs):
    """The process id of a rank that does the runs."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ |= {'MASTER_ADDR': 'localhost', 'MASTER_PORT': str(port)}
        os.environ |= {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(processes)}
        do_runs(rank, runs)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(pids):
    """The exit codes of processes; where one fails or time is up, the others are killed."""
    codes, deadline = {}, time.monotonic() + PATIENCE
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main():
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(('localhost', 0))
            port = free.getsockname()[1]
        pids = [
            fork_rank(rank, request['processes'], port, request['runs'])
            for rank in range(request['processes'])
        ]
        print(json.dumps(wait_for(pids)), flush=True)


if __name__ == '__main__':
    main()
