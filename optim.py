"""Optimizer and learning-rate schedule: which parameter goes to which optimizer, at what rate, with what decay."""
import math
import re

import torch
import torch.nn as nn

from model import Embedding, Linear, Scalar, Scale


def route(model):
    """{kind: {name: parameter}}, by the type of the module that owns a parameter; every parameter in exactly one kind.

    matrices: Linear weights inside the layers (Muon's, if it is used). embeddings: the tables and the head.
    norms: LayerNorms and biases. scalars: mu, beta, gamma, nu. scales: nGPT's alpha and s vectors.
    Raises ValueError naming the parameters of a module type that no rule covers.
    """
    kinds = {kind: {} for kind in ('matrices', 'embeddings', 'norms', 'scalars', 'scales')}
    in_layers, seen, unknown = set(model.transformer.h.modules()), set(), []
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            if p in seen:  # a tied head is the token table
                continue
            seen.add(p)
            match module:
                case nn.LayerNorm(): kind = 'norms'
                case Linear() if name.endswith('.bias'): kind = 'norms'
                case Linear() if module in in_layers: kind = 'matrices'
                case Linear() | Embedding(): kind = 'embeddings'
                case Scalar(): kind = 'scalars'
                case Scale(): kind = 'scales'
                case _: unknown.append(name); continue
            kinds[kind][name] = p
    if unknown:
        raise ValueError(f'no optimizer rule for {", ".join(unknown)}: give their module types one in optim.route')
    return {kind: params for kind, params in kinds.items() if params}


class SplitMuon(torch.optim.Muon):
    """Muon that takes each c_attn as the three matrices W_q, W_k, W_v stacked in it and orthogonalizes each by itself.

    Its parameters are views of the model's, their gradients views of the model's gradients, hung on before each step.
    """

    def __init__(self, named_params, **options):
        self.views = []
        for name, p in named_params:
            n = 3 if name.endswith('c_attn.weight') else 1
            self.views += [(f'{name}.{part}' if n > 1 else name, p, i, n) for i, part in zip(range(n), 'qkv')]
        super().__init__([(name, nn.Parameter(p.detach().chunk(n)[i])) for name, p, i, n in self.views], **options)

    @torch.no_grad()
    def step(self, closure=None):
        for view, (_, p, i, n) in zip(self.param_groups[0]['params'], self.views):
            view.grad = None if p.grad is None else p.grad.chunk(n)[i]
        super().step(closure)


class JointOptimizer:
    """Several torch optimizers that act as one; its state is keyed by parameter names, so it outlives a regrouping."""

    def __init__(self, optimizers, params):
        self.optimizers = optimizers
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups = [{'params': params}]  # the model's own, whose gradients GradScaler unscales

    def set_lr(self, multiplier):
        """Every group's rate = its own peak rate x the schedule's multiplier."""
        for group in self.groups:
            group['lr'] = group['peak_lr'] * multiplier

    def lr(self, kind):
        return next(group['lr'] for group in self.groups if group['kind'] == kind)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def named_params(self):
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, p in zip(group['param_names'], group['params']):
                    yield name, p, optimizer

    def state_dict(self):
        return {name: dict(optimizer.state[p]) for name, p, optimizer in self.named_params() if p in optimizer.state}

    def load_state_dict(self, state):
        """Raises ValueError if the names differ: the state of other parameters continues another run."""
        names = {name for name, _, _ in self.named_params()}
        if state and state.keys() != names:
            raise ValueError(f'optimizer state for other parameters: {", ".join(sorted(state.keys() ^ names)[:5])} ...')
        for name, p, optimizer in self.named_params():
            if name in state:
                optimizer.state[p] = {key: value.to(p.device) if value.dim() else value.clone()
                                      for key, value in state[name].items()}


def configure_optimizer(model, cfg):
    """The optimizer of `cfg` (TrainConfig) over all parameters of `model` (GPT), as the papers group them.

    Also hooks model.normalize_weights() to its step, so that no training loop can forget it.
    """
    kinds, device = route(model), next(model.parameters()).device
    wd, rate = cfg.weight_decay, cfg.learning_rate
    groups = [
        # kind        lr                          weight decay
        ('matrices', rate, wd),
        ('embeddings', rate, wd),
        ('norms', rate, 0.0),
        ('scalars', rate * cfg.scalar_lr_mult, 0.0),
        ('scales', rate, 0.0),
    ]
    optimizers = []
    if cfg.optimizer == 'muon':
        groups.pop(0)
        muon = SplitMuon if cfg.muon_qkv == 'split' else torch.optim.Muon
        optimizers.append(muon(kinds['matrices'].items(), lr=cfg.muon_lr, momentum=cfg.muon_momentum, nesterov=True,
                               weight_decay=cfg.muon_weight_decay, adjust_lr_fn='original'))
        optimizers[0].param_groups[0]['kind'] = 'matrices'
    optimizers.append(torch.optim.AdamW(
        [{'params': list(kinds[kind].items()), 'lr': lr, 'weight_decay': decay, 'kind': kind}
         for kind, lr, decay in groups if kind in kinds],
        betas=(cfg.beta1, cfg.beta2), fused=device.type in ('cuda', 'cpu', 'mps')))
    optimizers[-1].register_step_post_hook(lambda *_: model.normalize_weights())
    joint = JointOptimizer(optimizers, list(model.parameters()))
    for group in joint.groups:
        group['peak_lr'] = group['lr']
    return joint


def describe(optimizer):
    """The routing as a table, a line for each parameter name and shape, the layers folded into `h.*`."""
    rows = {}
    for one in optimizer.optimizers:
        for group in one.param_groups:
            for name, p in zip(group['param_names'], group['params']):
                key = (re.sub(r'\.h\.\d+\.', '.h.*.', name), str(tuple(p.shape)), type(one).__name__, group['kind'],
                       f'{group["peak_lr"]:g}', f'{group["weight_decay"]:g}')
                rows[key] = rows.get(key, 0) + 1
    head = ('parameter', 'shape', 'optimizer', 'kind', 'peak lr', 'decay', 'tensors')
    table = [head] + [(*key, str(count)) for key, count in rows.items()]
    widths = [max(map(len, column)) for column in zip(*table)]
    return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in table)


def lr_multiplier(step, cfg):
    """The share of its peak rate at which the update number `step` (from 0) is made.

    Linear warmup: (step + 1) / (warmup_iters + 1), so no step has rate 0. Then 'cosine': half a cosine from 1 to
    min_lr / learning_rate at lr_decay_iters; 'wsd': 1, and a straight line down over the last wsd_decay of the run.
    """
    if step < cfg.warmup_iters:
        return (step + 1) / (cfg.warmup_iters + 1)
    if not cfg.decay_lr:
        return 1.0
    start = cfg.warmup_iters
    if cfg.schedule == 'wsd':
        start = max(start, cfg.lr_decay_iters - round(cfg.wsd_decay * cfg.lr_decay_iters))
    progress = min(1.0, max(0.0, (step - start) / max(1, cfg.lr_decay_iters - start)))
    height = 1 - progress if cfg.schedule == 'wsd' else 0.5 * (1 + math.cos(math.pi * progress))
    floor = cfg.min_lr / cfg.learning_rate
    return floor + (1 - floor) * height
