"""The fuzzer in short, and that it sees what it looks for."""

import os
import re
import subprocess
import sys

import fuzz
import pytest

from nanonag.cli import UserError
from nanonag.files import ROOT


def test_a_hundred_cases_hurt_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, 'tests/fuzz.py'), '--seed=2024', '--cases=100'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        timeout=100,
    )
    assert (
        done.returncode == 0
        and '100 cases in' in done.stdout
        and '0 kinds of findings' in done.stdout
    ), done.stdout + done.stderr


def good(argv):
    os.makedirs('out')
    with open('out/file', 'w') as file:
        file.write('x')


def wrong_type(argv):
    return {}['x']


def told(argv):
    raise UserError('a mistake')


def silent(argv):
    raise SystemExit(2)


def stopped(argv):
    raise SystemExit(75)


def outside(argv):
    open('beside', 'w').close()


def removes(argv):
    os.remove('there')


def greedy(argv):
    return len(bytearray(os.urandom(1)) * (2 * fuzz.GROWTH))


def endless(argv):
    while True:
        pass


def killed(argv):
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    'main, code, finding',
    [
        (good, 0, None),
        (told, 2, None),
        (wrong_type, 1, 'KeyError at test_fuzz.py'),
        (silent, 2, 'without a message'),
        (stopped, 75, 'exit code 75'),
        (outside, 0, 'touched .*beside'),
        (removes, 0, 'touched .*there'),
        (greedy, 0, 'memory'),
    ],
)
def test_what_a_script_must_not_do_is_seen(main, code, finding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'there').touch()
    found_code, _, findings = fuzz.watched(main, [], tmp_path)
    assert found_code == code and len(findings) == (finding is not None)
    assert finding is None or re.search(finding, findings[0])


@pytest.mark.parametrize(
    'main, finding', [(endless, 'no end within 0.5 s'), (killed, 'the process died, exit code -9')]
)
def test_a_hang_and_a_crash_are_findings_and_the_rest_goes_on(main, finding, tmp_path, monkeypatch):
    cfg = fuzz.FuzzConfig(cases=3, limit=0.5)
    (tmp_path / 'base').mkdir()
    monkeypatch.setattr(fuzz, 'SCRIPTS', {'bad': (main, ()), 'good': (good, ())})

    def make_case(cfg, number, base, folder):
        fuzz.Case(base, folder)
        return 'kind', ('good', 'bad', 'good')[number], []

    monkeypatch.setattr(fuzz, 'make_case', make_case)
    outcomes = list(fuzz.outcomes(cfg, tmp_path / 'base', tmp_path / 'case'))
    assert [findings for *_, findings, _ in outcomes] == [[], [finding], []]


def test_a_case_is_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, 'GROWTH', 2**20)  # no case is run: a small bomb will do
    (tmp_path / 'base').mkdir()
    fuzz.make_materials(tmp_path / 'base')
    for number in range(20):
        first, second = [
            fuzz.make_case(fuzz.FuzzConfig(seed=5), number, tmp_path / 'base', tmp_path / 'case')
            for _ in range(2)
        ]
        assert first == second
