"""
A GPT whose layer is one step of an optimizer on the token embeddings.

Shapes: B batch, T tokens, C = n_embd, H = n_head, D = C / H, V = vocab_size. Sources. YuriiFormer:
momentum streams on token embeddings, Euler and Lie-Trotter splitting (its appendix fixes the
scalars' parametrization). Momentum Streams, 2026: triple momentum. nGPT: arXiv 2410.01131."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanonag.cli import UserError
from nanonag.configurator import at_least, between
from nanonag.generation import KVCache, generate
from nanonag.loss import linear_cross_entropy

# ---------------------------------------- learned scalars and vectors, norms ----------------------------------------


class Scalar(nn.Module):
    """One learned number kept inside its range; `init` is in natural units, `raw` is what the
    optimizer sees.

    mu, beta = sigmoid(raw) in (0, 1); gamma, nu = softplus(raw) > 0.
    """

    param_kind = 'scalars'
    INIT = {'mu': 0.5, 'beta': 0.5, 'gamma': math.log(2), 'nu': 1.0}  # raw 0, but for nu: ln(e - 1)

    def __init__(self, name, init):
        super().__init__()
        self.fraction = name in ('mu', 'beta')
        self.raw = nn.Parameter(
            torch.full((1,), math.log(init / (1 - init) if self.fraction else math.expm1(init)))
        )

    def forward(self):
        return torch.sigmoid(self.raw) if self.fraction else F.softplus(self.raw)


class Scale(nn.Module):
    """A learned vector s = raw * (init / scale) with raw starting at `scale`, which sets its
    learning speed (nGPT, 2.5)."""

    param_kind = 'scales'

    def __init__(self, size, init=1.0, scale=1.0):
        super().__init__()
        self.ratio = init / scale
        self.raw = nn.Parameter(torch.full((size,), float(scale)))

    def forward(self):
        return self.raw * self.ratio


def inverse_norm(x, dim=-1):
    """1 / ||x||_2 along an axis, kept with size 1; in float32 at least."""
    return (
        torch.linalg.vector_norm(
            x, dim=dim, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        .clamp(min=1e-12)
        .reciprocal()
    )


def retract(x):
    """Norm(x) = x / ||x||_2: back onto the unit sphere (nGPT, section 2.1), in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * inverse_norm(x)  # a product: the gradient of a quotient takes twice the passes


def pre_norm(cfg):
    # the sphere needs no other norm
    return nn.Identity() if cfg.normalized else nn.LayerNorm(cfg.n_embd, bias=cfg.bias)


# ------- update rules: one optimizer step on the stream x and its velocity v, given an oracle for the direction ------


class UpdateRule(nn.Module):
    """forward(x, v, oracle) -> (x, v); x, v: (B, T, C), v None for rules without velocity.

    `oracle` maps a point (B, T, C) to a direction (B, T, C) and is called exactly once. A rule
    knows nothing of attention, caches or splittings. Class attributes declare what it learns and
    needs."""

    scalars = ()  # names among mu, beta, gamma, nu
    uses_velocity = False
    normalized = False  # lives on the unit sphere with nGPT's normalized weights

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


class Sphere(UpdateRule):
    """h' = Norm(h + |alpha| (Norm(G(h)) - h)): nGPT, equations 10 and 11."""

    normalized = True

    def forward(self, x, v, oracle):
        return retract(torch.lerp(x, retract(oracle(x)), self.alpha().abs())), v


class SphereNesterov(UpdateRule):
    """y = Norm(h + mu v);  v' = beta v + |alpha| (Norm(G(y)) - y);  h' = Norm(h + v'). Ours; mu =
    beta = 0 is nGPT."""

    scalars = ('mu', 'beta')
    uses_velocity = True
    normalized = True

    def forward(self, x, v, oracle):
        y = retract(x + self.mu() * v)
        v = self.beta() * v + self.alpha().abs() * (retract(oracle(y)) - y)
        return retract(x + v), v


SCHEMES = {  # update= : (rule, splitting)
    'gd': (GradientDescent, 'lie_trotter'),
    'euler_gd': (GradientDescent, 'euler'),
    'lt_nag': (Nesterov, 'lie_trotter'),
    'euler_nag': (Nesterov, 'euler'),
    'polyak': (Polyak, 'lie_trotter'),
    'euler_polyak': (Polyak, 'euler'),
    'lt_tmm': (TripleMomentum, 'lie_trotter'),
    'ngpt': (Sphere, 'lie_trotter'),
    'ngpt_nag': (SphereNesterov, 'lie_trotter'),
}

# ------------------------------------ the oracles: attention and MLP, and the block ---------------------------------


class Linear(nn.Linear):
    """nn.Linear that knows its weight's (out, in) axis along the embedding, nGPT's unit-norm axis,
    and the matrices stacked in it."""

    def __init__(self, n_in, n_out, bias, embd_axis, stacked=1, param_kind='matrices'):
        super().__init__(n_in, n_out, bias=bias)
        self.embd_axis = embd_axis
        self.stacked = stacked
        self.param_kind = param_kind

    def reset_parameters(self):  # GPT.__init__ draws all weights
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    param_kind = 'embeddings'
    embd_axis = 1

    def reset_parameters(self):
        pass


def rotary_table(pos, dim, base, dtype):
    """cos and sin of pos * base^(-2i / dim), each (T, dim / 2), in float32 at least: bfloat16 can't
    count to 1024."""
    dtype = torch.promote_types(dtype, torch.float32)
    angle = pos[:, None].to(dtype) * base ** (
        -torch.arange(0, dim, 2, device=pos.device, dtype=dtype) / dim
    )
    return angle.cos(), angle.sin()


def rotate(x, rotary):
    """RoPE: turns each interleaved pair (x_2i, x_2i+1) of (B, H, T, D) by its angle (arXiv
    2104.09864)."""
    cos, sin = rotary
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.dropout = cfg.n_head, cfg.dropout
        # q, k, v
        self.c_attn = Linear(cfg.n_embd, 3 * cfg.n_embd, cfg.bias, embd_axis=1, stacked=3)
        self.c_proj = Linear(cfg.n_embd, cfg.n_embd, cfg.bias, embd_axis=0)
        self.s_qk = Scale(cfg.n_embd, scale=cfg.n_embd**-0.5) if cfg.normalized else None
        d_head = cfg.n_embd // cfg.n_head
        # unit q, k: their products have std 1/sqrt(D), not sqrt(D)
        self.scale = d_head ** (0.5 if cfg.normalized else -0.5)

    def forward(self, x, rotary=None, cache=None):
        B, T, C = x.shape
        # (B, H, T, D)
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2)
        )
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.s_qk is not None:
            s_qk = self.s_qk().view(self.n_head, 1, -1)
            q, k = retract(q) * s_qk, retract(k) * s_qk
        # the float32 tables and scales above promote under autocast
        q, k = q.to(v.dtype), k.to(v.dtype)
        mask = None
        if cache is not None:
            k, v, mask = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and k.size(2) == T,
            scale=self.scale,
        )
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """GELU: W_o gelu(W x). SwiGLU: W_o (u * SiLU(v)) with u, v = W_u x, W_v x, stacked in c_fc, u's
    rows first."""

    def __init__(self, cfg):
        super().__init__()
        self.swiglu, self.dropout = cfg.mlp == 'swiglu', cfg.dropout
        n_fc = (8 if self.swiglu else 4) * cfg.n_embd
        self.c_fc = Linear(cfg.n_embd, n_fc, cfg.bias, embd_axis=1)
        self.c_proj = Linear(4 * cfg.n_embd, cfg.n_embd, cfg.bias, embd_axis=0)
        self.s_uv = Scale(n_fc) if cfg.normalized else None

    def forward(self, x):
        h = self.c_fc(x)
        if self.s_uv is not None:
            # sqrt(d): v of unit rows has std 1/sqrt(d); float32 would promote all
            h = h * (self.s_uv() * x.size(-1) ** 0.5).to(h.dtype)
        if self.swiglu:
            u, v = h.chunk(2, dim=-1)
        h = u * F.silu(v) if self.swiglu else F.gelu(h)
        return F.dropout(self.c_proj(h), self.dropout, self.training)


class Block(nn.Module):
    """One layer: the composite objective (attention's energy + MLP's energy) split into substeps of
    one rule."""

    def __init__(self, cfg):
        super().__init__()
        self.ln_1, self.attn = pre_norm(cfg), CausalSelfAttention(cfg)
        self.ln_2, self.mlp = pre_norm(cfg), MLP(cfg)
        rule, self.splitting = SCHEMES[cfg.update]
        if self.splitting == 'lie_trotter':
            self.update_attn, self.update_mlp = rule(cfg), rule(cfg)
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


# ---------------------------------------------- configuration and model ---------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """The architecture. None stands for the scheme's own default (its paper's choice), filled in at
    construction.

    Raises UserError for values out of range, contradictions, and options that the scheme has no use
    for."""

    update: str = 'lt_nag'  # update rule x splitting, one of SCHEMES
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
    # V_0: tables of its own (default; ngpt_nag: zero) or zeros
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
        between(
            self,
            n_layer=(0, 10001),
            mu_init=(0, 1),
            beta_init=(0, 1),
            gamma_init=(0, 80),
            nu_init=(0, 80),
            alpha_init=(0, math.inf),
            rope_base=(0, math.inf),
        )
        if self.update not in SCHEMES:
            raise UserError(
                f'update={self.update!r} is no scheme; choose one of: {", ".join(SCHEMES)}'
            )
        rule, _ = SCHEMES[self.update]
        if rule.normalized:
            options = {
                'velocity_init': ('zero',),
                'pos': ('rope',),
                'mlp': ('swiglu',),
                'tie_weights': (False,),
                'bias': (False,),
                'dropout': (0.0,),
            }
        else:
            options = {
                'velocity_init': ('learned', 'zero'),
                'pos': ('learned', 'rope'),
                'mlp': ('gelu', 'swiglu'),
                'tie_weights': (True, False),
            }
        if not rule.uses_velocity:
            options['velocity_init'] = (None,)
        for name, allowed in options.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, allowed[0])
            elif getattr(self, name) not in allowed:
                raise UserError(
                    f'{name}={getattr(self, name)}: update={self.update} takes {" or ".join(map(str, allowed))}'
                )

        starts = {name: Scalar.INIT[name] for name in rule.scalars} | (
            {'alpha': 0.05} if rule.normalized else {}
        )
        numbers = {f'{name}_init': starts.get(name) for name in (*Scalar.INIT, 'alpha')}
        numbers['rope_base'] = 1e4 if self.pos == 'rope' else None
        for name, default in numbers.items():
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, default)
            elif default is None:
                raise UserError(
                    f'{name}={value} has no effect with update={self.update}, pos={self.pos}; leave it out'
                )

        if self.dropout >= 1:
            raise UserError(f'dropout={self.dropout}: must be below 1')
        if self.n_embd % self.n_head:
            raise UserError(
                f'n_embd={self.n_embd} is not divisible by n_head={self.n_head}; '
                f'the nearest width that is: {max(1, round(self.n_embd / self.n_head)) * self.n_head}'
            )
        if self.pos == 'rope' and self.n_embd // self.n_head % 2:
            raise UserError(
                f'pos=rope rotates pairs, but n_embd={self.n_embd} over n_head={self.n_head} gives heads of odd '
                f'size {self.n_embd // self.n_head}; change either'
            )
        object.__setattr__(self, 'vocab_used', self.vocab_used or self.vocab_size)
        if self.vocab_used > self.vocab_size:
            raise UserError(
                f'vocab_used={self.vocab_used} is more than vocab_size={self.vocab_size}'
            )

    @property
    def normalized(self):
        return SCHEMES[self.update][0].normalized


class GPT(nn.Module):
    """The transformer: embed -> blocks -> norm -> head. State-dict names are nanoGPT's, plus the
    schemes' own."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg

        def table(rows):
            return Embedding(rows, cfg.n_embd)

        parts = {'wte': table(cfg.vocab_size)} | (
            {'wpe': table(cfg.block_size)} if cfg.pos == 'learned' else {}
        )
        parts |= {'h': nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer)), 'ln_f': pre_norm(cfg)}
        if cfg.velocity_init == 'learned':
            parts |= {
                'v' + name[1:]: table(parts[name].num_embeddings)
                for name in ('wte', 'wpe')
                if name in parts
            }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = Linear(
            cfg.n_embd, cfg.vocab_size, bias=False, embd_axis=1, param_kind='embeddings'
        )
        if cfg.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight
        self.s_z = Scale(cfg.vocab_size, scale=cfg.n_embd**-0.5) if cfg.normalized else None
        for name, module in sorted(
            self.named_modules(), key=lambda item: item[0].endswith(('vte', 'vpe'))
        ):
            # velocity last: a seed draws the rest alike for every scheme
            if isinstance(module, (Linear, Embedding)):
                std = cfg.n_embd**-0.5 if cfg.normalized else 0.02
                if name.endswith('c_proj') and not cfg.normalized:
                    # so that 2 n_layer residual contributions add up to 0.02 (GPT-2)
                    std /= math.sqrt(2 * cfg.n_layer)
                nn.init.normal_(module.weight, std=std)
        self.normalize_weights()

    @torch.no_grad()
    def normalize_weights(self):
        """Puts the matrices of a normalized scheme back on the unit sphere; configure_optimizer
        hooks it to each step."""
        if self.cfg.normalized:
            for module in self.modules():
                if isinstance(module, (Linear, Embedding)):
                    module.weight.mul_(inverse_norm(module.weight, module.embd_axis))

    def num_params(self):
        """Trainable parameters, a tied table counted once."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, idx, targets=None, cache=None, return_logits=False):
        """idx, targets: (B, T) int64 -> (logits, loss).

        With targets (-1: ignored), loss is the mean cross-entropy in nats and logits are None;
        without, loss is None and logits are the last position's, (B, 1, V). return_logits=True
        gives those of all positions, (B, T, V), either way. `cache` (new_cache(), a list by layer)
        holds the tokens before idx and takes in idx. Raises ValueError past block_size."""
        T, table, rotary, v = idx.size(1), self.transformer, None, None
        if T > self.cfg.block_size:
            raise ValueError(f'{T} tokens do not fit block_size={self.cfg.block_size}')
        pos = cache[0].positions(T, idx.device) if cache else torch.arange(T, device=idx.device)
        x = table.wte(idx)
        if self.cfg.pos == 'learned':
            x = x + table.wpe(pos)
        else:
            rotary = rotary_table(
                pos, self.cfg.n_embd // self.cfg.n_head, self.cfg.rope_base, x.dtype
            )
        if self.cfg.velocity_init == 'learned':
            v = table.vte(idx) + table.vpe(pos) if 'vpe' in table else table.vte(idx)
            v = F.dropout(v, self.cfg.dropout, self.training)
        elif self.cfg.velocity_init == 'zero':
            v = torch.zeros_like(x)
        x = F.dropout(x, self.cfg.dropout, self.training)
        for i, block in enumerate(table.h):
            x, v = block(x, v, rotary, cache[i] if cache else None)
        x = table.ln_f(x)
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

    def new_cache(self, capacity=None):
        return [KVCache(capacity or self.cfg.block_size) for _ in range(self.cfg.n_layer)]

    generate = generate

    @classmethod
    def from_pretrained(cls, name, **overrides):
        """OpenAI's weights (gpt2, ..., gpt2-xl, or a folder) in update='gd'; overrides: GPTConfig
        fields. Needs transformers."""
        from transformers import GPT2LMHeadModel

        source = GPT2LMHeadModel.from_pretrained(name)
        hf = source.config
        model = cls(
            GPTConfig(
                **dict(
                    update='gd',
                    n_layer=hf.n_layer,
                    n_head=hf.n_head,
                    n_embd=hf.n_embd,
                    bias=True,
                    vocab_size=hf.vocab_size,
                    block_size=hf.n_positions,
                )
                | overrides
            )
        )
        # its Conv1D
        weights = {
            name: w.t() if name.endswith(('c_attn.weight', 'c_proj.weight', 'c_fc.weight')) else w
            for name, w in source.state_dict().items()
            if name in model.state_dict()
        }
        model.load_state_dict(weights)
        return model
