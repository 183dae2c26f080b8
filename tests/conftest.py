"""Fixtures shared by the model's tests: tiny models of every scheme, with no parameter left at a special value.

Whatever asks for `update` runs once for each scheme of model.SCHEMES, and whatever asks for `variant` once for each
architecture a scheme allows; a scheme becomes tested by being registered there.
"""

import itertools

import pytest
import torch

from model import GPT, GPTConfig, SCHEMES

torch.set_num_threads(1)  # tiny models: threads would only wait for each other

TINY = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=13, block_size=8)


def variants(update):
    """Every GPTConfig choice that applies to the scheme, as keyword arguments."""
    rule, _ = SCHEMES[update]
    if rule.normalized:  # one architecture: RoPE, SwiGLU, untied, no biases
        return [dict(update=update)]
    choices = dict(pos=['learned', 'rope'], mlp=['gelu', 'swiglu'], tie_weights=[True, False], bias=[False, True])
    if rule.uses_velocity:
        choices['velocity_init'] = ['learned', 'zero']
    return [dict(update=update, **dict(zip(choices, values))) for values in itertools.product(*choices.values())]


def describe(kwargs):
    return '-'.join(f'{key}={value}' if isinstance(value, bool) else str(value) for key, value in kwargs.items())


@pytest.fixture(params=SCHEMES)
def update(request):
    return request.param


@pytest.fixture(params=[kwargs for update in SCHEMES for kwargs in variants(update)], ids=describe)
def variant(request):
    return request.param


def fresh(**kwargs):
    """A tiny model as constructed, the same for the same arguments."""
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **kwargs})).eval()


def perturb(model, seed=0, std=0.3):
    """Add noise to every parameter (no gain stays 1, no scalar at its start, some alphas turn negative), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    model.normalize_weights()
    return model


def nontrivial(dtype=torch.float64, std=0.3, **kwargs):
    """A tiny model whose every parameter matters."""
    return perturb(fresh(**kwargs).to(dtype), std=std)


def rules(model):
    """The update rules of all layers, in order: two a layer for Lie-Trotter, one for Euler."""
    names = ('update_attn', 'update_mlp', 'update')
    return [getattr(block, name) for block in model.transformer.h for name in names if hasattr(block, name)]


def tokens(B=2, T=7, vocab_size=TINY['vocab_size'], seed=1):
    """Random ids (B, T)."""
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def relative_error(a, b):
    """max |a - b| / max |b|, and 0 where both are all zeros."""
    error = (a - b).abs().max().item()
    return error / b.abs().max().item() if error else 0.0
