"""The optimizer and the learning-rate schedule: which parameter gets which rate and decay."""

import collections
import math
import re

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor

from nanonag.report import table

KINDS = ('matrices', 'embeddings', 'norms', 'scalars', 'scales')


def route(model):
    """{kind: {name: parameter}}: every parameter of the model in exactly one kind.

    The module that owns a parameter declares its kind as `param_kind`; biases and torch's own
    LayerNorm are norms. matrices: the weights inside the layers (Muon's, if it is used).
    embeddings: the tables and the head. norms: LayerNorms and biases. scalars: mu, beta, gamma, nu.
    scales: nGPT's alpha and s vectors.

    Raises ValueError naming the parameters of modules that declare no kind.
    """
    kinds: dict[str, dict] = {kind: {} for kind in KINDS}
    seen = set()
    unknown = []
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
            f'param_kind, one of {", ".join(KINDS)}'
        )
    return {kind: params for kind, params in kinds.items() if params}


class Muon(torch.optim.Muon):
    """torch.optim.Muon, with the same result, and what comparable runs need besides.

    - ``dtype`` of the Newton-Schulz matmuls. In bfloat16 (torch's) the differences in the last bit
      between world sizes become 0.4 % in single entries; in float32 they stay small.
    - A group's ``blocks``: the number of matrices stacked in its parameters (q, k, v in c_attn),
      each orthogonalized by itself.
    - Sharded parameters (DTensor): a matrix is gathered on one rank, orthogonalized there, and
      distributed again.
    """

    def __init__(self, params, dtype=torch.bfloat16, **options):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            for p, direction in zip(params, self.directions(params, group)):
                p.mul_(1 - group['lr'] * group['weight_decay'])
                rows, columns = p.size(0) / group['blocks'], p.size(1)
                scale = math.sqrt(max(1, rows / columns))  # adjust_lr_fn='original'
                p.add_(direction, alpha=-group['lr'] * scale)

    def momentum(self, p, momentum):
        """The parameter's gradient with Nesterov's momentum; its buffer moves on."""
        state = self.state[p]
        if not state:
            state['momentum_buffer'] = torch.zeros_like(p)
        buffer = state['momentum_buffer'].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)

    def directions(self, params, group):
        """Yields the orthogonalized momentum of each parameter."""
        if not params or not isinstance(params[0], DTensor):
            for p in params:
                yield self.orthogonal(self.momentum(p, group['momentum']), group)
            return
        mesh = params[0].device_mesh
        rank = mesh.get_local_rank()
        for i in range(0, len(params), mesh.size()):  # in each round every rank has one matrix
            sharded = [self.momentum(p, group['momentum']) for p in params[i : i + mesh.size()]]
            matrices = [matrix.full_tensor() for matrix in sharded]  # a collective for each
            if rank < len(sharded):
                orthogonal = self.orthogonal(matrices[rank], group)
                matrices[rank] = orthogonal.to(sharded[rank].dtype)
            for owner, matrix in enumerate(matrices):
                placements = sharded[owner].placements
                yield distribute_tensor(matrix, mesh, placements, src_data_rank=owner)

    def orthogonal(self, matrix, group):
        """Each block of the matrix orthogonalized."""
        options = (self.dtype, group['ns_coefficients'], group['ns_steps'], group['eps'])
        return torch.cat([orthogonalize(b, *options) for b in matrix.chunk(group['blocks'])])


def orthogonalize(matrix, dtype, coefficients, steps, eps):
    """Moves every singular value of a matrix to about 1, by Newton-Schulz iteration (Jordan, 2024).

    Args:
        matrix: (rows, columns).
        dtype: of the matmuls and of the result.
        coefficients: a, b, c of the polynomial a X + b (X X^T) X + c (X X^T)^2 X.
        steps: iterations.
        eps: the smallest norm to divide by.
    """
    a, b, c = coefficients
    wide = matrix.size(0) <= matrix.size(1)
    x = (matrix if wide else matrix.T).to(dtype)  # of the two Gram matrices the smaller one
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class JointOptimizer:
    """Several torch optimizers that act as one.

    Its state is keyed by parameter names, so it does not depend on how parameters are grouped or
    on how many ranks share the work.

    Args:
        optimizers: torch optimizers, or ZeroRedundancyOptimizers around them.
        names: {parameter: name} of all parameters.
    """

    def __init__(self, optimizers, names):
        self.optimizers = optimizers
        self.names = names
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups = [{'params': list(names)}]  # what GradScaler.unscale_ reads
        for group in self.groups:
            group['peak_lr'] = group['lr']
        shared = any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in optimizers)
        # states are gathered in main memory, not on rank 0's GPU
        self.gloo = dist.new_group(backend='gloo') if shared else None

    def set_lr(self, multiplier):
        """Sets every group's rate to its own peak rate times the schedule's multiplier."""
        for group in self.groups:
            group['lr'] = group['peak_lr'] * multiplier

    def lr(self):
        """{kind of parameter: its present rate}."""
        return {group['kind']: group['lr'] for group in self.groups}

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def local_optimizers(self):
        """The torch optimizers, with the share of the parameters that this rank updates."""
        return [getattr(optimizer, 'optim', optimizer) for optimizer in self.optimizers]

    def state_dict(self, gather=True):
        """{parameter name: {state name: tensor}}; every rank must call it.

        Whole on rank 0; with ``gather=False`` sharded tensors (DTensor) stay as they are.
        """
        states = {}
        for optimizer in self.local_optimizers():
            params = [p for group in optimizer.param_groups for p in group['params']]
            for p in params:
                if p not in optimizer.state:
                    continue
                values = optimizer.state[p]
                if gather:
                    values = {key: gathered(value) for key, value in values.items()}
                states[self.names[p]] = dict(values)
        if self.gloo is None:
            return states
        for name, values in states.items():
            states[name] = {key: value.cpu() for key, value in values.items()}
        shares: list = [{}] * dist.get_world_size()
        is_main = dist.get_rank() == 0
        dist.gather_object(states, shares if is_main else None, group=self.gloo)
        for share in shares:
            states |= share
        return states

    def load_state_dict(self, states):
        """Takes in a :meth:`state_dict`, of which this rank keeps its share.

        A tensor that is None becomes zeros, to be filled from shards. Raises ValueError if names,
        kinds or shapes are those of other parameters: their state would continue another run.
        """
        others = states.keys() ^ set(self.names.values())
        if states and others:
            raise ValueError(
                f'optimizer state of other parameters: {", ".join(sorted(others)[:5])}'
            )
        for optimizer in self.local_optimizers():
            for group in optimizer.param_groups:
                for p in group['params']:
                    name = self.names[p]
                    if name not in states:
                        continue
                    if not fits(states[name], p, optimizer):
                        raise ValueError(f'optimizer state that does not fit {name}')
                    values = {key: placed_like(value, p) for key, value in states[name].items()}
                    optimizer.state[p] = values


def fits(values, p, optimizer):
    """Whether {state name: tensor or None} can be the optimizer's state of a parameter."""
    adamw = {'step', 'exp_avg', 'exp_avg_sq'}
    expected = {'momentum_buffer'} if isinstance(optimizer, Muon) else adamw
    if values.keys() != expected:
        return False
    for key, value in values.items():
        if value is None and key != 'step':
            continue
        shape = () if key == 'step' else p.shape
        is_float32 = torch.is_tensor(value) and value.dtype == torch.float32
        if not is_float32 or value.shape != shape:
            return False
    return True


def gathered(value):
    """A sharded tensor made whole in rank 0's main memory, None on other ranks; others unchanged.

    Every rank must call it.
    """
    if not isinstance(value, DTensor):
        return value
    value = value.full_tensor()
    return value.cpu() if dist.get_rank() == 0 else None


def placed_like(value, p):
    """A copy of a whole tensor on the parameter's device, sharded as it is; None gives zeros."""
    if value is None:
        return torch.zeros_like(p)
    value = value.to(p.device, copy=True)
    if isinstance(p, DTensor) and value.dim() > 0:
        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
    return value


def configure_optimizer(model, cfg, dtype=torch.float32):
    """The optimizer of all parameters of a model, grouped as in the papers.

    A hook calls model.normalize_weights() after each step, so that no training loop can omit it.

    Args:
        model: a module whose parameters :func:`route` can sort, with normalize_weights().
        cfg: a resolved TrainConfig. With cfg.zero each rank keeps and updates a share of the
            parameters and broadcasts it (ZeRO stage 1, arXiv 1910.02054).
        dtype: of Muon's matmuls; bfloat16 in place of float16, whose range is too small for it.

    Returns:
        A :class:`JointOptimizer`.
    """
    kinds = route(model)
    muon: list[dict] = []
    adamw: list[dict] = []
    for kind, (lr, decay) in rates(cfg).items():
        groups = muon if kind == 'matrices' and cfg.optimizer == 'muon' else adamw
        for blocks, params in by_blocks(model, kinds.get(kind, {}), cfg).items():
            group = {'params': params, 'kind': kind, 'lr': lr, 'weight_decay': decay}
            groups.append(group | {'blocks': blocks})

    def make(cls, groups, **options):
        if cfg.zero:
            return ZeroRedundancyOptimizer(groups, optimizer_class=cls, **options)
        return cls(groups, **options)

    optimizers = []
    if muon:
        dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        optimizers.append(make(Muon, muon, momentum=cfg.muon_momentum, dtype=dtype))
    optimizers.append(make(torch.optim.AdamW, adamw, betas=(cfg.beta1, cfg.beta2), fused=True))
    optimizers[-1].register_step_post_hook(lambda *_: model.normalize_weights())
    names = {p: name for params in kinds.values() for name, p in params.items()}
    return JointOptimizer(optimizers, names)


def rates(cfg):
    """{kind of parameter: (peak learning rate, weight decay)}."""
    matrices = (cfg.learning_rate, cfg.weight_decay)
    if cfg.optimizer == 'muon':
        matrices = (cfg.muon_lr, cfg.muon_weight_decay)
    return {
        'matrices': matrices,
        'embeddings': (cfg.learning_rate, cfg.weight_decay),
        'norms': (cfg.learning_rate, 0.0),
        'scalars': (cfg.learning_rate * cfg.scalar_lr_mult, 0.0),
        'scales': (cfg.learning_rate, 0.0),
    }


def by_blocks(model, params, cfg):
    """{number of matrices that Muon separates in a parameter: parameters}, in ascending order."""
    stacked = {}
    if cfg.muon_qkv == 'split':
        stacked = {m.weight: m.stacked for m in model.modules() if hasattr(m, 'stacked')}
    groups: dict[int, list] = {}
    for p in params.values():
        groups.setdefault(stacked.get(p, 1), []).append(p)
    return dict(sorted(groups.items()))


def describe(optimizer):
    """The routing as a table, one line per name and shape, the layers' names folded to ``h.*``."""
    counts: collections.Counter = collections.Counter()
    for torch_optimizer in optimizer.optimizers:
        kind_of_optimizer = type(getattr(torch_optimizer, 'optim', torch_optimizer)).__name__
        for group in torch_optimizer.param_groups:
            for p in group['params']:
                name = re.sub(r'\.h\.\d+\.', '.h.*.', optimizer.names[p])
                lr, decay = f'{group["peak_lr"]:g}', f'{group["weight_decay"]:g}'
                shape = str(tuple(p.shape))
                counts[name, shape, kind_of_optimizer, group['kind'], lr, decay] += 1
    head = ('parameter', 'shape', 'optimizer', 'kind', 'peak lr', 'decay', 'tensors')
    return table([head, *((*key, str(count)) for key, count in counts.items())])


def lr_multiplier(step, cfg):
    """The share of its peak rate with which the optimizer makes step number ``step`` (from 0).

    Linear warmup: (step + 1) / (warmup_iters + 1), so that no step has rate 0. Then 'cosine': half
    a cosine from 1 to min_lr / learning_rate at lr_decay_iters; 'wsd': 1, and a straight line down
    over the last share wsd_decay of lr_decay_iters. With decay_lr=False always 1, as in nanoGPT.
    """
    if not cfg.decay_lr:
        return 1.0
    if step < cfg.warmup_iters:
        return (step + 1) / (cfg.warmup_iters + 1)
    start = cfg.warmup_iters
    if cfg.schedule == 'wsd':
        start = max(start, cfg.lr_decay_iters - round(cfg.wsd_decay * cfg.lr_decay_iters))
    progress = min(1.0, max(0.0, (step - start) / max(1, cfg.lr_decay_iters - start)))
    if cfg.schedule == 'wsd':
        height = 1 - progress
    else:
        height = 0.5 * (1 + math.cos(math.pi * progress))
    floor = cfg.min_lr / cfg.learning_rate
    return floor + (1 - floor) * height
