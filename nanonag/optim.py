"""Optimizer and learning-rate schedule: which parameter goes to which optimizer, at what rate, with
what decay."""

import math
import re

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor


def route(model):
    """{kind: {name: parameter}}: every parameter of the model in exactly one kind.

    The module that owns a parameter declares its kind as `param_kind`; biases and torch's own
    LayerNorm are norms. matrices: the weights inside the layers (Muon's, if it is used).
    embeddings: the tables and the head. norms: LayerNorms and biases. scalars: mu, beta, gamma, nu.
    scales: nGPT's alpha and s vectors.

    Raises ValueError naming the parameters of modules that declare no kind.
    """
    kinds = {kind: {} for kind in ('matrices', 'embeddings', 'norms', 'scalars', 'scales')}
    seen, unknown = set(), []
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            if p in seen:  # a tied head is the token table
                continue
            seen.add(p)
            if isinstance(module, nn.LayerNorm) or name.endswith('.bias'):
                kinds['norms'][name] = p
            elif getattr(module, 'param_kind', None) in kinds:
                kinds[module.param_kind][name] = p
            else:
                unknown.append(name)
    if unknown:
        raise ValueError(
            f'no optimizer rule for {", ".join(unknown)}: the modules that own them need a '
            f'param_kind, one of {", ".join(kinds)}'
        )
    return {kind: params for kind, params in kinds.items() if params}


class Muon(torch.optim.Muon):
    """torch.optim.Muon, step for step, and what it lacks for comparable runs on any number of
    processes:

    - `dtype` of the Newton-Schulz matmuls. bfloat16 (torch's) turns the last-bit differences
    between world sizes into
      differences of 0.4 % in single entries; float32 keeps them small.
    - a group's `blocks`: matrices stacked in its parameters (q, k, v in c_attn) are orthogonalized
    each by itself.
    - sharded parameters (DTensor): a matrix is put together on one rank, orthogonalized there, and
    dealt out again."""

    def __init__(self, params, dtype=torch.bfloat16, **options):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            for p, update in zip(params, self.orthogonalized(params, group)):
                p.mul_(1 - group['lr'] * group['weight_decay'])
                rows, columns = p.size(0) / group['blocks'], p.size(1)
                # adjust_lr_fn='original'
                p.add_(update, alpha=-group['lr'] * math.sqrt(max(1, rows / columns)))

    def nesterov(self, p, momentum):
        state = self.state[p]
        if not state:
            state['momentum_buffer'] = torch.zeros_like(p)
        return p.grad.lerp(state['momentum_buffer'].lerp_(p.grad, 1 - momentum), momentum)

    def orthogonalized(self, params, group):
        """Yields the parameters' updates, orthogonalized block by block; sharded ones in rounds of
        one matrix a rank."""

        def orthogonal(matrix):
            return torch.cat(
                [
                    orthogonalize(
                        block, self.dtype, group['ns_coefficients'], group['ns_steps'], group['eps']
                    )
                    for block in matrix.chunk(group['blocks'])
                ]
            )

        if not params or not isinstance(params[0], DTensor):
            yield from (orthogonal(self.nesterov(p, group['momentum'])) for p in params)
            return
        mesh = params[0].device_mesh
        for i in range(0, len(params), mesh.size()):
            turn = [self.nesterov(p, group['momentum']) for p in params[i : i + mesh.size()]]
            # every rank needs to take part in each
            full = [update.full_tensor() for update in turn]
            mine = mesh.get_local_rank()
            if mine < len(turn):
                full[mine] = orthogonal(full[mine]).to(turn[mine].dtype)
            for owner, (update, matrix) in enumerate(zip(turn, full)):
                yield distribute_tensor(matrix, mesh, update.placements, src_data_rank=owner)


def orthogonalize(matrix, dtype, coefficients, steps, eps):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix: every singular value to
    about 1 (Jordan, 2024)."""
    a, b, c = coefficients
    wide = matrix.size(0) <= matrix.size(1)
    # the Gram matrix of the shorter side is the smaller one
    x = (matrix if wide else matrix.T).to(dtype)
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class JointOptimizer:
    """Several torch optimizers that act as one. Its state is keyed by parameter names, so that it
    outlives a regrouping and does not depend on how many ranks share it."""

    def __init__(self, optimizers, names):
        self.optimizers, self.names = optimizers, names  # names: {parameter: name}
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups = [{'params': list(names)}]  # what GradScaler.unscale_ asks for
        for group in self.groups:
            group['peak_lr'] = group['lr']
        shared = any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in optimizers)
        # states meet in main memory, not on rank 0's GPU
        self.gloo = dist.new_group(backend='gloo') if shared else None

    def set_lr(self, multiplier):
        """Every group's rate = its own peak rate x the schedule's multiplier."""
        for group in self.groups:
            group['lr'] = group['peak_lr'] * multiplier

    def lr(self):
        """{kind: the rate now}."""
        return {group['kind']: group['lr'] for group in self.groups}

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def local_states(self):
        """(optimizer state by parameter, parameters) of each part, as far as this rank holds it."""
        for optimizer in self.optimizers:
            # ZeroRedundancyOptimizer's own share
            optimizer = getattr(optimizer, 'optim', optimizer)
            yield optimizer.state, [p for group in optimizer.param_groups for p in group['params']]

    def state_dict(self, gather=True):
        """{parameter name: {state name: tensor}}, whole on rank 0; with gather=False sharded
        tensors (DTensor) as they are.

        All ranks must take part if they share the work.
        """
        state = {
            self.names[p]: {
                key: gathered(value) if gather else value for key, value in of[p].items()
            }
            for of, params in self.local_states()
            for p in params
            if p in of
        }
        if self.gloo is not None:
            state = {
                name: {key: value.cpu() for key, value in values.items()}
                for name, values in state.items()
            }
            shares = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(state, shares, group=self.gloo)
            for share in shares or ():
                state |= share
        return state

    def load_state_dict(self, state):
        """Takes a state_dict in, zeros for None (shards, to be filled). Raises ValueError if names,
        kinds or shapes differ: the state of other parameters continues another run."""
        if state and state.keys() != set(self.names.values()):
            raise ValueError(
                f'optimizer state of other parameters: {", ".join(sorted(state.keys() ^ set(self.names.values()))[:5])}'
            )
        for optimizer, (of, params) in zip(self.optimizers, self.local_states()):
            kinds = (
                {'momentum_buffer'}
                if isinstance(getattr(optimizer, 'optim', optimizer), Muon)
                else {'step', 'exp_avg', 'exp_avg_sq'}
            )
            for p in params:
                if self.names[p] in state:
                    held = state[self.names[p]]
                    if held.keys() != kinds or not all(
                        value is None
                        and key != 'step'
                        or torch.is_tensor(value)
                        and value.dtype == torch.float32
                        and value.shape == (() if key == 'step' else p.shape)
                        for key, value in held.items()
                    ):
                        raise ValueError(f'optimizer state that does not fit {self.names[p]}')
                    of[p] = {key: like(value, p) for key, value in held.items()}


def gathered(value):
    """A sharded tensor put together in rank 0's main memory (all ranks must take part), any other
    as it is."""
    if not isinstance(value, DTensor):
        return value
    value = value.full_tensor()
    return value.cpu() if dist.get_rank() == 0 else None


def like(value, p):
    """A copy of a whole tensor placed as the parameter is: on its device, and sharded as it is, but
    for single numbers."""
    if value is None:
        return torch.zeros_like(p)
    value = value.to(p.device, copy=True)
    sharded = isinstance(p, DTensor) and value.dim()
    return (
        distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
        if sharded
        else value
    )


def configure_optimizer(model, cfg, dtype=torch.float32):
    """The optimizer of `cfg` (a resolved TrainConfig) over all parameters of `model` (GPT), grouped
    as in the papers.

    dtype: of Muon's matmuls. model.normalize_weights() is hooked to the step, so that no training
    loop can forget it. With cfg.zero each rank keeps and updates a share and broadcasts it (ZeRO
    stage 1, arXiv 1910.02054)."""
    kinds, rate, decay = route(model), cfg.learning_rate, cfg.weight_decay
    muon, adamw = [], []
    groups = {  # kind: (optimizer, peak lr, weight decay)
        'matrices': (adamw, rate, decay),
        'embeddings': (adamw, rate, decay),
        'norms': (adamw, rate, 0.0),
        'scalars': (adamw, rate * cfg.scalar_lr_mult, 0.0),
        'scales': (adamw, rate, 0.0),
    }
    if cfg.optimizer == 'muon':
        groups['matrices'] = (muon, cfg.muon_lr, cfg.muon_weight_decay)
    stacked = {
        module.weight: module.stacked
        for module in model.modules()
        if hasattr(module, 'stacked') and cfg.muon_qkv == 'split'
    }
    for kind, params in kinds.items():
        group, lr, wd = groups[kind]
        for blocks in sorted({stacked.get(p, 1) for p in params.values()}):
            chosen = [p for p in params.values() if stacked.get(p, 1) == blocks]
            group.append(
                {'params': chosen, 'kind': kind, 'lr': lr, 'weight_decay': wd, 'blocks': blocks}
            )

    def make(cls, groups, **options):
        if cfg.zero:
            return ZeroRedundancyOptimizer(groups, optimizer_class=cls, **options)
        return cls(groups, **options)

    optimizers = []
    if muon:
        # float16's range is too small for it
        dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        optimizers.append(make(Muon, muon, momentum=cfg.muon_momentum, dtype=dtype))
    optimizers.append(make(torch.optim.AdamW, adamw, betas=(cfg.beta1, cfg.beta2), fused=True))
    optimizers[-1].register_step_post_hook(lambda *_: model.normalize_weights())
    return JointOptimizer(
        optimizers, {p: name for params in kinds.values() for name, p in params.items()}
    )


def describe(optimizer):
    """The routing as a table, a line for each parameter name and shape, the layers folded into
    `h.*`."""
    rows = {}
    for one in optimizer.optimizers:
        name = type(getattr(one, 'optim', one)).__name__
        for group in one.param_groups:
            for p in group['params']:
                key = (
                    re.sub(r'\.h\.\d+\.', '.h.*.', optimizer.names[p]),
                    str(tuple(p.shape)),
                    name,
                    group['kind'],
                    f'{group["peak_lr"]:g}',
                    f'{group["weight_decay"]:g}',
                )
                rows[key] = rows.get(key, 0) + 1
    head = ('parameter', 'shape', 'optimizer', 'kind', 'peak lr', 'decay', 'tensors')
    table = [head] + [(*key, str(count)) for key, count in rows.items()]
    widths = [max(map(len, column)) for column in zip(*table)]
    return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in table)


def lr_multiplier(step, cfg):
    """The share of its peak rate at which the update number `step` (from 0) is made.

    decay_lr=False: always 1, as in nanoGPT. Linear warmup: (step + 1) / (warmup_iters + 1), so no
    step has rate 0. Then 'cosine': half a cosine from 1 to min_lr / learning_rate at
    lr_decay_iters; 'wsd': 1, and a straight line down over the last wsd_decay of the run."""
    if not cfg.decay_lr:
        return 1.0
    if step < cfg.warmup_iters:
        return (step + 1) / (cfg.warmup_iters + 1)
    start = cfg.warmup_iters
    if cfg.schedule == 'wsd':
        start = max(start, cfg.lr_decay_iters - round(cfg.wsd_decay * cfg.lr_decay_iters))
    progress = min(1.0, max(0.0, (step - start) / max(1, cfg.lr_decay_iters - start)))
    height = 1 - progress if cfg.schedule == 'wsd' else 0.5 * (1 + math.cos(math.pi * progress))
    floor = cfg.min_lr / cfg.learning_rate
    return floor + (1 - floor) * height
