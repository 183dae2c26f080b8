"""A run cannot be lost: the short form of chaos.py, which kills runs for as long as one likes."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    'options, found',
    [
        (['--kills=5', '--seed=2'], '5 kills in . runs?'),
        (['--kills=1', '--torchrun=True', '--seed=1'], 'torchrun, two processes: killed rank'),
    ],
    ids=['kill -9', 'kill -9 of one worker of two'],
)
def test_killed_runs_end_as_if_left_alone(options, found, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / 'tests' / 'chaos.py', *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {'OMP_NUM_THREADS': '1', 'TMPDIR': str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(found, done.stdout) and 'all results as without kills' in done.stdout
