"""Memory: what a run needs, what a machine has, and what to try when it does not suffice."""

import contextlib
import ctypes
import math
import os

import torch
import torch.nn as nn

from nanonag.cli import UserError


def keep_freed_memory(keep=True):
    """Makes glibc keep the memory of freed tensors for the next ones; given back to the system,
    each of its pages has to be cleared again at the next use: an eighth of a training step on a
    CPU. keep=False: about what glibc does by itself."""
    # another C library has other ways
    with contextlib.suppress(OSError, TypeError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_MAX: how many blocks come straight from the system
        mallopt(-4, 0 if keep else 65536)
        # M_TRIM_THRESHOLD: how much may lie free at the top; -1: all
        mallopt(-1, -1 if keep else 2**26)
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the size up to which none does, at its maximum


def main_memory():
    """Bytes of this machine's memory, inf where it does not tell."""
    try:
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (AttributeError, ValueError, OSError):
        return math.inf


@contextlib.contextmanager
def memory_for(remedy, failure=UserError):
    """Turns running out of memory, the device's or main memory, into a `failure` that names the
    remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        says_so = (
            "can't allocate memory",
            'not enough memory',
            'Storage size calculation overflowed',
            'multiplication overflow',
        )
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(
            text in reason for text in says_so
        ):
            raise
        raise failure(f'out of memory ({reason:.200}); {remedy}') from None


def memory_estimate(model, cfg, dtype, world_size):
    """{how: bytes on each GPU} for ddp, ddp with zero, and fsdp; activations without checkpointing,
    no fragmentation.

    `model` may be on the meta device. State: 4 bytes a parameter each for weight and gradient, 8
    for AdamW's moments, 4 for Muon's momentum. Activations: about 34 C bytes a token and layer in
    16 bits (Korthikanti et al., 2022, without the attention matrix), twice that for the momentum
    schemes' float32 streams and for SwiGLU's wider hidden layer at the most."""
    params = sum(p.numel() for p in model.parameters())
    matrices = sum(
        m.weight.numel() for m in model.transformer.h.modules() if isinstance(m, nn.Linear)
    )
    optimizer = 8 * params - (4 * matrices if cfg.optimizer == 'muon' else 0)
    tokens, layer = cfg.batch_size * model.cfg.block_size, matrices // model.cfg.n_layer
    activations = (
        tokens * model.cfg.n_embd * model.cfg.n_layer * (34 if dtype != torch.float32 else 60)
    )
    return {
        'ddp': 8 * params + optimizer + activations,
        'ddp + zero': 8 * params + optimizer // world_size + activations,
        'fsdp': (8 * params + optimizer) // world_size
        + 4 * (params - matrices)
        + 8 * layer
        + activations,
    }


def memory_text(model, cfg, dtype, world_size):
    return 'memory on each device about ' + ', '.join(
        f'{size / 2**30:.1f} GiB ({how})'
        for how, size in memory_estimate(model, cfg, dtype, world_size).items()
    )


def in_less(cfg, size, times):
    """What to try where memory ran out: size x times, two options, in smaller pieces, and what else
    makes room."""
    n, count = getattr(cfg, size), getattr(cfg, times)
    parts = next((d for d in range(2, n + 1) if n % d == 0), 1)
    ways = [f'--{size}={n // parts} --{times}={count * parts} (the same run)'] * (parts > 1)
    ways += ['--activation_checkpointing=True'] * (not cfg.activation_checkpointing)
    ways += ['--parallel=fsdp on several GPUs'] * (cfg.parallel == 'ddp') + ['a smaller model']
    return f'try {", or ".join(ways)}'


def refuse_beyond_memory(gpt, batch_size):
    """UserError where main memory cannot hold what every run puts there first: the matrices, and
    the ids of a micro-batch."""
    least, memory = (
        48 * gpt.n_layer * gpt.n_embd**2 + 16 * batch_size * gpt.block_size,
        main_memory(),
    )
    if least > memory:
        raise UserError(
            f'n_layer={gpt.n_layer}, n_embd={gpt.n_embd}, batch_size={batch_size}, block_size={gpt.block_size} need more than '
            f'{least / 2**30:,.0f} GiB of main memory, and this machine has {memory / 2**30:,.0f}; lower them'
        )
