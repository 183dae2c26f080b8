"""configurator.py and config/: pytest tests/test_config.py"""

import glob
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanonag import cli, files
from nanonag.cli import UserError, run
from nanonag.configurator import build, parse
from nanonag.help import show_help

ROOT = files.ROOT
CONFIGS = sorted(
    os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, 'config', '*.py'))
)
RUNS = [path for path in CONFIGS if not os.path.basename(path).startswith('base_')]


@dataclass(frozen=True)
class Model:
    n_layer: int = 12
    dropout: float = 0.0
    bias: bool = False
    pos: Literal['learned', 'rope'] | None = None
    tie_weights: bool | None = None


@dataclass(frozen=True)
class Run:
    out_dir: str = 'out'
    name: str | None = None
    max_iters: int = 100
    weight_decay: float | None = None
    compile: Literal['auto', 'True', 'False'] = 'auto'
    input: tuple[str, ...] = ()


def read(*argv):
    return parse(argv, Model, Run)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write text (or bytes) to a file of an otherwise empty working directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name='x.py'):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


@pytest.mark.parametrize(
    'argv, key, value',
    [
        ('--n_layer=6', 'n_layer', 6),
        ('--n_layer 6', 'n_layer', 6),
        ('--n_layer=6e0', 'n_layer', 6),
        ('--max_iters -1', 'max_iters', -1),
        ('--max_iters=6e5', 'max_iters', 600000),
        ('--max_iters=9007199254740993', 'max_iters', 2**53 + 1),
        ('--dropout=1', 'dropout', 1.0),
        ('--dropout -1e-4', 'dropout', -1e-4),
        ('--dropout=inf', 'dropout', float('inf')),
        ('--weight_decay=None', 'weight_decay', None),
        ('--weight_decay=0', 'weight_decay', 0.0),
        ('--bias', 'bias', True),
        ('--bias --n_layer=6', 'bias', True),
        ('--bias=False', 'bias', False),
        ('--bias true', 'bias', True),
        ('--bias=0', 'bias', False),
        ('--tie_weights', 'tie_weights', True),
        ('--tie_weights=None', 'tie_weights', None),
        ('--pos=rope', 'pos', 'rope'),
        ('--pos None', 'pos', None),
        ('--compile=False', 'compile', 'False'),
        ('--compile=false', 'compile', 'False'),
        ('--out_dir=a=b', 'out_dir', 'a=b'),
        ('--out_dir a=b', 'out_dir', 'a=b'),
        ('--out_dir=', 'out_dir', ''),
        ('--out_dir=1e3', 'out_dir', '1e3'),
        ('--out_dir=None', 'out_dir', 'None'),
        ('--out_dir=True', 'out_dir', 'True'),
        ('--name=None', 'name', None),
        ('--input=a,b', 'input', ('a', 'b')),
        ('--input a b,c --bias', 'input', ('a', 'b', 'c')),
    ],
)
def test_command_line(argv, key, value):
    got = read(*argv.split())[key]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    'argv, message',
    [
        (
            '--n_layers=6',
            "--n_layers=6: unknown option 'n_layers'; did you mean 'n_layer'? (--help lists all)",
        ),
        ('--n-layer 6', "--n-layer 6: unknown option 'n-layer'; did you mean 'n_layer'?"),
        ('--', "--: unknown option ''"),
        ('--base=x.py', "--base=x.py: unknown option 'base'; did you mean 'bias'?"),
        (
            '--n_layer',
            '--n_layer: the value is missing; write --n_layer=VALUE, where n_layer takes an '
            'integer',
        ),
        ('--n_layer --bias', '--n_layer: the value is missing'),
        ('--n_layer=', "--n_layer=: n_layer takes an integer, not ''"),
        ('--n_layer six', "--n_layer six: n_layer takes an integer, not 'six'"),
        ('--n_layer=1.5', '--n_layer=1.5: n_layer takes an integer, not 1.5'),
        ('--n_layer=True', 'n_layer takes an integer, not True'),
        ('--n_layer=None', "n_layer takes an integer, not 'None'"),
        ('--n_layer=inf', 'n_layer takes an integer, not inf'),
        ('--dropout=1' + '0' * 400, 'dropout takes a number, not 1000'),
        ('--n_layer=9223372036854775808', 'n_layer takes an integer, not 9223372036854775808'),
        ('--dropout=', "dropout takes a number, not ''"),
        ('--dropout=nan', 'dropout takes a number, not nan'),
        ('--dropout=1,5', "dropout takes a number, not '1,5'"),
        ('--weight_decay=x', "weight_decay takes a number or None, not 'x'"),
        ('--bias=yes', "--bias=yes: bias takes True or False, not 'yes'"),
        ('--bias=None', "bias takes True or False, not 'None'"),
        ('--bias=2', 'bias takes True or False, not 2'),
        ('--tie_weights=', "tie_weights takes True or False or None, not ''"),
        (
            '--pos=rop',
            "--pos=rop: pos takes learned or rope or None, not 'rop'; did you mean 'rope'?",
        ),
        (
            '--compile',
            '--compile: the value is missing; write --compile=VALUE, where compile takes auto or '
            'True or False',
        ),
        ('--input=a,,b', "input takes names like a,b, not ('a', '', 'b')"),
        (
            'n_layer=6',
            'n_layer=6: cannot be read as a config file: options are written --key=value',
        ),
        (
            '-n_layer=6',
            '-n_layer=6: cannot be read as a config file: options are written --key=value',
        ),
        (
            'owt_lt_nag',
            'owt_lt_nag: cannot be read as a config file: options are written --key=value, config '
            "files config/NAME.py; did you mean 'config/owt_lt_nag.py'?",
        ),
        (
            'config/owt_lt_nga.py',
            'config/owt_lt_nga.py: cannot be read as a config file: No such file or directory; '
            "did you mean 'config/owt_lt_nag.py'?",
        ),
        ('\0.py', 'cannot be read as a config file: embedded null byte'),
        ('a' * 5000 + '.py', 'cannot be read as a config file: File name too long'),
    ],
)
def test_command_line_errors(argv, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read(*argv.split(' '))


@pytest.mark.parametrize(
    'text, values',
    [
        ('', {}),
        ('# a comment\n\nn_layer = 6  # another\n', {'n_layer': 6}),
        ('\ufeffn_layer = 6\r\nbias = True', {'n_layer': 6, 'bias': True}),
        (
            'n_layer = 480 / 40\nmax_iters = n_layer * (1 + 2) ** 2 - 7 // 2 % 2',
            {'n_layer': 12, 'max_iters': 107},
        ),
        ('max_iters = 6e5\nn_layer = max_iters // 1e5', {'max_iters': 600000, 'n_layer': 6}),
        ('n_layer = 1\nn_layer = n_layer + 1', {'n_layer': 2}),
        ('dropout = -1', {'dropout': -1.0}),
        ('compile = False\nbias = 0', {'compile': 'False', 'bias': False}),
        (
            'weight_decay = None\npos = "rope"\nname = None',
            {'weight_decay': None, 'pos': 'rope', 'name': None},
        ),
        ('input = ["a", "b,c"]\nout_dir = "é"', {'input': ('a', 'b,c'), 'out_dir': 'é'}),
    ],
)
def test_config_file(config, text, values):
    assert read(config(text)) == values


@pytest.mark.parametrize(
    'text, message',
    [
        ('bias = True\nn_layers = 6', "x.py:2: unknown option 'n_layers'; did you mean 'n_layer'?"),
        ('n_layer = "6"', "x.py:1: n_layer takes an integer, not '6'"),
        ('n_layer = True', 'x.py:1: n_layer takes an integer, not True'),
        ('n_layer = 7 / 2', 'x.py:1: n_layer takes an integer, not 3.5'),
        ('n_layer = (-8) ** 0.5', 'x.py:1: n_layer takes an integer, not ('),
        ('bias = 1.0', 'x.py:1: bias takes True or False, not 1.0'),
        ('dropout = 1e999 - 1e999', 'x.py:1: dropout takes a number, not nan'),
        ('out_dir = 3', 'x.py:1: out_dir takes text, not 3'),
        ('out_dir = None', 'x.py:1: out_dir takes text, not None'),
        ('out_dir = b"a"', "x.py:1: out_dir takes text, not b'a'"),
        ('out_dir = "\\0"', "x.py:1: out_dir takes text, not '\\x00'"),
        (r'out_dir = "\ud800"', r"x.py:1: out_dir takes text, not '\ud800'"),
        (r'input = "a", "\ud800"', r"x.py:1: input takes names like a,b, not ('a', '\ud800')"),
        (r'input = "a", "\0"', r"x.py:1: input takes names like a,b, not ('a', '\x00')"),
        ('input = "a"', "x.py:1: input takes names like a,b, not 'a'"),
        (
            'n_layer = max_iters',
            "x.py:1: n_layer: 'max_iters' is not assigned above, here or in the base",
        ),
        (
            'n_layer = len("a")',
            "x.py:1: n_layer: len('a') is not allowed; write a literal or arithmetic",
        ),
        ('n_layer = 1 if 1 else 2', 'x.py:1: n_layer: 1 if 1 else 2 is not allowed'),
        ('n_layer = 1 << 2', 'x.py:1: n_layer: 1 << 2 is not allowed'),
        ('n_layer = True + 1', 'x.py:1: n_layer: arithmetic is for numbers only'),
        ('out_dir = "a" * 10 ** 9', 'x.py:1: out_dir: arithmetic is for numbers only'),
        ('n_layer = 1 / 0', 'x.py:1: n_layer: division by zero'),
        ('n_layer = 9 ** 9 ** 9', 'x.py:1: n_layer: '),
        ('n_layer = 2 ** 63', 'x.py:1: n_layer: the power is too large'),
        ('n_layer = 2 ** 62 * 2', 'x.py:1: n_layer: the integer does not fit into 64 bits'),
        ('n_layer = ' + '-' * 20000 + '1', 'x.py:1: '),
        ('n_layer = ' + '+'.join('1' * 20000), 'x.py:1: '),
        (
            'n_layer = ' + '(' * 5000 + '1' + ')' * 5000,
            'x.py:1: cannot be read as a config file: too many nested',
        ),
        ('n_layer = ' + '9' * 5000, 'x.py:1: cannot be read as a config file: Exceeds the limit'),
        ('#' * 70000, 'x.py:1: cannot be read as a config file: it has more than 65536 bytes'),
        ('n_layer = 6\0', 'x.py:1: cannot be read as a config file: source code'),
        (b'bias = True\nout_dir = "\xff"', 'x.py:2: cannot be read as a config file: '),
        ('bias = True\nn_layer =', 'x.py:2: cannot be read as a config file: invalid syntax'),
        (
            'bias = True\nimport os',
            'x.py:2: a config file holds only assignments like `n_layer = 12`',
        ),
        ('n_layer: int = 6', 'x.py:1: a config file holds only assignments'),
        ('n_layer = max_iters = 6', 'x.py:1: a config file holds only assignments'),
        ('n_layer, max_iters = 6, 6', 'x.py:1: a config file holds only assignments'),
        ('n_layer += 6', 'x.py:1: a config file holds only assignments'),
        ('base = 3', 'x.py:1: base takes text, not 3'),
        (
            'base = "y.py"',
            'x.py:1: y.py: cannot be read as a config file: No such file or directory',
        ),
        ('base = "x.py"', 'x.py:1: x.py:1: cannot be read as a config file: it is its own base'),
        ('n_layer = 6\nbase = "y.py"', 'x.py:2: `base` must be the first assignment'),
    ],
)
def test_config_file_errors(config, text, message):
    with pytest.raises(UserError, match='^' + re.escape(message)):
        read(config(text))


def test_a_config_file_is_never_executed(config, tmp_path):
    for expression in (
        'open("marker", "w")',
        '[open("marker", "w")][0]',
        '(lambda: open("marker", "w"))()',
        "f\"{open('marker', 'w')}\"",
        '[open("marker", "w") for _ in "a"]',
        '6 + open("marker", "w")',
    ):
        with pytest.raises(UserError):
            read(config(f'n_layer = {expression}'))
        with pytest.raises(UserError):
            read(config(expression))
    assert not (tmp_path / 'marker').exists()


def test_the_last_one_wins(config):
    a, b = config('n_layer = 1\nmax_iters = 1', 'a.py'), config('n_layer = 2', 'b.py')
    assert read(a, b, '--n_layer=3') == {'n_layer': 3, 'max_iters': 1}
    assert read('--n_layer=3', a, b) == {'n_layer': 2, 'max_iters': 1}
    assert read('--n_layer=3', '--n_layer=4') == {'n_layer': 4}


def test_base(config, tmp_path):
    (tmp_path / 'deep').mkdir()
    config('n_layer = 2\nmax_iters = 10', 'deep/a.py')
    config('base = "a.py"\nn_layer = 3 * n_layer', 'deep/b.py')
    path = config(
        '# relative to this file\nbase = "deep/b.py"\nmax_iters = max_iters + n_layer', 'c.py'
    )
    assert read(path) == {'n_layer': 6, 'max_iters': 16}
    config('base = "../c.py"', 'deep/a.py')
    with pytest.raises(
        UserError, match=r'^deep/a.py:1: c.py:1: cannot .* its own base, directly or through others'
    ):
        read(path)


def test_build_and_clashes():
    overrides = read('--n_layer=6', '--max_iters=5')
    assert build(Model, overrides) == Model(n_layer=6) and build(Run, overrides) == Run(max_iters=5)
    with pytest.raises(AssertionError, match='Model.n_layer'):
        parse([], Model, Model)
    with pytest.raises(AssertionError, match='Bad.base'):
        parse([], make_dataclass('Bad', [('base', str, '')]))


def test_run(capsys, monkeypatch):
    def fail(argv):
        raise UserError('n_head does not divide n_embd')

    def interrupt(argv):
        raise KeyboardInterrupt

    waits = []
    monkeypatch.setattr(cli.time, 'sleep', waits.append)
    monkeypatch.setattr(cli.os, '_exit', sys.exit)
    monkeypatch.setattr(sys, 'argv', ['train.py', '--n_layer=6'])
    monkeypatch.delenv('RANK', raising=False)
    message = 'error: n_head does not divide n_embd\n'
    for main, rank, code, printed in [
        (fail, '', 2, message),
        (fail, '0', 2, message),
        (fail, '1', 2, message.replace('\n', ' (rank 1)\n')),
        (interrupt, '', 130, ''),
    ]:
        if rank:
            monkeypatch.setenv('RANK', rank)
        with pytest.raises(SystemExit) as exit:
            run(main)
        assert exit.value.code == code
        assert capsys.readouterr().err == printed
    assert waits == [10]  # rank 1 only: rank 0 has the same to say, and ends it before it does
    seen = []
    run(seen.extend)
    assert seen == ['--n_layer=6']


def test_text_that_the_output_cannot_show_is_escaped(monkeypatch):
    """A run's only words can be a sample that took minutes; the C locale and Windows' pipes know
    few characters."""
    out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    monkeypatch.setattr(sys, 'stdout', out)
    run(lambda argv: print('na\u00efve \u4f60 \udcff'))
    out.flush()
    assert out.buffer.getvalue().decode('ascii').strip() == r'na\xefve \u4f60 \udcff'


PRINTS = """
import sys
sys.path.insert(0, {root!r})
from nanonag.cli import UserError, run
def main(argv):
    print('x' * int(argv[0]) + '\\u20ac')
    if len(argv) > 1:
        raise {{
            'user': UserError('a mistake'),
            'exit': SystemExit(75),
            'words': SystemExit('last words'),
            'other': OSError(5, 'of a disk'),
        }}[argv[1]]
run(main)
"""


def run_print(tmp_path, *args, redirect='', **env):
    """(exit code, stdout, stderr) of a script that prints, under the shell's `redirect`."""
    (tmp_path / 'prints.py').write_text(PRINTS.format(root=str(ROOT)), encoding='utf-8')
    command = f'exec {sys.executable} {tmp_path}/prints.py {" ".join(args)} {redirect}'
    done = subprocess.run(
        command, shell=True, capture_output=True, env=os.environ | {'RANK': '0', **env}, timeout=60
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full here')
@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.parametrize('size', ['10', '100000'])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(tmp_path, size, unbuffered):
    code, _, err = run_print(tmp_path, size, redirect='>/dev/full', PYTHONUNBUFFERED=unbuffered)
    told = 'error: <stdout> cannot be written: No space left on device; '
    assert code == 1 and err == told + 'what is printed there is lost\n'


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full here')
@pytest.mark.parametrize(
    'redirect', ['2>/dev/full', '2>&-', '>&- 2>&-', '<&- >&- 2>&-', '>/dev/full 2>/dev/full']
)
@pytest.mark.parametrize('what, code', [('user', 2), ('exit', 75), ('words', 1)])
def test_exit_codes_outlive_the_streams(tmp_path, redirect, what, code):
    # else the print fails before
    assert run_print(tmp_path, '10', what, redirect=redirect, PYTHONUNBUFFERED='')[0] == code


def test_an_error_of_another_file_is_not_taken_for_the_outputs(tmp_path):
    code, out, err = run_print(tmp_path, '10', 'other')
    assert code == 1 and out.startswith('x' * 10) and 'Traceback' in err and 'of a disk' in err


def test_a_file_opened_under_closed_streams_is_not_printed_into(tmp_path):
    (tmp_path / 'opens.py').write_text(
        f'import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom nanonag.cli import run\n'
        'run(lambda argv: (open(argv[0], "w"), os.write(1, b"printed"), os.write(2, b"warned")))',
        encoding='utf-8',
    )
    subprocess.run(
        f'exec {sys.executable} {tmp_path}/opens.py {tmp_path}/file <&- >&- 2>&-',
        shell=True,
        check=True,
        timeout=60,
    )
    assert (tmp_path / 'file').read_text() == ''


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path):
    assert run_print(tmp_path, '1', PYTHONIOENCODING='ascii') == (0, 'x\\u20ac\n', '')


def test_help_is_read_from_the_source(tmp_path, monkeypatch, capsys):
    (tmp_path / 'model.py').write_text(
        '''
import nothing_like_this
RULES = {'gd': (1, 2), 'nag': (3, 4), **{}}

class Config:
    """é"""
    size: int
    update: str = 'éééééééé'  # one of RULES
    pos: Literal['a', 'b'] | None = None
    def f(self): pass
''',
        encoding='utf-8',
    )
    monkeypatch.setattr('nanonag.help.ROOT', tmp_path)
    monkeypatch.setattr(sys, 'argv', ['train.py', '--n_layer=6'])
    assert show_help('A script.', 'model.py:Config') is None
    monkeypatch.setattr(sys, 'argv', ['train.py', 'x.py', '-h'])
    with pytest.raises(SystemExit) as exit:
        show_help('\nA script.\n', 'model.py:Config')
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert exit.value.code == 0
    assert lines == [
        ['A', 'script.'],
        [],
        ['Config', 'in', 'model.py:'],
        ['--update', 'str', "'éééééééé'", 'one', 'of', 'gd,', 'nag'],
        ['--pos', 'a|b|None', 'None'],
    ]


def test_help_needs_no_torch(tmp_path):
    for name in ('torch', 'numpy'):
        (tmp_path / f'{name}.py').write_text('raise SystemExit("imported for --help")')
    env, before = {**os.environ, 'PYTHONPATH': str(tmp_path)}, os.times()
    out = subprocess.run(
        [sys.executable, 'train.py', '--help'], cwd=ROOT, env=env, capture_output=True, text=True
    )
    after = os.times()
    assert out.returncode == 0 and not out.stderr
    assert (
        re.search(r'--update .*gd, euler_gd, lt_nag', out.stdout) and '--max_iters ' in out.stdout
    )
    # CPU seconds, so that a busy machine does not matter
    assert after.children_user - before.children_user < 1


TEXT = st.text(max_size=20) | st.sampled_from(
    ['--bias', '--n_layer', '--input', '-1', 'x.py', 'None', 'nan']
)
OPTION = st.tuples(st.sampled_from(['--n_layer=', '--dropout=', '--pos=', '--input=']), TEXT).map(
    ''.join
)
TOKENS = [
    'n_layer',
    'dropout',
    'base',
    'input',
    ' = ',
    '\n',
    '(',
    ')',
    '**',
    '-',
    '/',
    '%',
    ',',
    '9',
    '0',
    '1e308',
    '"x.py"',
    'True',
    'None',
    '1j',
    '\0',
    '...',
    'é',
]
SOURCE = st.lists(st.sampled_from(TOKENS), max_size=25).map(''.join) | st.text() | st.binary()


@pytest.mark.filterwarnings('ignore::SyntaxWarning')
@settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(argv=st.lists(TEXT | OPTION), source=SOURCE)
def test_nothing_but_a_user_error(config, argv, source):
    config(source)
    for args in (argv, ['x.py']):
        try:
            build(Model, read(*args)), build(Run, read(*args))
        except UserError as error:
            assert str(error)


# ---- the files in config/


def load(path):
    from model import GPTConfig
    from train import TrainConfig

    overrides = parse([os.path.join(ROOT, path)], GPTConfig, TrainConfig)
    return build(GPTConfig, overrides), build(TrainConfig, overrides), overrides


@pytest.mark.parametrize('path', CONFIGS)
def test_every_config_builds(path):
    import torch

    from model import GPT

    model_config, train_config, overrides = load(path)
    with torch.device('meta'):
        assert GPT(model_config).cfg == model_config
    if 'max_iters' in overrides and 'warmup_iters' in overrides:
        assert overrides['warmup_iters'] < overrides['max_iters']
    if path in RUNS:
        assert train_config.out_dir == 'out/' + os.path.basename(path)[:-3]
    if re.match('(tinystories|owt|ngpt|gpt2)_', os.path.basename(path)):
        sequences = train_config.batch_size * train_config.gradient_accumulation_steps
        assert train_config.gradient_accumulation_steps % 8 == 0
        assert sequences == (512 if os.path.basename(path).startswith('ngpt') else 480)


@pytest.mark.parametrize(
    'path, params',
    [
        ('owt_gd', 124_373_760),
        ('tinystories_gd', 124_373_760),
        ('gpt2_124m', 124_373_760),
        ('owt_euler_gd', 124_373_760),
        ('owt_gd_d900', 162_857_700),
        ('owt_lt_nag', 163_812_168),
        ('tinystories_lt_nag', 163_812_168),
        ('owt_lt_tmm', 163_812_192),
        ('tinystories_lt_tmm', 163_812_192),
        # a velocity norm and three scalars in each of 24 steps
        ('owt_lt_nag_zero', 124_373_760 + 24 * (768 + 3)),
    ],
)
def test_parameters(path, params):
    import torch

    from model import GPT

    with torch.device('meta'):
        assert sum(p.numel() for p in GPT(load(f'config/{path}.py')[0]).parameters()) == params


@pytest.mark.parametrize(
    'path, matrices',
    [
        ('ngpt_0_5b_1k', 468_189_184),
        ('ngpt_0_5b_8k', 468_189_184),
        ('ngpt_nag_0_5b_1k', 468_189_184),
        ('ngpt_1b_4k', 1_025_638_400),
    ],
)
def test_matrices_of_ngpt(path, matrices):
    import torch

    from model import GPT

    with torch.device('meta'):
        assert (
            sum(p.numel() for p in GPT(load(f'config/{path}.py')[0]).parameters() if p.ndim == 2)
            == matrices
        )


def test_the_table_names_every_run():
    """config/README.md and the folder agree, with {a,b} spelled out as the shell does."""

    def expand(name):
        match = re.search(r'\{(.*?)\}', name)
        return (
            [name]
            if not match
            else [
                full
                for part in match[1].split(',')
                for full in expand(name[: match.start()] + part + name[match.end() :])
            ]
        )

    with open(os.path.join(ROOT, 'config', 'README.md'), encoding='utf-8') as file:
        cells = [line.split('|')[1] for line in file if line.startswith('| `')]
    named = [
        name
        for cell in cells
        for pattern in re.findall('`(.*?)`', cell)
        for name in expand(pattern)
    ]
    assert sorted(set(named)) == sorted(os.path.basename(path)[:-3] for path in RUNS)


@pytest.mark.parametrize('path', RUNS)
def test_every_run_chooses_its_own_batch(path):
    """The default accumulation is for a large model: in a small run it would make each update forty
    times the work."""
    assert {'batch_size', 'gradient_accumulation_steps'} <= load(path)[2].keys()
