"""nGPT's promises: the stream and the weights stay on the unit sphere, along the axis the paper
names."""

import math

import pytest
import torch
from conftest import TINY, fresh, nontrivial, tokens

from model import SCHEMES

SPHERES = [name for name, (rule, _) in SCHEMES.items() if rule.normalized]
# the embedding dimension of a weight (out, in): `in` where it reads the stream, `out` where it
# writes
AXES = {
    'transformer.wte.weight': 1,
    'lm_head.weight': 1,
    'attn.c_attn.weight': 1,
    'mlp.c_fc.weight': 1,
    'attn.c_proj.weight': 0,
    'mlp.c_proj.weight': 0,
}


def axis(name):
    """The axis of unit norm of a matrix, None for the scale vectors and scalars."""
    return next((axis for end, axis in AXES.items() if name.endswith(end)), None)


def assert_unit_weights(model):
    seen = set()
    for name, p in model.named_parameters():
        if axis(name) is None:
            continue
        seen.add(name.split('.h.')[-1].lstrip('0123456789.'))
        lengths = p.detach().double().norm(dim=axis(name))
        assert (lengths - 1).abs().max() < 1e-6, name
        others = p.detach().double().norm(dim=1 - axis(name))
        assert (others - 1).abs().max() > 1e-3, f'{name}: unit along the other axis as well'
    assert seen == set(AXES)


@pytest.mark.parametrize('update', SPHERES)
def test_weights_are_unit_from_the_start_and_after_each_normalization(update):
    model = fresh(update=update)
    assert_unit_weights(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    with pytest.raises(AssertionError):
        assert_unit_weights(model)
    model.normalize_weights()
    assert_unit_weights(model)


@pytest.mark.parametrize('update', SPHERES)
def test_normalizing_divides_by_the_norm_and_touches_nothing_else(update):
    model = fresh(update=update).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.normalize_weights()
    for name, p in model.named_parameters():
        if axis(name) is None:
            assert torch.equal(p, before[name]), name
        else:
            expected = before[name] / before[name].square().sum(axis(name), keepdim=True).sqrt()
            assert torch.allclose(p, expected, rtol=0, atol=1e-14), name


def test_normalizing_is_a_no_op_elsewhere(update):
    """Bitwise nothing for the unnormalized schemes; for the sphere a second call changes rounding
    at most."""
    model = nontrivial(torch.float32, update=update)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.normalize_weights()
    for name, p in model.named_parameters():
        if SCHEMES[update][0].normalized:
            assert torch.allclose(p, before[name], rtol=0, atol=1e-6), name
        else:
            assert torch.equal(p, before[name]), name


@pytest.mark.parametrize('update', SPHERES)
def test_normalizing_keeps_the_parameters(update):
    """In place: an optimizer holds these very tensors, and no graph may grow through the call."""
    model = fresh(update=update)
    before = list(model.parameters())
    model(tokens(), tokens(seed=2))[1].backward()
    model.normalize_weights()
    assert all(
        p is q and p.requires_grad and p.is_leaf and p.grad is not None
        for p, q in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize('update', SPHERES)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_stream_is_on_the_sphere_after_every_layer(update, dtype, tolerance):
    model = nontrivial(dtype, update=update, n_layer=3)
    streams = []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        block.register_forward_hook(lambda _, args, out: streams.append(out[0]))
    model(tokens(T=8))
    assert len(streams) == 2 * 3
    for x in streams:
        assert x.shape == (2, 8, 16)
        assert (x.norm(dim=-1) - 1).abs().max() < tolerance


@pytest.mark.parametrize('update', SPHERES)
def test_scales_have_their_sizes_and_starts(update):
    d, V = TINY['n_embd'], TINY['vocab_size']
    model = fresh(update=update)
    wanted = {'s_z.raw': (V, 1 / math.sqrt(d))}
    for i in range(TINY['n_layer']):
        h = f'transformer.h.{i}.'
        wanted |= {h + 'attn.s_qk.raw': (d, 1 / math.sqrt(d)), h + 'mlp.s_uv.raw': (8 * d, 1.0)}
        wanted |= {
            h + f'update_{part}.alpha.raw': (d, 1 / math.sqrt(d)) for part in ('attn', 'mlp')
        }
    state = model.state_dict()
    for name, (size, start) in wanted.items():
        assert state[name].shape == (size,), name
        assert torch.allclose(state[name], torch.full((size,), start)), name


@pytest.mark.parametrize('update', SPHERES)
def test_rescaling_the_queries_and_keys_changes_nothing(update):
    """q and k are normalized per head, so a head's length of W_q and W_k is no information."""
    model = nontrivial(update=update)
    before = model(tokens(), return_logits=True)[0]
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:32] *= 3
    assert torch.allclose(model(tokens(), return_logits=True)[0], before, rtol=0, atol=1e-12)


@pytest.mark.parametrize('update', SPHERES)
def test_optimizer_steps_stay_on_the_sphere(update):
    model = fresh(update=update).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(8):
        _, loss = model(tokens(), tokens(seed=2))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.normalize_weights()
        assert_unit_weights(model)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize('update', SPHERES)
def test_direction_of_the_output_is_all_that_counts(update):
    """Norm(W_o ...) forgets the length of the sublayer's answer: scaling both output matrices is
    invisible."""
    model = nontrivial(update=update)
    before = model(tokens(), return_logits=True)[0]
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.weight *= 7
            block.mlp.c_proj.weight *= 0.1
    assert torch.allclose(model(tokens(), return_logits=True)[0], before, rtol=0, atol=1e-12)


@pytest.mark.parametrize('update', SPHERES)
def test_alpha_acts_by_its_absolute_value(update):
    model = nontrivial(update=update)
    before = model(tokens(), return_logits=True)[0]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('alpha.raw'):
                p.neg_()
    assert torch.equal(model(tokens(), return_logits=True)[0], before)
