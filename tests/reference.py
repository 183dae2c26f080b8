"""The models' equations once more, written for checking and not for speed: float64, one head, one
position at a time.

Nothing here imports model.py. Everything is driven by a state dict (name -> float64 tensor) and a
config, so that the two programs share names and numbers only. Symbols are the papers': X, V (B, T,
d); A, M the two oracles; L layers, H heads of size C = d / H. A scheme of model.py that SCHEMES
does not list fails the tests: its equation belongs into `step`."""

import math

import torch

SCHEMES = {  # update -> (step, splitting)
    'gd': ('gd', 'lie_trotter'),
    'euler_gd': ('gd', 'euler'),
    'lt_nag': ('nag', 'lie_trotter'),
    'euler_nag': ('nag', 'euler'),
    'polyak': ('polyak', 'lie_trotter'),
    'euler_polyak': ('polyak', 'euler'),
    'lt_tmm': ('tmm', 'lie_trotter'),
    'ngpt': ('sphere', 'lie_trotter'),
    'ngpt_nag': ('sphere_nag', 'lie_trotter'),
}


def scheme(update):
    """(step, splitting) of a scheme; fails for one that has no equation here."""
    assert update in SCHEMES, f'{update}: add its equation to tests/reference.py'
    return SCHEMES[update]


# ---- the functions the equations are made of -----------------------------------------------------


def sigmoid(raw):
    return 1 / (1 + torch.exp(-raw))


def softplus(raw):
    return torch.log(1 + torch.exp(raw))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    """The exact one: x times the standard normal distribution function."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def unit(x):
    """Norm(x) = x / ||x||_2 over the last dimension."""
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def layer_norm(x, gain, bias=None):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    return y if bias is None else y + bias


def rotate(x, base):
    """x (B, T, C): the pair (x_2i, x_2i+1) at position t turns by the angle t / base^(2i/C)."""
    B, T, C = x.shape
    columns = []
    for i in range(C // 2):
        angle = torch.arange(T, dtype=torch.float64) / base ** (2 * i / C)
        a, b = x[:, :, 2 * i], x[:, :, 2 * i + 1]
        columns += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.stack(columns, dim=-1)


# ---- the two oracles -----------------------------------------------------------------------------


def linear(state, name, x):
    y = x @ state[name + '.weight'].T
    return y + state[name + '.bias'] if name + '.bias' in state else y


def pre_norm(state, name, x):
    return layer_norm(x, state[name + '.weight'], state.get(name + '.bias'))


def attention(state, cfg, layer, x, sphere):
    """Causal multi-head attention of x (B, T, d), without its pre-norm."""
    name = f'transformer.h.{layer}.attn'
    B, T, d = x.shape
    C = d // cfg.n_head
    qkv = linear(state, name + '.c_attn', x)
    heads = []
    for h in range(cfg.n_head):
        q, k, v = (qkv[:, :, part * d + h * C : part * d + (h + 1) * C] for part in range(3))
        if cfg.pos == 'rope':
            q, k = rotate(q, cfg.rope_base), rotate(k, cfg.rope_base)
        if sphere:
            # init / scale, init = 1
            s_qk = state[name + '.s_qk.raw'].reshape(-1)[h * C : (h + 1) * C] * math.sqrt(d)
            q, k = unit(q) * s_qk, unit(k) * s_qk
        scale = math.sqrt(C) if sphere else 1 / math.sqrt(C)
        out = []
        for t in range(T):  # position t sees 0..t and nothing else
            scores = scale * (k[:, : t + 1] * q[:, t : t + 1]).sum(-1)  # (B, t + 1)
            weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
            weights = weights / weights.sum(-1, keepdim=True)
            out.append((weights[:, :, None] * v[:, : t + 1]).sum(1))
        heads.append(torch.stack(out, dim=1))
    return linear(state, name + '.c_proj', torch.cat(heads, dim=-1))


def mlp(state, cfg, layer, x, sphere):
    """The MLP of x (B, T, d), without its pre-norm."""
    name = f'transformer.h.{layer}.mlp'
    hidden = linear(state, name + '.c_fc', x)
    if cfg.mlp == 'gelu':
        return linear(state, name + '.c_proj', gelu(hidden))
    n = hidden.shape[-1] // 2
    u, v = hidden[:, :, :n], hidden[:, :, n:]  # u's rows come first
    if sphere:
        s_uv = state[name + '.s_uv.raw'].reshape(-1)
        u, v = u * s_uv[:n], v * s_uv[n:] * math.sqrt(x.shape[-1])
    return linear(state, name + '.c_proj', u * silu(v))


def oracles(state, cfg, layer, sphere):
    """A and M of a layer: attention and MLP, each after its pre-norm, which the sphere lacks."""
    name = f'transformer.h.{layer}'

    def A(y):
        return attention(
            state, cfg, layer, y if sphere else pre_norm(state, name + '.ln_1', y), sphere
        )

    def M(y):
        return mlp(state, cfg, layer, y if sphere else pre_norm(state, name + '.ln_2', y), sphere)

    return A, M


def total(A, M):
    return lambda y: A(y) + M(y)


# ---- one optimizer step --------------------------------------------------------------------------


def step(kind, state, cfg, name, x, v, G):
    """(x, v) -> (x', v') by the rule `kind`, whose parameters are under `name`; G is the oracle."""

    def raw(scalar):
        return state[f'{name}.{scalar}.raw']

    if kind == 'gd':
        return x + G(x), v
    if kind == 'sphere':
        alpha = abs(raw('alpha')) * cfg.alpha_init * math.sqrt(x.shape[-1])
        return unit(x + alpha * (unit(G(x)) - x)), v
    if kind == 'sphere_nag':
        alpha = abs(raw('alpha')) * cfg.alpha_init * math.sqrt(x.shape[-1])
        y = unit(x + sigmoid(raw('mu')) * v)
        v = sigmoid(raw('beta')) * v + alpha * (unit(G(y)) - y)
        return unit(x + v), v
    y = x if kind == 'polyak' else x + sigmoid(raw('mu')) * v
    v = layer_norm(
        sigmoid(raw('beta')) * v + softplus(raw('gamma')) * G(y), state[name + '.norm_v.weight']
    )
    return x + (softplus(raw('nu')) * v if kind == 'tmm' else v), v


# ---- the whole model -----------------------------------------------------------------------------


def logits(state, cfg, idx):
    """Logits (B, T, vocabulary) of every position of idx (B, T)."""
    kind, splitting = scheme(cfg.update)
    sphere = kind in ('sphere', 'sphere_nag')
    T = idx.shape[1]

    x = state['transformer.wte.weight'][idx]
    v = torch.zeros_like(x)
    if cfg.velocity_init == 'learned':
        v = state['transformer.vte.weight'][idx]
    if cfg.pos == 'learned':
        x = x + state['transformer.wpe.weight'][:T]
        if cfg.velocity_init == 'learned':
            v = v + state['transformer.vpe.weight'][:T]

    for layer in range(cfg.n_layer):
        name = f'transformer.h.{layer}'
        A, M = oracles(state, cfg, layer, sphere)
        if splitting == 'lie_trotter':
            x, v = step(kind, state, cfg, name + '.update_attn', x, v, A)
            x, v = step(kind, state, cfg, name + '.update_mlp', x, v, M)
        else:
            x, v = step(kind, state, cfg, name + '.update', x, v, total(A, M))

    if not sphere:
        x = pre_norm(state, 'transformer.ln_f', x)
    head = state['transformer.wte.weight'] if cfg.tie_weights else state['lm_head.weight']
    z = x @ head.T
    return z * state['s_z.raw'] * math.sqrt(cfg.n_embd) if sphere else z


def loss(state, cfg, idx, targets):
    """Mean negative log likelihood in nats of the targets (B, T) that are not -1."""
    z = logits(state, cfg, idx)
    log_p = z - torch.logsumexp(z, dim=-1, keepdim=True)
    counted = [
        (b, t, y) for b, row in enumerate(targets.tolist()) for t, y in enumerate(row) if y != -1
    ]
    return -sum(log_p[b, t, y] for b, t, y in counted) / len(counted)
