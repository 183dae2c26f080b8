"""Which optimizer gets which parameter, at what rate and decay; the schedule; Muon on fused and
split projections."""

import math
import re

import pytest
import torch
import torch.nn as nn
from conftest import fresh, perturb, tokens

from model import SCHEMES
from nanonag.optim import configure_optimizer, describe, lr_multiplier, route
from train import TrainConfig

OPTIMIZERS = [
    dict(optimizer='adamw'),
    dict(optimizer='muon'),
    dict(optimizer='muon', muon_qkv='split'),
]
IDS = ['adamw', 'muon', 'muon-split']


def resolved(normalized=False, **options):
    return TrainConfig(**options).resolve(normalized)


def made(update, dtype=torch.float32, **options):
    """(model, its optimizer), the model away from its start; dtype: of Muon's matmuls."""
    model = perturb(fresh(update=update))
    return model, configure_optimizer(model, resolved(model.cfg.normalized, **options), dtype)


def backward(model, seed=1):
    """Gradients of the loss on one random batch."""
    model.zero_grad()
    model(tokens(B=4, seed=seed), tokens(B=4, seed=seed + 100))[1].backward()


def kind_by_name(name):
    """What a parameter is, from its documented name: the rules of route(), said another way."""
    if re.search(r'\.(mu|beta|gamma|nu)\.raw$', name):
        return 'scalars'
    if name.endswith('.raw'):
        return 'scales'
    if re.search(r'(ln_\w+|norm_v)\.weight$|\.bias$', name):
        return 'norms'
    return 'matrices' if name.startswith('transformer.h.') else 'embeddings'


# routing


def test_every_parameter_has_exactly_one_kind(variant):
    model = fresh(**variant)
    kinds = route(model)
    names = [name for params in kinds.values() for name in params]
    # a tied head is listed once there
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {name: kind for kind, params in kinds.items() for name in params} == {
        name: kind_by_name(name) for name in names
    }
    everything = dict(model.named_parameters())
    assert all(p is everything[name] for params in kinds.values() for name, p in params.items())


@pytest.mark.parametrize('options', OPTIMIZERS, ids=IDS)
def test_the_optimizer_holds_every_parameter_once(update, options):
    model, optimizer = made(update, **options)
    held = [id(p) for group in optimizer.groups for p in group['params']]
    assert sorted(held) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize('options', OPTIMIZERS[1:], ids=IDS[1:])
def test_muon_gets_only_the_matrices_inside_layers(update, options):
    _, optimizer = made(update, **options)
    muon = {
        optimizer.names[p]
        for one in optimizer.optimizers
        if isinstance(one, torch.optim.Muon)
        for group in one.param_groups
        for p in group['params']
    }
    assert muon == {
        f'transformer.h.{i}.{name}.weight'
        for i in (0, 1)
        for name in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')
    }


def test_a_module_type_without_a_rule_is_named():
    model = fresh(update='gd')
    model.transformer.h[1].attn.mixer = nn.Conv1d(2, 2, 1)
    with pytest.raises(ValueError, match=r'transformer\.h\.1\.attn\.mixer\.weight.*param_kind'):
        configure_optimizer(model, resolved())
    model = fresh(update='gd')
    model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match='extra'):
        route(model)


@pytest.mark.parametrize('options', OPTIMIZERS, ids=IDS)
def test_rate_and_decay_by_kind(update, options):
    """Section 3 of the papers' recipes: matrices to Muon without decay; decay on embeddings only;
    scalars at 5x."""
    is_muon = options['optimizer'] == 'muon'
    settings = dict(learning_rate=1e-3, weight_decay=0.1, **options) | (
        dict(muon_lr=0.02) if is_muon else {}
    )
    _, optimizer = made(update, **settings)
    table = {
        'matrices': (0.02, 0.0) if is_muon else (1e-3, 0.1),
        'embeddings': (1e-3, 0.1),
        'norms': (1e-3, 0.0),
        'scalars': (5e-3, 0.0),
        'scales': (1e-3, 0.0),
    }
    seen = set()
    for one in optimizer.optimizers:
        for group in one.param_groups:
            for p in group['params']:
                kind = kind_by_name(optimizer.names[p])
                seen.add(kind)
                assert (group['lr'], group['weight_decay']) == pytest.approx(table[kind]), (
                    optimizer.names[p]
                )
            if isinstance(one, torch.optim.AdamW):
                assert group['betas'] == (0.9, 0.95)
            else:
                assert (
                    group['momentum'],
                    group['nesterov'],
                    group['adjust_lr_fn'] or 'original',
                ) == (0.95, True, 'original')
    assert seen == set(route(fresh(update=update)))


def test_weight_decay_defaults_by_family():
    assert (resolved(False).weight_decay, resolved(True).weight_decay) == (0.1, 0.0)
    assert (resolved(False).warmup_iters, resolved(True).warmup_iters) == (3000, 0)
    assert (resolved(False).min_lr, resolved(True).min_lr) == (pytest.approx(6e-5), 0.0)


def test_the_table_lists_every_tensor(update):
    model, optimizer = made(update, optimizer='muon')
    lines = describe(optimizer).splitlines()
    assert sum(int(line.split()[-1]) for line in lines[1:]) == len(list(model.parameters()))
    assert any('wte' in line and 'AdamW' in line for line in lines) and any(
        'c_attn' in line and 'Muon' in line for line in lines
    )


# schedule


def table(**options):
    cfg = resolved(learning_rate=1.0, **options)
    return lambda step: lr_multiplier(step, cfg)


@pytest.mark.parametrize(
    'options, expected',
    [
        (
            dict(max_iters=100, warmup_iters=10, min_lr=0.1),
            {0: 1 / 11, 4: 5 / 11, 9: 10 / 11, 10: 1.0, 55: 0.55, 100: 0.1, 101: 0.1, 10**6: 0.1},
        ),
        (
            dict(max_iters=100, warmup_iters=0, min_lr=0.0),
            {0: 1.0, 25: 0.5 + 0.5 * math.cos(math.pi / 4), 50: 0.5, 100: 0.0},
        ),
        (
            dict(max_iters=100, warmup_iters=10, min_lr=0.1, lr_decay_iters=50),
            {10: 1.0, 30: 0.55, 50: 0.1, 99: 0.1},
        ),
        (dict(max_iters=100, decay_lr=False), {0: 1.0, 10: 1.0, 99: 1.0, 1000: 1.0}),
        (
            dict(max_iters=100, warmup_iters=10, min_lr=0.1, schedule='wsd'),
            {0: 1 / 11, 10: 1.0, 80: 1.0, 90: 0.55, 99: 0.145, 100: 0.1, 500: 0.1},
        ),
        (
            dict(max_iters=100, warmup_iters=10, min_lr=0.0, schedule='wsd', wsd_decay=0.5),
            {50: 1.0, 75: 0.5, 100: 0.0},
        ),
        (
            dict(max_iters=100, warmup_iters=90, min_lr=0.0, schedule='wsd', wsd_decay=0.5),
            {89: 90 / 91, 90: 1.0, 95: 0.5, 100: 0.0},
        ),
        (
            dict(max_iters=10, warmup_iters=20, min_lr=0.1),
            {0: 1 / 21, 9: 10 / 21, 19: 20 / 21, 20: 1.0, 21: 0.1},
        ),
        (dict(max_iters=0), {0: 1.0, 1: 0.1}),
    ],
    ids=[
        'cosine',
        'cosine-ngpt',
        'lr_decay_iters',
        'no-decay',
        'wsd',
        'wsd-half',
        'wsd-after-warmup',
        'warmup-longer-than-run',
        'empty',
    ],
)
def test_schedule_table(options, expected):
    schedule = table(**options)
    assert {step: schedule(step) for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('schedule', ['cosine', 'wsd'])
def test_rate_rises_from_above_zero_to_the_peak_then_falls(schedule):
    rate = table(max_iters=200, warmup_iters=20, schedule=schedule)
    rates = [rate(step) for step in range(220)]
    assert rates[0] > 0 and rates[20] == 1.0 == max(rates)
    assert all(a < b for a, b in zip(rates[:20], rates[1:21]))
    assert all(a >= b for a, b in zip(rates[20:], rates[21:]))
    assert rates[200:] == [rates[200]] * 20 == [pytest.approx(0.1)] * 20


@pytest.mark.parametrize('options', OPTIMIZERS, ids=IDS)
def test_the_schedule_reaches_every_group(update, options):
    _, optimizer = made(update, **options)
    peaks = [group['lr'] for one in optimizer.optimizers for group in one.param_groups]
    for multiplier in (0.25, 1.0, 0.1):  # not compounding
        optimizer.set_lr(multiplier)
        rates = [group['lr'] for one in optimizer.optimizers for group in one.param_groups]
        assert rates == pytest.approx([peak * multiplier for peak in peaks])
    assert optimizer.lr()['embeddings'] == pytest.approx(
        1.5e-4 if SCHEMES[update][0].normalized else 6e-5
    )


# steps


@pytest.mark.parametrize('options', OPTIMIZERS, ids=IDS)
def test_every_parameter_moves_at_the_first_step(update, options):
    model, optimizer = made(update, **options)
    optimizer.set_lr(lr_multiplier(0, resolved(model.cfg.normalized)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward(model)
    optimizer.step()
    unmoved = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    # of the first step if V_0 = 0
    no_gradient = {f'transformer.h.0.update_attn.{name}.raw' for name in ('mu', 'beta')}
    assert unmoved == (no_gradient if model.cfg.velocity_init == 'zero' else set())


@pytest.mark.parametrize('qkv, parts', [('fused', 1), ('split', 3)])
def test_muon_equals_torchs_bitwise(qkv, parts):
    """In torch's own precision, bfloat16; split: q, k and v as three matrices of three
    optimizers."""
    options = dict(lr=0.03, momentum=0.95, nesterov=True, weight_decay=0.2)
    model, optimizer = made(
        'lt_nag',
        torch.bfloat16,
        optimizer='muon',
        muon_qkv=qkv,
        muon_lr=0.03,
        muon_weight_decay=0.2,
    )
    block = model.transformer.h[0]
    for matrix, n in (
        (block.attn.c_attn.weight, parts),
        (block.mlp.c_fc.weight, 1),
        (block.mlp.c_proj.weight, 1),
    ):
        matrix.expected = [nn.Parameter(part.clone()) for part in matrix.detach().chunk(n)]
        matrix.muons = [torch.optim.Muon([part], **options) for part in matrix.expected]
    for step in range(4):
        backward(model, seed=step)
        for matrix in (block.attn.c_attn.weight, block.mlp.c_fc.weight, block.mlp.c_proj.weight):
            for part, grad, one in zip(
                matrix.expected, matrix.grad.chunk(len(matrix.expected)), matrix.muons
            ):
                part.grad = grad.clone()
                one.step()
        optimizer.step()
        for matrix in (block.attn.c_attn.weight, block.mlp.c_fc.weight, block.mlp.c_proj.weight):
            assert torch.equal(matrix, torch.cat(matrix.expected)), step


def test_muon_precision_is_the_only_difference():
    """float32 matmuls give torch's bfloat16 update to its rounding, which five steps enlarge."""
    moves = []
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = made('gd', dtype, optimizer='muon')
        weight = model.transformer.h[0].mlp.c_fc.weight
        before = weight.detach().clone()
        backward(model)
        optimizer.step()
        moves.append(weight.detach() - before)
    assert 0 < (moves[0] - moves[1]).norm() < 0.1 * moves[0].norm()


def test_fused_muon_takes_qkv_as_one_matrix():
    fused, split = (made('gd', optimizer='muon', muon_qkv=qkv) for qkv in ('fused', 'split'))
    for model, optimizer in (fused, split):
        backward(model)
        optimizer.step()
    (a, _), (b, _) = fused, split
    weights = dict(b.named_parameters())
    differ = {name for name, p in a.named_parameters() if not torch.equal(p, weights[name])}
    assert differ == {f'transformer.h.{i}.attn.c_attn.weight' for i in (0, 1)}


@pytest.mark.parametrize('qkv', ['fused', 'split'])
def test_decay_alone_shrinks_by_exactly_its_factor(qkv):
    model, optimizer = made(
        'lt_nag',
        optimizer='muon',
        muon_qkv=qkv,
        muon_lr=0.1,
        muon_weight_decay=0.5,
        learning_rate=0.01,
        weight_decay=0.25,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    factor = {
        'matrices': 1 - 0.1 * 0.5,
        'embeddings': 1 - 0.01 * 0.25,
        'norms': 1.0,
        'scalars': 1.0,
        'scales': 1.0,
    }
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] * factor[kind_by_name(name)]), name


@pytest.mark.parametrize('qkv', ['fused', 'split'])
def test_muon_leaves_a_parameter_without_gradient_alone(qkv):
    model, optimizer = made('gd', optimizer='muon', muon_qkv=qkv)
    backward(model)
    weight = model.transformer.h[0].attn.c_attn.weight
    weight.grad = None
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before)


def test_muon_update_size_by_shape():
    """Muon's `original` scale: an orthogonal update (RMS 1 / sqrt(longer side)) x lr sqrt(max(1,
    rows / columns))."""
    model = perturb(fresh(update='gd', n_embd=32))
    optimizer = configure_optimizer(model, resolved(optimizer='muon', muon_lr=0.01))
    block = model.transformer.h[0]
    matrices = {
        'tall': block.mlp.c_fc.weight,
        'wide': block.mlp.c_proj.weight,
        'square': block.attn.c_proj.weight,
    }
    before = {name: w.detach().clone() for name, w in matrices.items()}
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    for name, w in matrices.items():
        rows, columns = w.shape
        rms = (w.detach() - before[name]).square().mean().sqrt().item()
        size = rms * math.sqrt(max(w.shape)) / (0.01 * math.sqrt(max(1, rows / columns)))
        assert 0.7 < size < 1.2, name  # the singular values that five Newton-Schulz steps leave


@pytest.mark.parametrize('update', ['ngpt', 'ngpt_nag'])
@pytest.mark.parametrize('options', OPTIMIZERS, ids=IDS)
def test_every_step_ends_on_the_sphere(update, options):
    model, optimizer = made(update, learning_rate=0.1, **options)
    for step in range(3):
        backward(model, seed=step)
        optimizer.step()
        for name, module in model.named_modules():
            if hasattr(module, 'embd_axis'):
                norms = module.weight.detach().norm(dim=module.embd_axis)
                assert (norms - 1).abs().max() < 1e-6, name


# state


@pytest.mark.parametrize('options', OPTIMIZERS, ids=IDS)
def test_state_round_trip_gives_the_same_next_step(update, options, tmp_path):
    one, optimizer = made(update, **options)
    for seed in (1, 2):
        backward(one, seed)
        optimizer.step()
    torch.save([one.state_dict(), optimizer.state_dict()], tmp_path / 'state.pt')
    weights, state = torch.load(tmp_path / 'state.pt', weights_only=True)
    other, resumed = made(update, **options)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for model, opt in ((one, optimizer), (other, resumed)):
        backward(model, 3)
        opt.set_lr(0.5)
        opt.step()
    expected = dict(one.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in other.named_parameters())
    assert state.keys() == dict(one.named_parameters()).keys()


def test_loaded_state_is_a_copy():
    model, optimizer = made('gd', optimizer='adamw')
    backward(model)
    optimizer.step()
    saved = optimizer.state_dict()
    steps = {name: entry['step'].clone() for name, entry in saved.items()}
    resumed = made('gd', optimizer='adamw')[1]
    resumed.load_state_dict(saved)
    optimizer.step()
    assert {name: entry['step'] for name, entry in resumed.state_dict().items()} == steps


def test_state_of_other_parameters_is_refused():
    model, optimizer = made('lt_nag')
    backward(model)
    optimizer.step()
    with pytest.raises(ValueError, match='other parameters'):
        made('gd')[1].load_state_dict(optimizer.state_dict())


def test_gradients_are_unscaled_for_all_optimizers():
    """GradScaler sees the model's own parameters, of both optimizers, through the joint one."""
    model, optimizer = made('lt_nag', optimizer='muon', muon_qkv='split')
    backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler('cpu', init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert all(torch.allclose(p.grad * 8, grad) for p, grad in zip(model.parameters(), before))
