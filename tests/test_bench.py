"""bench.py: what takes part, what a step is, how rounds and numbers are kept. No test looks at how
fast anything was."""

import importlib.util
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import call

import bench
from bench import BenchConfig, Scheme, flops_per_token, scheme_config
from model import GPT, GPTConfig
from nanonag import runtime
from nanonag.benchmark import timing
from nanonag.benchmark.timing import race, results, spread
from nanonag.cli import UserError
from nanonag.optim import configure_optimizer
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
    monkeypatch.setattr(bench, 'measure', lambda entries, cfg, rt: seen.append(entries[0][1]))
    bench.main(['--vocab_size=50'])
    bench.main(['--n_layer=3'])
    assert seen == [
        GPTConfig(**bench.SMALL, update='gd', vocab_size=50),
        GPTConfig(update='gd', n_layer=3),
    ]


@pytest.mark.parametrize(
    'args, message',
    [
        (['--what=generate', '--steps=2'], 'no effect with what=generate: steps=2'),
        (['--what=generate', '--memory=False'], 'memory=False'),
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


def test_a_missing_peer_is_told(monkeypatch):
    monkeypatch.setitem(bench.sys.modules, 'transformers', None)
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
    ours, peer = (
        Scheme('ngpt', tiny('ngpt'), cfg, rt),
        bench.HuggingFace(bench.PEERS['hf'], tiny('gd'), cfg, rt),
    )
    assert (
        torch.equal(ours.tokens, peer.tokens)
        and torch.equal(ours.prompt, peer.prompt)
        and ours.prompt.shape == (3, 4)
    )


def test_the_peer_is_gpt2_of_the_same_size_and_learns(rt):
    pytest.importorskip('transformers')
    one = bench.HuggingFace(
        bench.PEERS['hf'],
        tiny('gd'),
        BenchConfig(batch_size=2, max_new_tokens=5, prompt_tokens=3),
        rt,
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


def test_peak_memory_is_of_a_fresh_process():
    """At least weights, gradients and Adam's two moments; but nothing of the parent's, however fat
    it is."""
    cfg, gpt_cfg = (
        BenchConfig(batch_size=1, device='cpu'),
        GPTConfig(**{**TINY, 'vocab_size': 300_000}, update='gd'),
    )
    ballast = torch.ones(2**28)  # 1 GiB
    assert (
        16 * 300_000 * 16
        < bench.peak_bytes(bench.peak_bytes_here, 'gd', gpt_cfg, cfg)
        < ballast.nbytes
    )


def test_peak_memory_is_that_of_two_steps(monkeypatch):
    """The first step makes Adam's state, the second holds it beside the gradients."""
    taken = []
    monkeypatch.setattr(
        bench, 'Scheme', lambda *args: SimpleNamespace(step=lambda: taken.append(args[0]))
    )
    assert bench.peak_bytes_here('gd', tiny(), BenchConfig(device='cpu')) > 2**20 and taken == [
        'gd',
        'gd',
    ]


# the whole


def test_everything_ends_up_in_the_json_file(tmp_path, capsys, monkeypatch):
    pytest.importorskip('transformers')
    monkeypatch.setattr(bench, 'peak_bytes', lambda _, name, *__: 2**31 if name == 'gd' else None)
    monkeypatch.setattr(runtime.Runtime, 'peak_flops', lambda self: 1e12)
    monkeypatch.setattr(bench.sys, 'argv', ['bench.py', '--seed=5'])
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
    assert [r['scheme'] for r in data['results']] == ['gd', 'ngpt:rope_base=500', bench.PEERS['hf']]
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
        bench.speed_table([record(scale)], 'train', False) for scale in (1.23456, 0.0123456, 1.2e-6)
    ]
    cells = [table.splitlines()[-1].split()[2] for table in tables]
    assert cells == ['1,235', '12.3', '0.00120']


# a suite and its table


def test_a_suite_runs_its_workloads_and_its_file_is_a_table(tmp_path, monkeypatch, capsys):
    small = '--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=13'
    # a process of a process
    peer = ' --peer=hf_tuned' * bool(importlib.util.find_spec('transformers'))
    monkeypatch.setitem(
        bench.SUITES,
        'cpu',
        {
            'training': f'{small} --schemes gd lt_nag --what=train --memory=False{peer}',
            'memory': f'{small} --schemes gd --what=memory --batch_size=2',
            'generation': f'{small} --schemes gd --what=generate --prompt_tokens=2 --max_new_tokens=3',
        },
    )
    path = tmp_path / 'suite.json'
    assert call(bench.main, ['--suite=cpu', f'--json={path}', '--rounds=2', '--device=cpu']) == (
        0,
        '',
    )
    suite = json.loads(path.read_text())['suite']
    assert [one['title'] for one in suite] == ['training', 'memory', 'generation'] and suite[0][
        'config'
    ]['rounds'] == 2
    capsys.readouterr()
    assert call(bench.main, [f'--table={path}']) == (0, '')
    rows = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[:2] for row in rows[2:]] == [
        ['training', '`gd`'],
        ['training', '`lt_nag`'],
        *[['training', '`hf_gpt2_tuned`']] * bool(peer),
        ['memory', '`gd`'],
        ['generation', '`gd`'],
    ]
    times = suite[0]['results'][1]['train']
    assert rows[3][2].startswith(f'{1e3 * times["seconds_spread"]["median"]:,.1f} (') and rows[3][
        4
    ].startswith(f'{times["relative_spread"]["median"]:.3f} (')
    assert rows[2][4].startswith('1.000') and rows[-2][5].endswith('GiB') and rows[-2][2] == ''


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


def test_every_suite_is_made_of_valid_options():
    for suite in bench.SUITES.values():
        for options in suite.values():
            given = bench.parse(options.split(), GPTConfig, bench.BenchConfig)
            for scheme in bench.build(bench.BenchConfig, given).schemes:
                bench.scheme_config(
                    scheme,
                    {
                        key: value
                        for key, value in given.items()
                        if key in GPTConfig.__dataclass_fields__
                    },
                )
