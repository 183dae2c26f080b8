"""The update rules: each against its equation in reference.py, and identities between schemes."""

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import fresh, nontrivial, perturb, relative_error, rules, tokens

from model import SCHEMES, UpdateRule

NATURAL = {'mu': torch.sigmoid, 'beta': torch.sigmoid, 'gamma': F.softplus, 'nu': F.softplus}
STARTS = {'mu': 0.5, 'beta': 0.5, 'gamma': math.log(2), 'nu': 1.0}
RAW_STARTS = {'mu': 0.0, 'beta': 0.0, 'gamma': 0.0, 'nu': math.log(math.e - 1)}


class Linear:
    """The oracle y -> W y, counting its calls."""

    def __init__(self, d, seed=2):
        self.W = torch.randn(
            d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        self.calls = 0

    def __call__(self, y):
        self.calls += 1
        return y @ self.W.T


def state(update, B=2, T=3, d=16):
    """Random (x, v) as the scheme holds them: x of unit norm on the sphere, v None where there is
    no velocity."""
    generator = torch.Generator().manual_seed(3)
    x, v = torch.randn(2, B, T, d, generator=generator, dtype=torch.float64)
    rule, _ = SCHEMES[update]
    return F.normalize(x, dim=-1) if rule.normalized else x, v if rule.uses_velocity else None


def test_rule_equals_its_equation(update):
    """Every rule of the model on random (x, v), against reference.py's step."""
    model = nontrivial(update=update)
    weights, kind = model.state_dict(), reference.scheme(update)[0]
    names = [name for name, module in model.named_modules() if isinstance(module, UpdateRule)]
    assert len(names) == len(rules(model))
    for name in names:
        x, v = state(update)
        oracle = Linear(x.shape[-1])
        expected_x, expected_v = reference.step(kind, weights, model.cfg, name, x, v, oracle)
        found_x, found_v = model.get_submodule(name)(x, v, oracle)
        torch.testing.assert_close(found_x, expected_x, rtol=1e-12, atol=1e-12)
        if v is None:
            assert found_v is None
        else:
            torch.testing.assert_close(found_v, expected_v, rtol=1e-12, atol=1e-12)


def test_rule_calls_its_oracle_once_and_leaves_its_arguments_alone(update):
    for rule in rules(nontrivial(update=update)):
        x, v = state(update)
        x_before, v_before = x.clone(), None if v is None else v.clone()
        oracle = Linear(x.shape[-1])
        rule(x, v, oracle)
        assert oracle.calls == 1
        assert torch.equal(x, x_before) and (v is None or torch.equal(v, v_before))


def test_layer_calls_each_sublayer_once(update):
    model = nontrivial(update=update)
    calls = []
    for block in model.transformer.h:
        block.attn.register_forward_hook(lambda *_: calls.append('attn'))
        block.mlp.register_forward_hook(lambda *_: calls.append('mlp'))
    model(tokens())
    assert calls == ['attn', 'mlp'] * len(model.transformer.h)


def test_number_of_rules_follows_the_splitting(update):
    model = fresh(update=update)
    names = ['update_attn', 'update_mlp'] if SCHEMES[update][1] == 'lie_trotter' else ['update']
    for block in model.transformer.h:
        assert [name for name, _ in block.named_children() if name.startswith('update')] == names
    # nothing is shared
    assert len({id(rule) for rule in rules(model)}) == len(names) * len(model.transformer.h)


def test_scalars_start_at_their_stated_values(update):
    for rule in rules(fresh(update=update)):
        for name in set(rule.scalars) & set(STARTS):
            raw = getattr(rule, name).raw.detach().double()
            assert raw.numel() == 1
            assert raw.item() == pytest.approx(RAW_STARTS[name], abs=1e-7)
            assert NATURAL[name](raw).item() == pytest.approx(STARTS[name], abs=1e-7)


def test_config_fields_set_the_starting_values(update):
    wanted = {'mu': 0.9, 'beta': 0.2, 'gamma': 1.7, 'nu': 0.6}
    for name in set(SCHEMES[update][0].scalars) & set(wanted):
        model = fresh(update=update, **{f'{name}_init': wanted[name]})
        assert getattr(model.cfg, f'{name}_init') == wanted[name]
        for rule in rules(model):
            for scalar in set(rule.scalars) & set(STARTS):
                value = NATURAL[scalar](getattr(rule, scalar).raw.detach().double()).item()
                assert value == pytest.approx(
                    wanted[name] if scalar == name else STARTS[scalar], rel=1e-6
                )


@pytest.mark.parametrize('update', ['ngpt', 'ngpt_nag'])
def test_alpha_starts_at_alpha_init(update):
    """One step of a fresh rule from v = 0, and the same by hand with alpha = alpha_init in every
    coordinate."""
    for alpha, given in [(0.05, {}), (0.2, dict(alpha_init=0.2))]:
        model = fresh(update=update, **given).double()
        assert model.cfg.alpha_init == alpha
        for rule in rules(model):
            # scale: 1 / sqrt(16)
            assert torch.allclose(rule.alpha.raw, torch.full((16,), 0.25, dtype=torch.float64))
            x, v = state(update)
            oracle = Linear(16)
            x_new, _ = rule(x, None if v is None else 0 * v, oracle)
            x_hand = F.normalize(x + alpha * (F.normalize(oracle(x), dim=-1) - x), dim=-1)
            # alpha.raw was rounded to float32
            assert torch.allclose(x_new, x_hand, rtol=0, atol=1e-8)


# ---- identities ----------------------------------------------------------------------------------


def nanogpt(p, idx, n_layer, n_head):
    """nanoGPT's forward pass, all positions' logits, written out: p is a state dict."""

    def norm(name, x):
        return F.layer_norm(x, (x.shape[-1],), p[name + '.weight'], p.get(name + '.bias'), 1e-5)

    def linear(name, x):
        return F.linear(x, p[name + '.weight'], p.get(name + '.bias'))

    B, T = idx.shape
    x = F.embedding(idx, p['transformer.wte.weight']) + F.embedding(
        torch.arange(T), p['transformer.wpe.weight']
    )
    d = x.shape[-1]
    for i in range(n_layer):
        h = f'transformer.h.{i}.'
        q, k, v = linear(h + 'attn.c_attn', norm(h + 'ln_1', x)).split(d, dim=2)
        q, k, v = (y.view(B, T, n_head, d // n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(h + 'attn.c_proj', y.transpose(1, 2).contiguous().view(B, T, d))
        x = x + linear(h + 'mlp.c_proj', F.gelu(linear(h + 'mlp.c_fc', norm(h + 'ln_2', x))))
    return F.linear(norm('transformer.ln_f', x), p['transformer.wte.weight'])


@pytest.mark.parametrize('bias', [False, True])
def test_gd_is_nanogpt_bit_for_bit(bias):
    """The baseline of every comparison: its logits and gradients are those of the plain GPT, not
    merely close."""
    model = nontrivial(torch.float32, update='gd', n_layer=3, bias=bias)
    by_hand = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    idx, targets = tokens(), tokens(seed=2)
    logits, _ = model(idx, return_logits=True)
    expected = nanogpt(by_hand, idx, 3, 2)
    assert torch.equal(logits, expected)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, by_hand[name].grad), name


def logits_and_gradients(model):
    model.zero_grad()
    logits, _ = model(tokens(), return_logits=True)
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize('raw_mu', [-math.inf, -200.0])
@pytest.mark.parametrize('nag, heavy_ball', [('lt_nag', 'polyak'), ('euler_nag', 'euler_polyak')])
def test_nag_without_lookahead_is_polyak_bit_for_bit(nag, heavy_ball, raw_mu):
    """(Gradients add up in another order, since the stream is used twice; they agree to
    rounding.)"""
    nag, heavy_ball = (
        nontrivial(torch.float32, update=nag),
        nontrivial(torch.float32, update=heavy_ball),
    )
    for rule in rules(nag):
        rule.mu.raw.data.fill_(raw_mu)
    missing = heavy_ball.load_state_dict(nag.state_dict(), strict=False)
    assert not missing.missing_keys and all(
        name.endswith('mu.raw') for name in missing.unexpected_keys
    )
    logits, gradients = logits_and_gradients(nag)
    expected, expected_gradients = logits_and_gradients(heavy_ball)
    assert torch.equal(logits, expected)
    for name, gradient in expected_gradients.items():
        assert relative_error(gradients[name], gradient) < 1e-5, name


def test_tmm_with_nu_one_is_nag():
    tmm, nag = nontrivial(update='lt_tmm'), nontrivial(update='lt_nag')
    for rule in rules(tmm):
        rule.nu.raw.data.fill_(math.log(math.e - 1))
    missing = nag.load_state_dict(tmm.state_dict(), strict=False)
    assert not missing.missing_keys and all(
        name.endswith('nu.raw') for name in missing.unexpected_keys
    )
    logits, gradients = logits_and_gradients(tmm)
    expected, expected_gradients = logits_and_gradients(nag)
    assert relative_error(logits, expected) < 1e-13
    for name, gradient in expected_gradients.items():
        assert relative_error(gradients[name], gradient) < 1e-11, name


def test_momentum_without_memory_forgets_the_velocity():
    """beta = mu = 0: V' = N(gamma G(X)) whatever V was, so the first velocity has no influence."""
    model = nontrivial(update='lt_nag')
    for rule in rules(model):
        rule.mu.raw.data.fill_(-math.inf)
        rule.beta.raw.data.fill_(-math.inf)
    before = model(tokens(), return_logits=True)[0]
    model.transformer.vte.weight.data.normal_()
    assert torch.equal(model(tokens(), return_logits=True)[0], before)


def blocks_in_and_out(model, idx):
    """The residual stream before and after every layer: lists of (B, T, d)."""
    before, after = [], []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: before.append(args[0].detach()))
        block.register_forward_hook(lambda _, args, out: after.append(out[0].detach()))
    model(idx)
    return before, after


@pytest.mark.parametrize('update', ['ngpt', 'ngpt_nag'])
def test_sphere_with_alpha_zero_is_the_identity(update):
    """With no step the stream stays where it was (and a velocity that starts at zero stays
    zero)."""
    model = nontrivial(update=update)
    for rule in rules(model):
        rule.alpha.raw.data.zero_()
    for before, after in zip(*blocks_in_and_out(model, tokens())):
        assert torch.allclose(before, after, rtol=0, atol=1e-14)


@pytest.mark.parametrize('update', ['ngpt', 'ngpt_nag'])
@pytest.mark.parametrize('sign', [1, -1])
def test_sphere_with_alpha_one_lands_on_the_normalized_oracle(update, sign):
    for rule in rules(nontrivial(update=update)):
        rule.alpha.raw.data.fill_(sign / (0.05 * math.sqrt(16)))  # alpha = |raw| * init / scale
        x, v = state(update)
        oracle = Linear(16)
        x_new, _ = rule(x, None if v is None else 0 * v, oracle)
        assert torch.allclose(x_new, F.normalize(oracle(x), dim=-1), rtol=0, atol=1e-14)


def test_ngpt_nag_without_momentum_is_ngpt():
    """Gradients agree along the sphere: Norm(h + 0) is h, but passes nothing on to the length of
    wte's rows."""
    momentum, plain = nontrivial(update='ngpt_nag'), nontrivial(update='ngpt')
    for rule in rules(momentum):
        rule.mu.raw.data.fill_(-math.inf)
        rule.beta.raw.data.fill_(-math.inf)
    missing = plain.load_state_dict(momentum.state_dict(), strict=False)
    assert not missing.missing_keys
    assert {name.split('.')[-2] for name in missing.unexpected_keys} == {'mu', 'beta'}
    logits, gradients = logits_and_gradients(momentum)
    expected, expected_gradients = logits_and_gradients(plain)
    assert relative_error(logits, expected) < 1e-12
    wte = plain.transformer.wte.weight.detach()
    for g in (gradients['transformer.wte.weight'], expected_gradients['transformer.wte.weight']):
        g -= (g * wte).sum(-1, keepdim=True) * wte
    for name, gradient in expected_gradients.items():
        assert relative_error(gradients[name], gradient) < 1e-11, name


@pytest.mark.parametrize('update', ['gd', 'euler_gd'])
def test_gd_with_silent_sublayers_passes_the_stream_on(update):
    """The residual path is the stream itself, not its normalised copy."""
    model = nontrivial(update=update)
    for block in model.transformer.h:
        block.attn.c_proj.weight.data.zero_()
        block.mlp.c_proj.weight.data.zero_()
    for before, after in zip(*blocks_in_and_out(model, tokens())):
        assert torch.equal(before, after)


def test_perturbing_reaches_every_parameter(update):
    """The tests' own premise: no parameter is left at its start."""
    start, model = fresh(update=update).double(), nontrivial(update=update)
    for (name, before), after in zip(start.named_parameters(), model.parameters()):
        assert (before != after).all(), name
    assert not torch.equal(
        next(perturb(model, seed=9).parameters()), next(nontrivial(update=update).parameters())
    )
