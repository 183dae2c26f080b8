"""The whole model: equal to the float64 reference, causal, of the stated size and names, strict
about its config."""

import copy
import dataclasses
import math

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import TINY, fresh, nontrivial, perturb, relative_error, rules, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, SCHEMES, GPTConfig
from nanonag.cli import UserError
from start import build_model, pretrained

STARTS = dict(mu=0.5, beta=0.5, gamma=math.log(2), nu=1.0, alpha=0.05)


def targets_with_gaps(B=2, T=7, vocab_size=TINY['vocab_size']):
    """Random targets (B, T), some of them ignored."""
    targets = tokens(B, T, vocab_size, seed=2)
    targets[0, 1] = targets[1, 4:6] = -1
    return targets


def learned_by(update):
    """Which of STARTS the scheme's rule learns."""
    rule, _ = SCHEMES[update]
    return {*rule.scalars, 'alpha'} if rule.normalized else set(rule.scalars)


def leaves(model):
    """The parameters as a state dict of independent float64 leaves."""
    return {
        name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()
    }


def idle(model):
    """Names excused from a nonzero gradient: with V_0 = 0 the first substep's mu and beta multiply
    zero, for ever."""
    if model.cfg.velocity_init != 'zero':
        return set()
    first = {
        id(p) for name, p in rules(model)[0].named_parameters() if name in ('mu.raw', 'beta.raw')
    }
    return {name for name, p in model.named_parameters() if id(p) in first}


# ---- the numbers ---------------------------------------------------------------------------------


def test_equals_the_reference(variant):
    """Logits, loss and every gradient against autograd through the plain loops of reference.py."""
    model = nontrivial(**variant)
    idx, targets, state = tokens(), targets_with_gaps(), leaves(model)

    assert (
        relative_error(model(idx, return_logits=True)[0], reference.logits(state, model.cfg, idx))
        < 1e-10
    )
    _, loss = model(idx, targets)
    expected = reference.loss(state, model.cfg, idx, targets)
    assert relative_error(loss, expected) < 1e-10

    loss.backward()
    expected.backward()
    # Where V_0 = 0 the velocity norm cancels gamma, and what is left of its gradient is a
    # difference of large numbers: hence the second term, rounding in the model's largest gradient.
    rounding = 1e-14 * max(p.grad.abs().max() for p in state.values())
    for name, p in model.named_parameters():
        assert (p.grad - state[name].grad).abs().max() <= 1e-9 * state[
            name
        ].grad.abs().max() + rounding, name


def test_rope_base(update):
    """The base is a field, and a small one (short wavelengths) shows every frequency."""
    model = nontrivial(update=update, pos='rope', rope_base=3.0)
    expected = reference.logits(leaves(model), model.cfg, tokens())
    assert relative_error(model(tokens(), return_logits=True)[0], expected) < 1e-10


def test_gradcheck(update):
    """The gradient is the derivative: finite differences along random directions of all parameters
    together."""
    model = nontrivial(update=update, n_layer=1, n_embd=8, vocab_size=7)
    names = [name for name, _ in model.named_parameters()]
    idx, targets = tokens(T=4, vocab_size=7), targets_with_gaps(T=4, vocab_size=7).clamp(max=6)
    targets[1] = -1

    def loss(*parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters)), (idx, targets))[1]

    assert torch.autograd.gradcheck(
        loss, tuple(p.detach().clone().requires_grad_() for p in model.parameters()), fast_mode=True
    )


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize('B, T, V', [(2, 7, 13), (1, 1, 5), (6, 64, 1031)])
def test_loss_is_plain_cross_entropy(update, B, T, V, dtype, tolerance):
    """However the loss is computed: value and gradients as F.cross_entropy on all logits, targets
    of -1 left out."""
    model = nontrivial(dtype, update=update, vocab_size=V, block_size=64, n_layer=1)
    idx, targets = tokens(B, T, V), tokens(B, T, V, seed=2)
    targets[tokens(B, T, 4, seed=3) == 0] = -1
    targets[0, 0] = 3

    (3 * model(idx, targets)[1]).backward()  # 3: the gradient that arrives from above counts too
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits, loss = model(idx, return_logits=True)
    assert loss is None
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    (3 * plain).backward()
    assert model(idx, targets)[1].item() == pytest.approx(plain.item(), rel=tolerance)
    largest = max(p.grad.abs().max() for p in model.parameters())
    for name, p in model.named_parameters():
        assert (gradients[name] - p.grad).abs().max() < tolerance * largest, name


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))]
        )
        return out


# of the 48 tokens: one by one, a ragged last chunk, all at once
@pytest.mark.parametrize('rows', [1, 5, 24, 48])
@pytest.mark.parametrize('update', ['lt_nag', 'ngpt'])
def test_loss_in_chunks(update, rows, monkeypatch):
    """The chunk size changes neither the loss nor its gradients, and no more than a chunk of logits
    is ever held."""
    B, T, V = 6, 8, 997
    model, idx, targets = (
        nontrivial(update=update, vocab_size=V),
        tokens(B, T, V),
        targets_with_gaps(B, T, V),
    )
    logits, _ = model(idx, return_logits=True)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    plain.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr('nanonag.loss.CHUNK', rows * V)
    with Largest() as largest:
        _, loss = model(idx, targets)
        loss.backward()
    assert largest.numel <= V * max(rows, model.cfg.n_embd)  # the head's own weight is V x n_embd
    assert relative_error(loss, plain) < 1e-13
    for name, p in model.named_parameters():
        assert relative_error(p.grad, gradients[name]) < 1e-11, name


def test_what_forward_returns(update):
    model, idx, targets = nontrivial(update=update), tokens(), targets_with_gaps()
    everything = model(idx, return_logits=True)[0]
    assert everything.shape == (2, 7, TINY['vocab_size'])
    logits, loss = model(idx)
    assert loss is None and logits.shape == (2, 1, TINY['vocab_size'])
    assert relative_error(logits, everything[:, -1:]) < 1e-13
    logits, loss = model(idx, targets, return_logits=True)
    assert relative_error(logits, everything) < 1e-13 and loss.shape == ()
    logits, loss_alone = model(idx, targets)
    assert logits is None or relative_error(logits, everything) < 1e-13
    assert loss_alone.item() == pytest.approx(loss.item(), rel=1e-13)
    with torch.no_grad():
        assert model(idx, targets)[1].item() == pytest.approx(loss.item(), rel=1e-13)


@torch.no_grad()
def test_the_future_changes_nothing(variant):
    """Other tokens from position t on: the earlier logits stay, that position's and all later ones
    move."""
    model, idx = nontrivial(**variant), tokens()
    before = model(idx, return_logits=True)[0]
    for t in range(1, 7):
        other = idx.clone()
        other[:, t:] = (
            other[:, t:] + 1 + tokens(T=7 - t, vocab_size=TINY['vocab_size'] - 2)
        ) % TINY['vocab_size']
        difference = (model(other, return_logits=True)[0] - before).abs().amax(dim=(0, 2))
        assert (difference[:t] < 1e-13).all() and (difference[t:] > 1e-3).all()


def test_early_tokens_reach_late_positions(update):
    """The other half of causality: the last position does see the first token, through attention
    alone."""
    model, idx = nontrivial(update=update), tokens()
    other = idx.clone()
    other[:, 0] = (other[:, 0] + 1) % TINY['vocab_size']
    assert (model(other)[0] - model(idx)[0]).abs().max() > 1e-3


def test_every_parameter_gets_a_gradient(variant):
    """From the start of training: nothing is unused (DDP would stop at it) and nothing is stuck."""
    model = fresh(**variant).train()
    model(tokens(B=4, T=8), tokens(B=4, T=8, seed=2))[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and (p.grad.any() or name in idle(model)), name


def test_learns(update):
    """A few steps of plain SGD lower the loss of a batch."""
    model, idx, targets = fresh(update=update).train(), tokens(), tokens(seed=2)
    losses = []
    for _ in range(6):
        model.zero_grad()
        _, loss = model(idx, targets)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
        model.normalize_weights()
    assert losses[-1] < losses[0]


def test_dropout_acts_on_embeddings_attention_weights_and_sublayer_outputs():
    """At those places half of the numbers are zero, the others doubled; and the attention's own
    answer varies."""
    model = nontrivial(update='lt_nag', dropout=0.5).train()
    seen = {}
    block = model.transformer.h[0]
    block.register_forward_pre_hook(lambda _, args: seen.update(x=args[0], v=args[1]))
    for name in ('attn', 'mlp'):
        getattr(block, name).register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: out})
        )
        getattr(block, name).c_proj.register_forward_hook(
            lambda _, args, out, name=name: seen.update(
                {f'{name}_full': out, f'{name}_in': args[0]}
            )
        )
    idx = tokens(B=8, T=8)
    model(idx)
    table = model.transformer
    seen |= {
        'x_full': table.wte(idx) + table.wpe.weight,
        'v_full': table.vte(idx) + table.vpe.weight,
    }
    for name in ('x', 'v', 'attn', 'mlp'):
        kept = seen[name] != 0
        assert 0.4 < kept.double().mean() < 0.6, name
        assert torch.allclose(seen[name][kept], 2 * seen[f'{name}_full'][kept]), name
    x = seen['x'].detach()
    answers = []
    for _ in range(2):
        block.attn(x)
        answers.append(seen['attn_in'])
    assert not torch.allclose(*answers)


@pytest.mark.parametrize(
    'update', [name for name, (rule, _) in SCHEMES.items() if not rule.normalized]
)
def test_dropout_acts_in_training_only(update):
    model = nontrivial(update=update, dropout=0.5)
    plain = nontrivial(update=update)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens())[0], plain(tokens())[0])
    model.train()
    assert not torch.equal(model(tokens())[0], model(tokens())[0])


def test_bf16_autocast_is_near_float32(update):
    model, idx, targets = (
        perturb(fresh(update=update), std=0.05),
        tokens(B=4, T=8),
        tokens(B=4, T=8, seed=2),
    )
    _, exact = model(idx, targets)
    exact.backward()
    exact_gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        _, loss = model(idx, targets)
        logits, _ = model(idx)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), abs=2e-2)
    assert logits.isfinite().all()
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32 and p.grad.isfinite().all(), name
        assert p.grad.any() or name in idle(model), name
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert F.cosine_similarity(gradient, exact_gradient, dim=0) > 0.999


def test_compiles_without_a_graph_break(update):
    model = nontrivial(torch.float32, update=update)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    with torch.no_grad():
        assert relative_error(compiled(tokens())[0], model(tokens())[0]) < 1e-6


@pytest.mark.parametrize('update', ['lt_nag', 'ngpt'])
def test_compiled_training_step(update):
    """The loss and its gradients in one graph, too."""
    model, idx, targets = nontrivial(torch.float32, update=update), tokens(), targets_with_gaps()
    torch._dynamo.reset()
    _, expected = model(idx, targets)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    _, loss = torch.compile(model, fullgraph=True, backend='aot_eager')(idx, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, gradients[name]) < 1e-4, name


def test_a_copy_is_a_model_of_its_own(update):
    model = nontrivial(update=update)
    before = model(tokens())[0].detach()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens())[0], before)
    perturb(twin, seed=7)
    assert torch.equal(model(tokens())[0], before) and not torch.allclose(twin(tokens())[0], before)


# ---- sizes, names, initialization ----------------------------------------------------------------


def count(cfg):
    with torch.device('meta'):
        model = GPT(cfg)
    assert all(p.is_meta for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert model.num_params() == total
    return total, sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize(
    'total, sizes',
    [
        (124_373_760, dict(update='gd')),
        (166_850_304, dict(update='gd', n_layer=18)),
        (162_857_700, dict(update='gd', n_embd=900)),
        (163_812_168, dict(update='lt_nag')),
        (163_812_192, dict(update='lt_tmm')),
        (163_812_168 - (50304 + 1024) * 768, dict(update='lt_nag', velocity_init='zero')),
        (163_812_168 - 12 * (3 + 768), dict(update='euler_nag')),  # one rule a layer
        (163_812_168 - 12 * 2, dict(update='polyak')),  # no mu
        (124_373_760, dict(update='euler_gd')),
        (124_373_760 - 1024 * 768, dict(update='gd', pos='rope')),
        (124_373_760 + 50304 * 768, dict(update='gd', tie_weights=False)),
        (124_373_760 + 12 * (3 + 1 + 4 + 1 + 2) * 768 + 768, dict(update='gd', bias=True)),
    ],
)
def test_parameter_count(total, sizes):
    gpt2 = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024)
    assert count(GPTConfig(**{**gpt2, **sizes}))[0] == total


@pytest.mark.parametrize(
    'matrices, sizes',
    [
        (468_189_184, dict(n_layer=24, n_embd=1024, n_head=16)),
        (1_025_638_400, dict(n_layer=36, n_embd=1280, n_head=20)),
    ],
)
def test_parameter_count_on_the_sphere(matrices, sizes):
    L, d, V = sizes['n_layer'], sizes['n_embd'], 32000
    total, in_matrices = count(GPTConfig(update='ngpt', vocab_size=V, **sizes))
    assert in_matrices == matrices
    assert total == matrices + L * (2 * d + d + 8 * d) + V  # alphas, s_qk, s_uv; s_z
    assert count(GPTConfig(update='ngpt_nag', vocab_size=V, **sizes)) == (total + 4 * L, matrices)


def test_parameter_count_in_closed_form(variant):
    """All but the rules' own parameters, which each scheme chooses."""
    cfg = GPTConfig(**TINY, **variant)
    L, d, V, T = cfg.n_layer, cfg.n_embd, cfg.vocab_size, cfg.block_size
    tables = V * d + (T * d if cfg.pos == 'learned' else 0)
    width = 2 if cfg.mlp == 'swiglu' else 1  # input matrices of the MLP
    if SCHEMES[cfg.update][0].normalized:
        total = 2 * V * d + L * (4 + 12) * d * d + L * (d + 8 * d) + V
    else:
        total = (
            tables
            + (tables if cfg.velocity_init == 'learned' else 0)
            + (0 if cfg.tie_weights else V * d)
        )
        total += L * (4 * d * d + 4 * (width + 1) * d * d + 2 * d) + d
        if cfg.bias:
            total += L * (3 * d + d + 4 * width * d + d + 2 * d) + d
    model = fresh(**variant)
    own = sum(p.numel() for name, p in model.named_parameters() if '.update' in name)
    assert model.num_params() == sum(p.numel() for p in model.parameters()) == total + own


RULE_NAMES = {
    'gd': [],
    'euler_gd': [],
    'lt_nag': ['mu.raw', 'beta.raw', 'gamma.raw', 'norm_v.weight'],
    'euler_nag': ['mu.raw', 'beta.raw', 'gamma.raw', 'norm_v.weight'],
    'polyak': ['beta.raw', 'gamma.raw', 'norm_v.weight'],
    'euler_polyak': ['beta.raw', 'gamma.raw', 'norm_v.weight'],
    'lt_tmm': ['mu.raw', 'beta.raw', 'gamma.raw', 'nu.raw', 'norm_v.weight'],
    'ngpt': ['alpha.raw'],
    'ngpt_nag': ['mu.raw', 'beta.raw', 'alpha.raw'],
}


def test_state_dict_names(variant):
    """The names of spec section 5, no more and no fewer (lm_head is listed when tied too, as in
    nanoGPT)."""
    model = fresh(**variant)
    cfg, (rule, splitting) = model.cfg, SCHEMES[variant['update']]
    suffixes = ['weight', 'bias'] if cfg.bias else ['weight']
    names = {'transformer.wte.weight', 'lm_head.weight'}
    if cfg.velocity_init == 'learned':
        names.add('transformer.vte.weight')
    if cfg.pos == 'learned':
        names.add('transformer.wpe.weight')
        if cfg.velocity_init == 'learned':
            names.add('transformer.vpe.weight')
    for i in range(cfg.n_layer):
        h = f'transformer.h.{i}.'
        linears = ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')
        names |= {f'{h}{linear}.{s}' for linear in linears for s in suffixes}
        if rule.normalized:
            names |= {h + 'attn.s_qk.raw', h + 'mlp.s_uv.raw', 's_z.raw'}
        else:
            names |= {h + f'{norm}.{s}' for norm in ('ln_1', 'ln_2') for s in suffixes}
            names |= {f'transformer.ln_f.{s}' for s in suffixes}
        for update in ('update_attn', 'update_mlp') if splitting == 'lie_trotter' else ('update',):
            own = RULE_NAMES.get(cfg.update)
            if own is None:  # a scheme this file does not know: its scalars at least are promised
                own = [
                    name.split(f'{update}.')[1]
                    for name in model.state_dict()
                    if name.startswith(f'{h}{update}.')
                ]
                assert {f'{scalar}.raw' for scalar in rule.scalars} <= set(own)
            names |= {f'{h}{update}.{name}' for name in own}
    assert set(model.state_dict()) == names
    assert set(dict(model.named_parameters())) == names - (
        {'lm_head.weight'} if cfg.tie_weights else set()
    )


def test_state_dict_round_trip(update):
    model, other = nontrivial(update=update), fresh(update=update).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens())[0], model(tokens())[0])


def test_a_nanogpt_checkpoint_loads_into_gd():
    """Names and shapes of a nanoGPT state dict with biases."""
    d, V, T = 16, 13, 8
    shapes = {
        'transformer.wte.weight': (V, d),
        'transformer.wpe.weight': (T, d),
        'lm_head.weight': (V, d),
        'transformer.ln_f.weight': (d,),
        'transformer.ln_f.bias': (d,),
    }
    for i in range(2):
        for name, shape in {
            'ln_1': (d,),
            'ln_2': (d,),
            'attn.c_attn': (3 * d, d),
            'attn.c_proj': (d, d),
            'mlp.c_fc': (4 * d, d),
            'mlp.c_proj': (d, 4 * d),
        }.items():
            shapes |= {
                f'transformer.h.{i}.{name}.weight': shape,
                f'transformer.h.{i}.{name}.bias': shape[:1],
            }
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    checkpoint['lm_head.weight'] = checkpoint['transformer.wte.weight']
    fresh(update='gd', bias=True).load_state_dict(checkpoint)  # strict


def test_tied_head_is_one_tensor(update):
    model = fresh(update=update)
    tied = model.lm_head.weight is model.transformer.wte.weight
    assert tied is bool(model.cfg.tie_weights) is (not SCHEMES[update][0].normalized)


def test_initial_distribution(variant):
    """Normal: 0.02, and 0.02 / sqrt(2 n_layer) for what writes to the stream; 1 / sqrt(d) on the
    sphere."""
    torch.manual_seed(0)
    L, d = 3, 64
    model = GPT(GPTConfig(**variant, n_layer=L, n_head=4, n_embd=d, vocab_size=200, block_size=128))
    for name, p in model.named_parameters():
        if name.endswith('.bias'):
            assert not p.any(), name
        elif p.ndim == 2:
            std = 0.02 / math.sqrt(2 * L) if name.endswith('c_proj.weight') else 0.02
            if SCHEMES[variant['update']][0].normalized:
                std = 1 / math.sqrt(d)
            z = p.detach() / std
            # of a standard normal variable's powers
            for power, mean, variance in (1, 0, 1), (2, 1, 2), (4, 3, 96):
                assert z.pow(power).mean().item() == pytest.approx(
                    mean, abs=5 * (variance / z.numel()) ** 0.5
                ), name
        elif 'ln_' in name or 'norm_v' in name:
            assert (p == 1).all(), name
    first, second, *_ = (block.mlp.c_fc.weight for block in model.transformer.h)
    assert not torch.equal(first, second)


def test_initial_loss_is_that_of_guessing(update):
    """At the start every token is about equally likely: log of the vocabulary (tables are small,
    the head is not)."""
    model = fresh(update=update, vocab_size=1000, n_embd=64)
    assert model(tokens(B=8, T=8, vocab_size=1000), tokens(B=8, T=8, vocab_size=1000, seed=2))[
        1
    ].item() == pytest.approx(math.log(1000), abs=1.0)


def test_seed_decides_the_weights(update):
    a, b = fresh(update=update), fresh(update=update)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize(
    'update', [name for name, (rule, _) in SCHEMES.items() if not rule.normalized]
)
@pytest.mark.parametrize('tie_weights', [True, False])
def test_seed_draws_what_schemes_share_alike(update, tie_weights):
    """Schemes are compared from the same start: what a scheme has beyond gd's weights is drawn
    after them."""
    baseline = dict(fresh(update='gd', tie_weights=tie_weights).named_parameters())
    for name, p in fresh(update=update, tie_weights=tie_weights).named_parameters():
        assert name not in baseline or torch.equal(p, baseline[name]), name


# ---- GPTConfig -----------------------------------------------------------------------------------


def test_every_field_has_a_default():
    cfg = GPTConfig()
    assert (cfg.update, cfg.n_layer, cfg.n_head, cfg.n_embd) == ('lt_nag', 12, 12, 768)
    assert (cfg.vocab_size, cfg.block_size) == (50304, 1024)
    assert cfg.dropout == 0.0 and cfg.bias is False


def test_defaults_are_the_papers_choices(update):
    cfg, (rule, _) = GPTConfig(update=update), SCHEMES[update]
    if rule.normalized:
        assert (cfg.pos, cfg.mlp, cfg.tie_weights, cfg.bias) == ('rope', 'swiglu', False, False)
        assert cfg.velocity_init == ('zero' if rule.uses_velocity else None)
    else:
        assert (cfg.pos, cfg.mlp, cfg.tie_weights, cfg.bias) == ('learned', 'gelu', True, False)
        assert cfg.velocity_init == ('learned' if rule.uses_velocity else None)
    for name, start in STARTS.items():
        assert getattr(cfg, f'{name}_init') == (
            pytest.approx(start) if name in learned_by(update) else None
        ), name
    assert cfg.rope_base == (10000.0 if cfg.pos == 'rope' else None)
    assert cfg.vocab_used == cfg.vocab_size == 50304  # no padding unless stated


def test_config_survives_a_checkpoint(variant):
    """The resolved fields, written as a dict and read again, are the same config; and nobody
    changes one afterwards."""
    cfg = GPTConfig(**TINY, **variant)
    assert GPTConfig(**dataclasses.asdict(cfg)) == cfg
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.n_layer = 3


def rejected(match, **kwargs):
    """GPTConfig refuses the arguments with a message that names every part of `match`."""
    with pytest.raises(UserError) as error:
        GPTConfig(**{**TINY, **kwargs})
    for part in [match] if isinstance(match, str) else match:
        assert part in str(error.value), f'{part!r} is not in: {error.value}'


def test_unknown_update_lists_the_table():
    rejected(['lt_nga', *SCHEMES], update='lt_nga')


@pytest.mark.parametrize(
    'match, kwargs',
    [
        (['n_embd', '16', 'n_head', '3'], dict(n_head=3)),
        (['rope', '3'], dict(n_embd=6, n_head=2, pos='rope')),
        (['3'], dict(n_embd=6, n_head=2, update='ngpt')),
        (['vocab_used', '14', 'vocab_size', '13'], dict(vocab_used=14)),
        (['vocab_used', '0'], dict(vocab_used=0)),
        (['dropout', '1.0'], dict(dropout=1.0)),
        (['dropout', '-0.1'], dict(dropout=-0.1)),
        (['dropout', 'nan'], dict(dropout=float('nan'))),
        (['pos', 'alibi', 'learned', 'rope'], dict(pos='alibi')),
        (['mlp', 'relu', 'gelu', 'swiglu'], dict(mlp='relu')),
        (['velocity_init', 'ones', 'learned', 'zero'], dict(velocity_init='ones')),
        (['rope_base', '0'], dict(pos='rope', rope_base=0.0)),
        (['rope_base', 'learned'], dict(pos='learned', rope_base=5000.0)),
        (['n_layer', '10001'], dict(n_layer=10001)),  # building 2^62 layers takes for ever
        (
            ['gamma_init', '700'],
            dict(update='lt_nag', gamma_init=700.0),
        ),  # whose raw value overflows
        (['rope_base', '1e+300'], dict(pos='rope', rope_base=1e300)),
    ],
)
def test_contradictions(match, kwargs):
    rejected(match, **kwargs)


@pytest.mark.parametrize('value', [0, -1])
@pytest.mark.parametrize('field', ['n_layer', 'n_head', 'n_embd', 'vocab_size', 'block_size'])
def test_sizes_are_positive(field, value):
    rejected([field, str(value)], **{field: value})


@pytest.mark.parametrize(
    'field, value',
    [
        *(
            (field, value)
            for field in ('mu_init', 'beta_init')
            for value in (0.0, 1.0, -0.1, 1.5, float('nan'))
        ),
        *(
            (field, value)
            for field in ('gamma_init', 'nu_init')
            for value in (0.0, -1.0, float('nan'), float('inf'))
        ),
    ],
)
def test_scalar_starts_lie_in_their_range(field, value):
    rejected([field, str(value)], update='lt_tmm', **{field: value})


@pytest.mark.parametrize('value', [0.0, -0.05, float('nan')])
def test_alpha_starts_above_zero(value):
    rejected(['alpha_init', str(value)], update='ngpt', alpha_init=value)


def test_scalars_a_scheme_lacks_are_refused(update):
    """An option that would have no effect is an error, not a silence."""
    for name in set(STARTS) - learned_by(update):
        rejected([f'{name}_init', update], update=update, **{f'{name}_init': 0.5})


def test_velocity_init_needs_a_velocity(update):
    rule, _ = SCHEMES[update]
    if not rule.uses_velocity:
        for value in ('learned', 'zero'):
            rejected(['velocity_init', update], update=update, velocity_init=value)
    elif rule.normalized:
        rejected(['velocity_init', update, 'zero'], update=update, velocity_init='learned')
        assert GPTConfig(update=update, velocity_init='zero').velocity_init == 'zero'


@pytest.mark.parametrize('update', [name for name, (rule, _) in SCHEMES.items() if rule.normalized])
@pytest.mark.parametrize(
    'field, value',
    [('bias', True), ('dropout', 0.1), ('mlp', 'gelu'), ('pos', 'learned'), ('tie_weights', True)],
)
def test_the_sphere_has_one_architecture(update, field, value):
    rejected([field, update], update=update, **{field: value})


def test_text_longer_than_the_block_is_refused(update):
    with pytest.raises(ValueError, match='block_size'):
        fresh(update=update)(tokens(T=9))


# ---- GPT-2's weights -----------------------------------------------------------------------------


@pytest.mark.parametrize('activation', ['gelu', 'gelu_new'])
def test_from_pretrained(activation, tmp_path):
    """A folder written by transformers: same logits as its GPT-2.

    OpenAI's weights were trained with the tanh form of GELU (gelu_new) and nanoGPT's exact one is
    used here; at the weights of a fresh GPT-2 they agree far below 1e-5, so only the exact form is
    also tested at large weights."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=29,
            n_positions=12,
            n_embd=16,
            n_layer=2,
            n_head=2,
            activation_function=activation,
            attn_pdrop=0.1,
            embd_pdrop=0.1,
            resid_pdrop=0.1,
            bos_token_id=28,
            eos_token_id=28,
        )
    ).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_((0.3 if activation == 'gelu' else 0.02) * torch.randn_like(p))
    theirs.save_pretrained(tmp_path)
    ours = build_model(pretrained(str(tmp_path)), '').eval()
    assert (ours.cfg.update, ours.cfg.n_layer, ours.cfg.n_head, ours.cfg.n_embd) == ('gd', 2, 2, 16)
    assert (ours.cfg.block_size, ours.cfg.bias) == (12, True)
    idx = tokens(T=12, vocab_size=29)
    with torch.no_grad():
        assert (ours(idx, return_logits=True)[0][..., :29] - theirs(idx).logits).abs().max() < 1e-5
    assert torch.equal(
        ours.generate(idx[:, :4], 5, temperature=0),
        theirs.generate(
            idx[:, :4],
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=28,
            attention_mask=torch.ones(2, 4),
        ),
    )
