"""bench.py: what takes part, what a step is, how rounds and numbers are kept. No test looks at how
fast anything was."""

import json
import multiprocessing
import sys
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import call

import bench
from bench import BenchConfig, Scheme, scheme_config
from model import GPT, GPTConfig
from nanonag import report, runtime
from nanonag.benchmark import peers, timing
from nanonag.benchmark.contender import flops_per_token
from nanonag.benchmark.peers import PEERS, HuggingFace
from nanonag.benchmark.tables import speed_table
from nanonag.benchmark.timing import race, results, spread
from nanonag.benchmark.workloads import read_suite
from nanonag.cli import UserError
from nanonag.optim import configure_optimizer
from nanonag.workers import worker_pool
from train import TrainConfig

TINY = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=37, block_size=12)
FLAGS = [f'--{key}={value}' for key, value in TINY.items()] + [
    '--prompt_tokens=3',
    '--max_new_tokens=5',
    '--device=cpu',
    '--rounds=2',
    '--batch_size=2',
]


def tiny(update='lt_nag', **options):
    return GPTConfig(**TINY, update=update, **options)


@pytest.fixture
def rt():
    return runtime.start('cpu', 'float32')


# who takes part


def test_a_scheme_may_carry_its_own_options():
    cfg = scheme_config('gd:pos=rope:mlp=swiglu:n_embd=28', TINY)
    assert cfg == GPTConfig(**{**TINY, 'n_embd': 28}, update='gd', pos='rope', mlp='swiglu')
    assert scheme_config('ngpt', TINY) == tiny('ngpt')
    assert scheme_config('gd:n_layer=3', TINY | {'pos': 'rope'}) == GPTConfig(
        **{**TINY, 'n_layer': 3}, update='gd', pos='rope'
    )


@pytest.mark.parametrize(
    'text, message',
    [
        ('gt', 'schemes: gt: .*no scheme.*lt_nag'),
        ('gd:pos=ropes', "schemes: gd:pos=ropes: .*did you mean 'rope'"),
        ('gd:poss=rope', "did you mean 'pos'"),
        ('gd:update=ngpt', 'update cannot stand here'),
        ('gd:block_size=6', 'block_size cannot'),
        ('ngpt:tie_weights=True', 'tie_weights=True'),
        ('gd:rope', "unknown option 'rope'"),
        ('gd:', 'unknown option'),
    ],
)
def test_bad_schemes_are_told(text, message):
    with pytest.raises(UserError, match=message):
        bench.main([*FLAGS, '--schemes', 'gd', text])


@pytest.mark.parametrize(
    'args, message',
    [
        (['--update=gd'], '--schemes gd'),
        (['--rounds=0'], 'rounds=0'),
        (['--what=sleep'], 'what=sleep'),
        (['--seed=-1'], 'seed=-1'),
        (['--max_new_tokens=10'], 'do not fit block_size=12 of gd'),
        (['--what=generate', '--profile'], 'profile'),
        (['--json=/dev/null/x.json'], 'json=.*choose another'),
        (['--device=abacus'], 'device=abacus'),
    ],
)
def test_bad_options_are_told(args, message):
    with pytest.raises(UserError, match=message):
        bench.main([*FLAGS, *args])


def test_the_sizes_are_small_unless_one_is_given(monkeypatch):
    seen = []

    def measure(entries, cfg, rt):
        seen.append(entries[0][1])
        raise UserError('seen')

    monkeypatch.setattr(bench, 'measure', measure)
    call(bench.main, ['--vocab_size=50'])
    call(bench.main, ['--n_layer=3'])
    assert seen == [
        GPTConfig(**bench.SMALL, update='gd', vocab_size=50),
        GPTConfig(update='gd', n_layer=3),
    ]


@pytest.mark.parametrize(
    'args, message',
    [
        (['--what=generate', '--steps=2'], 'no effect with what=generate: steps=2'),
        (['--what=generate', '--memory=True'], 'no effect.*memory=True'),
        (['--what=memory', '--memory=False'], 'no effect.*memory=False'),
        (['--what=generate', '--optimizer=muon'], 'optimizer=muon'),
        (['--what=train', '--gen_batch=2', '--prompt_tokens=3'], 'gen_batch=2, prompt_tokens=3'),
        (['--peer=hf', '--pos=rope'], 'peer=hf.*pos=learned.*gd:pos=rope'),
        (['--peer=hf', '--tie_weights=False'], 'tie_weights'),
        (['--peer=jax'], 'peer=jax: choose among hf, hf_tuned'),
    ],
)
def test_options_without_effect_are_told(args, message):
    with pytest.raises(UserError, match=message):
        bench.main(['--schemes=gd', *args])


@pytest.mark.parametrize(
    'args', [['--what=generate', '--memory=False'], ['--what=memory', '--memory=True']]
)
def test_what_happens_anyway_may_be_asked_for(args, monkeypatch):
    def measure(entries, cfg, rt):
        raise UserError('accepted')

    monkeypatch.setattr(bench, 'measure', measure)
    assert call(bench.main, args) == (2, 'accepted')


def test_a_missing_peer_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(UserError, match='pip install transformers'):
        bench.main([*FLAGS, '--peer=hf'])


@pytest.mark.parametrize(
    'error, told',
    [
        (torch.OutOfMemoryError('CUDA'), True),
        (RuntimeError("can't allocate memory: 9"), True),
        (RuntimeError('an illegal memory access'), False),
    ],
)
def test_out_of_memory_is_told_and_nothing_else_is_hidden(monkeypatch, error, told):
    def fail(*args):
        raise error

    monkeypatch.setattr(bench, 'measure', fail)
    with pytest.raises(
        UserError if told else RuntimeError, match='lower --batch_size' if told else 'illegal'
    ):
        bench.main(FLAGS)


# what a step is


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_a_step_is_trains_step(update, optimizer, rt):
    """Two steps against the same written out: loss, backward, clip at 1, configure_optimizer's
    step."""
    cfg = BenchConfig(optimizer=optimizer, batch_size=2, seed=3)
    one = Scheme('x', tiny(update), cfg, rt)
    torch.manual_seed(3)
    model = GPT(tiny(update))
    reference = configure_optimizer(
        model, TrainConfig(optimizer=optimizer).resolve(model.cfg.normalized)
    )
    for _ in range(2):
        model(one.tokens[:, :-1], one.tokens[:, 1:])[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reference.step()
        model.zero_grad()
        one.step()
    assert one.tokens.shape == (2, 13) and one.params == model.num_params()
    for (name, p), q in zip(one.model.named_parameters(), model.parameters()):
        assert torch.equal(p, q), name
        assert p.grad is None


def test_all_contenders_get_the_same_tokens(rt):
    pytest.importorskip('transformers')
    cfg = BenchConfig(batch_size=2, prompt_tokens=4, gen_batch=3)
    ours = Scheme('ngpt', tiny('ngpt'), cfg, rt)
    peer = HuggingFace(PEERS['hf'], tiny('gd'), cfg, rt)
    assert torch.equal(ours.tokens, peer.tokens)
    assert torch.equal(ours.prompt, peer.prompt)
    assert ours.prompt.shape == (3, 4)


def test_the_peer_is_gpt2_of_the_same_size_and_learns(rt):
    pytest.importorskip('transformers')
    one = HuggingFace(
        PEERS['hf'], tiny('gd'), BenchConfig(batch_size=2, max_new_tokens=5, prompt_tokens=3), rt
    )
    assert one.params == GPT(tiny('gd', bias=True)).num_params()
    before = [p.clone() for p in one.model.parameters()]
    one.step()
    assert all(not torch.equal(p, q) for p, q in zip(one.model.parameters(), before))
    assert one.generate().shape == (1, 8) and one.model.training


def test_generation_adds_the_tokens_asked_for(update, rt):
    one = Scheme(
        update,
        tiny(update),
        BenchConfig(what=('generate',), gen_batch=2, prompt_tokens=3, max_new_tokens=5),
        rt,
    )
    tokens = one.generate()
    assert tokens.shape == (2, 8) and torch.equal(tokens[:, :3], one.prompt)


# numbers


@pytest.mark.parametrize(
    'options, matrices',
    [
        (dict(update='gd'), 2 * 12 * 16**2 + 37 * 16),
        (dict(update='lt_nag', tie_weights=False), 2 * 12 * 16**2 + 37 * 16),
        (dict(update='gd', mlp='swiglu', pos='rope'), 2 * 16 * 16**2 + 37 * 16),
        (dict(update='ngpt'), 2 * 16 * 16**2 + 37 * 16),
    ],
)
def test_flops_count_matrices_and_attention_but_no_tables(options, matrices):
    assert flops_per_token(GPT(tiny(**options))) == 6 * matrices + 12 * 2 * 16 * 12


def test_flops_of_gpt2_small():
    """124M: 6 x (124,373,760 - positions - LayerNorm gains) + attention, by the closed form."""
    with torch.device('meta'):
        model = GPT(GPTConfig(update='gd'))
    assert (
        flops_per_token(model) == 6 * (124_373_760 - 1024 * 768 - 25 * 768) + 12 * 12 * 768 * 1024
    )


def test_rounds_rotate_and_the_first_two_do_not_count(monkeypatch):
    """On a clock that only the contenders move: c takes 1, 2, 3 ... times its cost, round by
    round."""
    clock, turns = [0.0], []
    contenders = [
        SimpleNamespace(name=name, cost=cost, turn=0)
        for name, cost in (('a', 1.0), ('b', 10.0), ('c', 100.0))
    ]

    def act(one):
        turns.append(one.name)
        one.turn += 1
        clock[0] += one.cost * one.turn

    monkeypatch.setattr(timing.time, 'perf_counter', lambda: clock[0])
    ticks, waits = [], []
    seconds = race(
        contenders,
        act,
        3,
        SimpleNamespace(synchronize=lambda: waits.append(len(turns))),
        ticks.append,
    )
    assert ''.join(turns) == 'abcbcacababcbca' and ticks == turns
    assert seconds == [[3, 4, 5], [30, 40, 50], [300, 400, 500]]
    # the device is waited for before and after each turn
    assert waits == [n for i in range(15) for n in (i, i + 1)]


def test_results_compare_round_by_round():
    first, second = results([[1.0, 2.0, 4.0], [2.0, 2.0, 12.0]], count=2, tokens=100)
    assert (
        first['relative'] == [1, 1, 1]
        and second['relative'] == [2, 1, 3]
        and second['relative_spread']['median'] == 2
    )
    assert (
        first['seconds'] == [0.5, 1, 2]
        and first['tokens_per_s'] == 50
        and second['tokens_per_s'] == 50
    )


def test_spread():
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {'median': 3, 'min': 1, 'max': 5, 'q1': 2, 'q3': 4}
    assert spread([7.0]) == dict.fromkeys(('median', 'min', 'max', 'q1', 'q3'), 7)


def test_peak_memory_is_of_this_process_alone():
    """What the parent process holds does not count, although getrusage on Linux includes it."""
    ballast = torch.ones(2**28)  # 1 GiB
    with worker_pool(1) as pool:
        peak = pool.submit(timing.peak_resident_bytes).result()
    assert 2**20 < peak < ballast.nbytes


def test_peak_memory_is_that_of_two_steps(rt):
    """The first step makes Adam's state, the second holds it beside the gradients."""
    steps = []
    contender = SimpleNamespace(step=lambda: steps.append(1), rt=rt)
    assert timing.peak_bytes_here(lambda: contender) > 2**20
    assert len(steps) == 2


@pytest.mark.parametrize('name, keeps', [('hf', [True, False]), ('hf_tuned', [True])])
def test_memory_of_a_peer_is_measured_with_its_own_allocator(name, keeps, monkeypatch):
    """runtime.start sets the allocator; for a peer as its users have it, it is set back."""
    seen = []

    def keep_freed_memory(keep=True):
        seen.append(keep)

    monkeypatch.setattr(runtime, 'keep_freed_memory', keep_freed_memory)
    monkeypatch.setattr(peers.memory, 'keep_freed_memory', keep_freed_memory)
    monkeypatch.setattr(peers, 'HuggingFace', lambda *args: None)
    bench.lone_contender(PEERS[name], tiny('gd'), BenchConfig(device='cpu'))
    assert seen == keeps


# the whole


def test_everything_ends_up_in_the_json_file(tmp_path, capsys, monkeypatch):
    pytest.importorskip('transformers')
    monkeypatch.setattr(bench, 'peak_bytes', lambda name, make: 2**31 if name == 'gd' else None)
    monkeypatch.setattr(runtime.Runtime, 'peak_flops', lambda self: 1e12)
    monkeypatch.setattr(sys, 'argv', ['bench.py', '--seed=5'])
    path = tmp_path / 'new' / 'bench.json'
    bench.main(
        [
            *FLAGS,
            '--schemes=gd,ngpt:rope_base=500',
            '--peer=hf',
            '--dtype=bfloat16',
            '--steps=2',
            f'--json={path}',
        ]
    )
    data = json.loads(path.read_text())
    assert data.keys() == {
        'date',
        'command',
        'commit',
        'machine',
        'device',
        'dtype',
        'versions',
        'config',
        'results',
    }
    assert data['command'] == 'python bench.py --seed=5' and data['dtype'] == 'bfloat16'
    assert data['versions'].keys() == {'python', 'torch', 'transformers'}
    assert data['machine']['cores'] >= 1 and data['config']['schemes'] == [
        'gd',
        'ngpt:rope_base=500',
    ]
    gd, ngpt, peer = data['results']
    assert [r['scheme'] for r in data['results']] == ['gd', 'ngpt:rope_base=500', PEERS['hf']]
    assert (
        gd['gpt_config'] == asdict(tiny('gd'))
        and ngpt['gpt_config']['rope_base'] == 500
        and peer['gpt_config'] is None
    )
    for record in data['results']:
        for stage, tokens in (('train', 2 * 12), ('generate', 1)):  # in a step, in a token's time
            result = record[stage]
            assert len(result['seconds']) == len(result['relative']) == 2
            assert result['tokens_per_s'] == pytest.approx(
                tokens / result['seconds_spread']['median']
            )
            assert result['relative'] == pytest.approx(
                [a / b for a, b in zip(result['seconds'], gd[stage]['seconds'])]
            )
    assert gd['train']['mfu'] == pytest.approx(
        gd['flops_per_token'] * gd['train']['tokens_per_s'] / 1e12
    )
    assert peer['train']['mfu'] is None and gd['peak_memory_bytes'] == 2**31
    assert multiprocessing.active_children() == []  # the peer's process has ended
    out = capsys.readouterr().out
    assert 'training: 1 x 2 x 12 tokens' in out and 'generation: 1 x 5 tokens' in out
    assert all(
        word in out
        for word in (
            'MFU',
            'process peak',
            '2.00 GiB',
            'ngpt:rope_base=500',
            f'{gd["parameters"]:,}',
        )
    )


def test_a_part_alone_and_the_profile(capsys):
    flags = [flag for flag in FLAGS if '_tokens=' not in flag]
    bench.main([*flags, '--schemes=polyak', '--what=train', '--memory=False', '--profile'])
    out = capsys.readouterr().out
    assert 'aten::' in out and 'generation' not in out and 'MFU' not in out and 'peak' not in out
    bench.main(
        [*(flag for flag in FLAGS if '_size=2' not in flag), '--schemes=polyak', '--what=generate']
    )
    out = capsys.readouterr().out
    assert 'training' not in out and 'generation' in out


def test_the_table_has_three_figures_whatever_the_size():
    def record(scale):
        (result,) = results([[scale, scale]], 1, 100)
        return {'scheme': 'gd', 'parameters': 1, 'peak_memory_bytes': None, 'train': result}

    tables = [
        speed_table([record(scale)], 'train', False) for scale in (1.23456, 0.0123456, 1.2e-6)
    ]
    cells = [table.splitlines()[-1].split()[2] for table in tables]
    assert cells == ['1,235', '12.3', '0.00120']


# a suite and its table


SUITE_SIZES = '--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=13'


class PoolOfThisProcess:
    """worker_pool's interface without the seconds that a process takes to start."""

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


@pytest.fixture
def small_suite(monkeypatch):
    """A suite of three tiny workloads in the place of suites/cpu.txt."""
    workloads = [
        ('training', f'{SUITE_SIZES} --schemes gd lt_nag --what=train --memory=False'),
        ('memory', f'{SUITE_SIZES} --schemes gd --what=memory --batch_size=2'),
        (
            'generation',
            f'{SUITE_SIZES} --schemes gd --what=generate --prompt_tokens=2 --max_new_tokens=3',
        ),
    ]
    monkeypatch.setattr(bench, 'read_suite', {'cpu': workloads}.get)
    monkeypatch.setattr(bench, 'worker_pool', PoolOfThisProcess)
    monkeypatch.setattr(bench, 'peak_bytes', lambda name, make: 2**31)


def test_a_suite_runs_its_workloads_and_its_file_is_a_table(small_suite, tmp_path, capsys):
    path = tmp_path / 'suite.json'
    options = ['--suite=cpu', f'--json={path}', '--rounds=2', '--seed=7', '--device=cpu']
    assert call(bench.main, options) == (0, '')
    suite = json.loads(path.read_text())['suite']
    assert [workload['title'] for workload in suite] == ['training', 'memory', 'generation']
    assert [workload['config']['rounds'] for workload in suite] == [2, 5, 2]
    assert [workload['config']['seed'] for workload in suite] == [7, 7, 7]
    capsys.readouterr()
    assert call(bench.main, [f'--table={path}']) == (0, '')
    rows = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[:2] for row in rows[2:]] == [
        ['training', '`gd`'],
        ['training', '`lt_nag`'],
        ['memory', '`gd`'],
        ['generation', '`gd`'],
    ]
    times = suite[0]['results'][1]['train']
    assert rows[3][2].startswith(f'{1e3 * times["seconds_spread"]["median"]:,.1f} (')
    assert rows[3][4].startswith(f'{times["relative_spread"]["median"]:.3f} (')
    assert rows[2][4].startswith('1.000')
    assert rows[-2][5] == '2.00 GiB' and rows[-2][2] == ''


def test_a_workload_that_fails_leaves_those_before_it(small_suite, tmp_path, monkeypatch):
    def fail(name, make):
        raise UserError('no memory')

    monkeypatch.setattr(bench, 'peak_bytes', fail)
    path = tmp_path / 'suite.json'
    code, text = call(bench.main, ['--suite=cpu', f'--json={path}', '--rounds=1', '--device=cpu'])
    assert (code, text) == (2, 'no memory')
    assert [one['title'] for one in json.loads(path.read_text())['suite']] == ['training']


def test_a_workload_has_a_process_of_its_own_and_its_memory_is_measured_in_another(tmp_path):
    """At least weights, gradients and Adam's two moments, but less than this process holds."""
    path = tmp_path / 'suite.json'
    ballast = torch.ones(2**28)  # 1 GiB
    sizes = SUITE_SIZES.replace('vocab_size=13', 'vocab_size=300_000')
    workloads = [('memory', f'{sizes} --schemes gd --what=memory --batch_size=1')]
    bench.run_suite(workloads, {'device': 'cpu', 'rounds': 3}, path)
    (workload,) = json.loads(path.read_text())['suite']
    assert workload['title'] == 'memory'
    assert 16 * 300_000 * 16 < workload['results'][0]['peak_memory_bytes'] < ballast.nbytes
    assert multiprocessing.active_children() == []


def test_the_kept_file_of_a_suite_is_a_table(capsys):
    bench.main(['--table=results/bench_cpu.json'])
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith('| workload | scheme |') and rule == '|---|---|---|---|---|---|'
    assert len(rows) == 35


@pytest.mark.parametrize(
    'argv, message',
    [
        (['--suite=cpu', '--n_layer=2'], 'n_layer=2: suite=cpu has its own'),
        (['--suite=tpu'], 'cpu or cuda'),
        (['--table=none.json'], 'not the file of a suite'),
        (['--table=__init__.py'], 'not the file of a suite'),
    ],
)
def test_mistakes_with_a_suite(argv, message):
    code, text = call(bench.main, argv)
    assert code == 2 and message in text


@pytest.mark.parametrize('name', ['cpu', 'cuda'])
def test_every_suite_is_made_of_valid_options(name):
    workloads = read_suite(name)
    assert len(dict(workloads)) == len(workloads) >= 12
    for _, options in workloads:
        given = bench.parse(options.split(), GPTConfig, BenchConfig)
        cfg = bench.build(BenchConfig, given)
        bench.check_effect(given, cfg)
        bench.entries_of(given, cfg)


# where a result comes from


def test_a_run_and_a_result_tell_the_same_facts(rt, monkeypatch):
    monkeypatch.setattr(report, 'code_version', lambda: 'abc+')
    monkeypatch.setattr(sys, 'argv', ['train.py', '--out_dir=a b'])
    result = report.result_facts(BenchConfig(), rt, ['torch'])
    run = report.training_facts({'n_layer': 2}, rt, params=7, compiled=False)
    assert (run['config'], run['params'], run['compiled']) == ({'n_layer': 2}, 7, False)
    assert run['world_size'] == 1 and run['device'] == rt.device_name()
    assert run['torch'] == result['versions']['torch'] == torch.__version__
    assert run['dtype'] == result['dtype'] == 'float32'
    assert run['commit'] == result['commit'] == 'abc+'
    assert run['command'] == result['command'] == "python train.py '--out_dir=a b'"


def test_tables_are_aligned():
    rows = [['name', 'a', 'b'], ['x', '10', ''], ['long name', '1', '22222']]
    assert report.table(rows, '<>', ruled=True).splitlines() == [
        'name        a      b',
        '--------------------',
        'x          10',
        'long name   1  22222',
    ]
    assert report.table(rows).splitlines() == [
        'name       a   b',
        'x          10',
        'long name  1   22222',
    ]


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(UserError, match='json=.*choose another'):
        report.check_json(tmp_path)
    with pytest.raises(UserError, match='json=.*cannot be written'):
        report.write_json(tmp_path / 'missing' / 'x.json', {})
    report.check_json(tmp_path / 'new' / 'x.json')
    report.write_json(tmp_path / 'new' / 'x.json', {'a': 1})
    assert json.loads((tmp_path / 'new' / 'x.json').read_text()) == {'a': 1}
    report.check_json(None)
    report.write_json(None, {})
