"""
A GPT whose layer is one step of an optimizer on the token embeddings.

Shapes: B batch, T tokens, C = n_embd, H = n_head, D = C / H, V = vocab_size.
Sources. YuriiFormer (arXiv 2601.23236): momentum streams on token embeddings, Euler and Lie-Trotter
splitting; its appendix has the parametrization of the scalars. Momentum Streams, 2026: triple
momentum. nGPT: arXiv 2410.01131.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanonag.configurator import at_least, between, choose, require, set_numbers
from nanonag.generation import KVCache, generate
from nanonag.layers import Embedding, Linear, rotary_table, rotate
from nanonag.loss import linear_cross_entropy

# ------------------------------------------------------------------- learned scalars and vectors


class Scalar(nn.Module):
    """One learned number, kept inside its range: mu, beta in (0, 1); gamma, nu > 0.

    ``init`` is the number itself; the parameter ``raw`` is unconstrained, with mu, beta =
    sigmoid(raw) and gamma, nu = softplus(raw).
    """

    param_kind = 'scalars'
    INIT = {'mu': 0.5, 'beta': 0.5, 'gamma': math.log(2), 'nu': 1.0}  # raw is 0, for nu ln(e - 1)

    def __init__(self, name, init):
        super().__init__()
        self.is_fraction = name in ('mu', 'beta')
        raw = math.log(init / (1 - init)) if self.is_fraction else math.log(math.expm1(init))
        self.raw = nn.Parameter(torch.full((1,), raw))

    def forward(self):
        return torch.sigmoid(self.raw) if self.is_fraction else F.softplus(self.raw)


class Scale(nn.Module):
    """A learned vector s = raw * (init / scale), raw starting at ``scale`` (nGPT, section 2.5).

    A smaller ``scale`` makes s change faster at the same learning rate.
    """

    param_kind = 'scales'

    def __init__(self, size, init=1.0, scale=1.0):
        super().__init__()
        self.ratio = init / scale
        self.raw = nn.Parameter(torch.full((size,), float(scale)))

    def forward(self):
        return self.raw * self.ratio


def inverse_norm(x, dim=-1):
    """1 / ||x||_2 along an axis, which is kept with size 1; in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=dtype)
    return norm.clamp(min=1e-12).reciprocal()


def retract(x):
    """Norm(x) = x / ||x||_2, the point on the unit sphere (nGPT, 2.1); in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * inverse_norm(x)  # the gradient of a quotient takes twice as many passes


def pre_norm(cfg):
    """The norm in front of a sublayer and of the head; on the sphere none is needed."""
    return nn.Identity() if cfg.normalized else nn.LayerNorm(cfg.n_embd, bias=cfg.bias)


# ------------- update rules: one optimizer step on the stream x and its velocity v, given an oracle


class UpdateRule(nn.Module):
    """``forward(x, v, oracle) -> (x, v)`` with x, v: (B, T, C); v is None without a velocity.

    ``oracle`` maps a point (B, T, C) to a direction (B, T, C) and is called exactly once. A rule
    does not depend on attention, caches or splittings; its class attributes declare what it learns
    and which options of GPTConfig it allows.
    """

    scalars: tuple[str, ...] = ()  # names among mu, beta, gamma, nu
    uses_velocity = False
    normalized = False  # on the unit sphere, with nGPT's normalized weights
    choices: dict[str, tuple] = {
        'pos': ('learned', 'rope'),
        'mlp': ('gelu', 'swiglu'),
        'tie_weights': (True, False),
    }

    def __init__(self, cfg):
        super().__init__()
        for name in self.scalars:
            self.add_module(name, Scalar(name, getattr(cfg, f'{name}_init')))
        if self.uses_velocity and not self.normalized:
            self.norm_v = nn.LayerNorm(cfg.n_embd, bias=False)
        if self.normalized:
            self.alpha = Scale(cfg.n_embd, init=cfg.alpha_init, scale=cfg.n_embd**-0.5)


class GradientDescent(UpdateRule):
    """X' = X + G(X): the residual connection."""

    def forward(self, x, v, oracle):
        return x + oracle(x), v


class Nesterov(UpdateRule):
    """Y = X + mu V;  V' = N(beta V + gamma G(Y));  X' = X + V' (YuriiFormer)."""

    scalars = ('mu', 'beta', 'gamma')
    uses_velocity = True

    def forward(self, x, v, oracle):
        y = x + self.mu() * v
        v = self.norm_v(self.beta() * v + self.gamma() * oracle(y))
        return x + v, v


class Polyak(UpdateRule):
    """V' = N(beta V + gamma G(X));  X' = X + V': heavy ball, Nesterov without the lookahead."""

    scalars = ('beta', 'gamma')
    uses_velocity = True

    def forward(self, x, v, oracle):
        v = self.norm_v(self.beta() * v + self.gamma() * oracle(x))
        return x + v, v


class TripleMomentum(UpdateRule):
    """Y = X + mu V;  V' = N(beta V + gamma G(Y));  X' = X + nu V' (Momentum Streams)."""

    scalars = ('mu', 'beta', 'gamma', 'nu')
    uses_velocity = True

    def forward(self, x, v, oracle):
        y = x + self.mu() * v
        v = self.norm_v(self.beta() * v + self.gamma() * oracle(y))
        return x + self.nu() * v, v


# the one architecture of nGPT, in the form of UpdateRule.choices
ON_SPHERE = {'pos': ('rope',), 'mlp': ('swiglu',), 'tie_weights': (False,), 'bias': (False,)}
ON_SPHERE |= {'dropout': (0.0,)}


class Sphere(UpdateRule):
    """h' = Norm(h + |alpha| (Norm(G(h)) - h)): nGPT, equations 10 and 11."""

    normalized = True
    choices = ON_SPHERE

    def forward(self, x, v, oracle):
        return retract(torch.lerp(x, retract(oracle(x)), self.alpha().abs())), v


class SphereNesterov(UpdateRule):
    """y = Norm(h + mu v);  v' = beta v + |alpha| (Norm(G(y)) - y);  h' = Norm(h + v').

    In no paper. With mu = beta = 0 it is nGPT's step.
    """

    scalars = ('mu', 'beta')
    uses_velocity = True
    normalized = True
    choices = ON_SPHERE

    def forward(self, x, v, oracle):
        y = retract(x + self.mu() * v)
        v = self.beta() * v + self.alpha().abs() * (retract(oracle(y)) - y)
        return retract(x + v), v


class Scheme(NamedTuple):
    """What ``update=`` names: an update rule, and the splitting that makes a layer of it."""

    rule: type[UpdateRule]
    splitting: Literal['lie_trotter', 'euler']


SCHEMES = {
    'gd': Scheme(GradientDescent, 'lie_trotter'),
    'euler_gd': Scheme(GradientDescent, 'euler'),
    'lt_nag': Scheme(Nesterov, 'lie_trotter'),
    'euler_nag': Scheme(Nesterov, 'euler'),
    'polyak': Scheme(Polyak, 'lie_trotter'),
    'euler_polyak': Scheme(Polyak, 'euler'),
    'lt_tmm': Scheme(TripleMomentum, 'lie_trotter'),
    'ngpt': Scheme(Sphere, 'lie_trotter'),
    'ngpt_nag': Scheme(SphereNesterov, 'lie_trotter'),
}

# ------------------------------------------- the oracles, attention and MLP, and the block of both


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.dropout = cfg.dropout
        self.c_attn = Linear(cfg.n_embd, 3 * cfg.n_embd, cfg.bias, embd_axis=1, stacked=3)
        self.c_proj = Linear(cfg.n_embd, cfg.n_embd, cfg.bias, embd_axis=0)
        self.s_qk = Scale(cfg.n_embd, scale=cfg.n_embd**-0.5) if cfg.normalized else None
        d_head = cfg.n_embd // cfg.n_head
        # the product of unit vectors q and k has std 1/sqrt(D), that of free ones sqrt(D)
        self.scale = d_head**0.5 if cfg.normalized else d_head**-0.5

    def forward(self, x, rotary=None, cache=None):
        B, T, C = x.shape
        qkv = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in qkv)  # (B, H, T, D)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.s_qk is not None:
            s_qk = self.s_qk().view(self.n_head, 1, -1)
            q, k = retract(q) * s_qk, retract(k) * s_qk
        q, k = q.to(v.dtype), k.to(v.dtype)  # float32 tables and scales promote under autocast
        mask = None
        if cache is not None:
            k, v, mask = cache.append(k, v)
        is_causal = mask is None and k.size(2) == T
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=self.scale)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """GELU: W_o gelu(W x). SwiGLU: W_o (u * SiLU(v)) with u, v = W_u x, W_v x.

    W_u and W_v are stacked in ``c_fc``, u's rows first.
    """

    def __init__(self, cfg):
        super().__init__()
        self.swiglu = cfg.mlp == 'swiglu'
        self.dropout = cfg.dropout
        n_fc = (8 if self.swiglu else 4) * cfg.n_embd
        self.c_fc = Linear(cfg.n_embd, n_fc, cfg.bias, embd_axis=1)
        self.c_proj = Linear(4 * cfg.n_embd, cfg.n_embd, cfg.bias, embd_axis=0)
        self.s_uv = Scale(n_fc) if cfg.normalized else None

    def forward(self, x):
        h = self.c_fc(x)
        if self.s_uv is not None:
            # sqrt(d), since v of unit rows has std 1/sqrt(d); cast, or float32 promotes all of h
            h = h * (self.s_uv() * x.size(-1) ** 0.5).to(h.dtype)
        if self.swiglu:
            u, v = h.chunk(2, dim=-1)
            h = u * F.silu(v)
        else:
            h = F.gelu(h)
        return F.dropout(self.c_proj(h), self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention's energy and the MLP's, split into steps of one update rule."""

    def __init__(self, cfg):
        super().__init__()
        self.ln_1 = pre_norm(cfg)
        self.attn = CausalSelfAttention(cfg)
        self.ln_2 = pre_norm(cfg)
        self.mlp = MLP(cfg)
        rule, self.splitting = SCHEMES[cfg.update]
        if self.splitting == 'lie_trotter':
            self.update_attn = rule(cfg)
            self.update_mlp = rule(cfg)
        else:
            self.update = rule(cfg)

    def forward(self, x, v, rotary=None, cache=None):
        def A(y):
            return self.attn(self.ln_1(y), rotary, cache)

        def M(y):
            return self.mlp(self.ln_2(y))

        if self.splitting == 'lie_trotter':
            x, v = self.update_attn(x, v, A)
            return self.update_mlp(x, v, M)
        return self.update(x, v, lambda y: A(y) + M(y))


# --------------------------------------------------------------------- configuration and model


@dataclass(frozen=True)
class GPTConfig:
    """The architecture; None stands for the scheme's default, its paper's choice.

    Raises UserError for values out of range, contradictions, and options without effect.
    """

    update: str = 'lt_nag'  # the scheme (update rule x splitting), one of SCHEMES
    n_layer: int = 12  # layers
    n_head: int = 12  # attention heads
    n_embd: int = 768  # width of the embeddings
    # rows of the token table: GPT-2's 50,257 padded to a multiple of 64 for speed
    vocab_size: int = 50304
    # ids from here on are padding and never sampled; default vocab_size
    vocab_used: int | None = None
    block_size: int = 1024  # context length, tokens
    dropout: float = 0.0  # on embeddings, attention weights and sublayer outputs
    bias: bool = False  # biases in the linear layers and LayerNorms
    # where the velocity starts: tables of its own (default; ngpt_nag: zero) or zeros
    velocity_init: Literal['learned', 'zero'] | None = None
    # position table (default) or rotary embedding (ngpt's)
    pos: Literal['learned', 'rope'] | None = None
    mlp: Literal['gelu', 'swiglu'] | None = None  # gelu (default) or swiglu (ngpt's)
    tie_weights: bool | None = None  # share the token table with the head (default; never for ngpt)
    rope_base: float | None = None  # base of the rotary frequencies; default 10000
    mu_init: float | None = None  # lookahead at the start, in (0, 1); default 0.5
    beta_init: float | None = None  # momentum at the start, in (0, 1); default 0.5
    gamma_init: float | None = None  # step size at the start; default ln 2
    nu_init: float | None = None  # velocity coefficient of lt_tmm at the start; default 1
    alpha_init: float | None = None  # eigen learning rates of ngpt at the start; default 0.05

    def __post_init__(self):
        at_least(self, n_head=1, n_embd=1, vocab_size=1, vocab_used=1, block_size=1, dropout=0)
        between(self, n_layer=(0, 10001), mu_init=(0, 1), beta_init=(0, 1), gamma_init=(0, 80))
        between(self, nu_init=(0, 80), alpha_init=(0, math.inf), rope_base=(0, math.inf))
        names = ', '.join(SCHEMES)
        require(self.update in SCHEMES, f'update={self.update!r} is no scheme; choose from {names}')
        velocity = ('zero',) if self.normalized else ('learned', 'zero')
        choices = {'velocity_init': velocity if self.rule.uses_velocity else (None,)}
        choose(self, choices | self.rule.choices, f'update={self.update}')
        set_numbers(self, self.numbers(), f'update={self.update}, pos={self.pos}')
        self.check_sizes()

    def numbers(self):
        """{option: default} of the options that hold a number, None where it has no effect."""
        starts = {name: Scalar.INIT[name] for name in self.rule.scalars}
        starts |= {'alpha': 0.05} if self.normalized else {}
        numbers = {f'{name}_init': starts.get(name) for name in (*Scalar.INIT, 'alpha')}
        rope_base = 1e4 if self.pos == 'rope' else None
        return numbers | {'rope_base': rope_base, 'vocab_used': self.vocab_size}

    def check_sizes(self):
        """Raises UserError for sizes that do not fit each other."""
        d_head, rest = divmod(self.n_embd, self.n_head)
        near = max(1, round(self.n_embd / self.n_head)) * self.n_head
        shape = f'n_embd={self.n_embd}, n_head={self.n_head}'
        require(self.dropout < 1, f'dropout={self.dropout}: must be below 1')
        require(not rest, f'{shape}: the width is not divisible by n_head; the nearest is {near}')
        odd = (
            f'{shape}: pos=rope rotates pairs, but heads have the odd size {d_head}; change either'
        )
        require(self.pos != 'rope' or d_head % 2 == 0, odd)
        used = f'vocab_used={self.vocab_used} is more than vocab_size={self.vocab_size}'
        require((self.vocab_used or 0) <= self.vocab_size, used)

    @property
    def rule(self):
        return SCHEMES[self.update].rule

    @property
    def normalized(self):
        return self.rule.normalized

    @property
    def learns_scalars(self):
        return bool(self.rule.scalars)


class GPT(nn.Module):
    """The transformer: embed -> blocks -> norm -> head.

    State-dict names are nanoGPT's, and for what it lacks the schemes' own.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        wte = Embedding(cfg.vocab_size, cfg.n_embd)
        parts: dict[str, nn.Module] = {'wte': wte}
        if cfg.pos == 'learned':
            parts['wpe'] = Embedding(cfg.block_size, cfg.n_embd)
        parts['h'] = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        parts['ln_f'] = pre_norm(cfg)
        if cfg.velocity_init == 'learned':
            parts['vte'] = Embedding(cfg.vocab_size, cfg.n_embd)
            if cfg.pos == 'learned':
                parts['vpe'] = Embedding(cfg.block_size, cfg.n_embd)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = Linear(cfg.n_embd, cfg.vocab_size, False, 1, param_kind='embeddings')
        if cfg.tie_weights:
            self.lm_head.weight = wte.weight
        self.s_z = Scale(cfg.vocab_size, scale=cfg.n_embd**-0.5) if cfg.normalized else None
        self.init_weights()

    def init_weights(self):
        """Draws the weights, a velocity's last: a seed gives all schemes the same others."""
        std = self.cfg.n_embd**-0.5 if self.cfg.normalized else 0.02
        output_std = std if self.cfg.normalized else std / math.sqrt(2 * self.cfg.n_layer)  # GPT-2
        tables = [self.transformer[name] for name in ('vte', 'vpe') if name in self.transformer]
        weighted = [m for m in self.modules() if isinstance(m, (Linear, Embedding))]
        for module in [*(m for m in weighted if m not in tables), *tables]:
            nn.init.normal_(module.weight, std=output_std if module.embd_axis == 0 else std)
        self.normalize_weights()

    @torch.no_grad()
    def normalize_weights(self):
        """Puts the matrices of a normalized scheme back on the unit sphere.

        It must follow every optimizer step; configure_optimizer registers it as a hook.
        """
        if self.cfg.normalized:
            for module in self.modules():
                if isinstance(module, (Linear, Embedding)):
                    module.weight.mul_(inverse_norm(module.weight, module.embd_axis))

    def num_params(self):
        """The number of trainable parameters, a tied table counted once."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, idx, targets=None, cache=None, return_logits=False):
        """idx, targets: ids (B, T), int64, a target of -1 ignored -> (logits, loss).

        With targets, loss is their mean cross-entropy in nats and logits are None; without, loss is
        None and logits are the last position's, (B, 1, V). With return_logits they are those of all
        positions, (B, T, V), either way. ``cache``, of :meth:`new_cache`, holds the tokens before
        idx and takes in idx. Raises ValueError for more than block_size tokens.
        """
        x, v, rotary = self.embed(idx, cache)
        caches = cache or [None] * self.cfg.n_layer
        for block, layer_cache in zip(self.transformer.h, caches):
            x, v = block(x, v, rotary, layer_cache)
        x = self.transformer.ln_f(x)
        logits, loss = None, None
        if targets is not None:
            w = (
                self.lm_head.weight
                if self.s_z is None
                else self.lm_head.weight * self.s_z()[:, None]
            )
            loss = linear_cross_entropy(x.flatten(0, 1), w, targets.flatten())
        if targets is None or return_logits:
            logits = self.lm_head(x if return_logits else x[:, -1:])
            logits = logits if self.s_z is None else logits * self.s_z()
        return logits, loss

    def embed(self, idx, cache):
        """The start of the streams: X_0, V_0 (B, T, C) or None, and the rotary table or None."""
        cfg, table, T = self.cfg, self.transformer, idx.size(1)
        if T > cfg.block_size:
            raise ValueError(f'{T} tokens do not fit block_size={cfg.block_size}')
        pos = cache[0].positions(T, idx.device) if cache else torch.arange(T, device=idx.device)
        x = table.wte(idx)
        v = rotary = None
        if cfg.pos == 'learned':
            x = x + table.wpe(pos)
        else:
            rotary = rotary_table(pos, cfg.n_embd // cfg.n_head, cfg.rope_base, x.dtype)
        if cfg.velocity_init == 'learned':
            v = table.vte(idx) + table.vpe(pos) if 'vpe' in table else table.vte(idx)
            v = F.dropout(v, cfg.dropout, self.training)
        elif cfg.velocity_init == 'zero':
            v = torch.zeros_like(x)
        return F.dropout(x, cfg.dropout, self.training), v, rotary

    def new_cache(self, capacity=None):
        """A list of the layers' empty caches, each for ``capacity`` (block_size) tokens."""
        return [KVCache(capacity or self.cfg.block_size) for _ in range(self.cfg.n_layer)]

    generate = generate
