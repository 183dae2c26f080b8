"""Memory: what a run needs, what a machine has, and what to try when that is too little."""

import contextlib
import ctypes
import math
import os

import torch
import torch.nn as nn

from nanonag.cli import UserError, first_line

GIB = 2**30
# in the messages of RuntimeErrors that mean what torch.OutOfMemoryError means
OUT_OF_MEMORY = (
    "can't allocate memory",
    'not enough memory',
    'Storage size calculation overflowed',
    'multiplication overflow',
)


def keep_freed_memory(keep=True):
    """Makes glibc keep the memory of freed tensors for the next ones.

    Memory that goes back to the system is cleared again, page by page, when it is next used, which
    takes an eighth of a training step on a CPU. With ``keep=False`` glibc does about what it does
    by default. Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0 if keep else 65536)  # M_MMAP_MAX: blocks that come straight from the system
        mallopt(-1, -1 if keep else 2**26)  # M_TRIM_THRESHOLD: free bytes at the top; -1: all
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the size from which blocks do so, at its maximum


def main_memory():
    """The bytes of this machine's memory, inf if the system does not say."""
    try:
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (AttributeError, ValueError, OSError):
        return math.inf


@contextlib.contextmanager
def memory_for(remedy, failure=UserError):
    """A context that turns running out of memory, a device's or main memory, into a message.

    Args:
        remedy: what the user can try.
        failure: the type of the exception raised, UserError or SystemExit.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = first_line(error)
        is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_known and not any(text in reason for text in OUT_OF_MEMORY):
            raise
        raise failure(f'out of memory ({reason:.200}); {remedy}') from None


def refuse_beyond_memory(gpt_cfg, batch_size):
    """Raises UserError if main memory cannot hold the matrices and the ids of a micro-batch."""
    matrices = 48 * gpt_cfg.n_layer * gpt_cfg.n_embd**2  # 12 C^2 float32 weights a layer
    ids = 16 * batch_size * gpt_cfg.block_size  # inputs and targets, int64
    available = main_memory()
    if matrices + ids > available:
        raise UserError(
            f'n_layer={gpt_cfg.n_layer}, n_embd={gpt_cfg.n_embd}, batch_size={batch_size}, '
            f'block_size={gpt_cfg.block_size} need more than {(matrices + ids) / GIB:,.0f} GiB of '
            f'main memory, and this machine has {available / GIB:,.0f}; lower them'
        )


def memory_estimate(model, cfg, dtype, world_size):
    """The bytes that training needs on each device: {how: bytes} for ddp, ddp + zero and fsdp.

    Weights and gradients take 4 bytes each per parameter, AdamW's moments 8, Muon's momentum 4.
    Activations take about 34 C bytes per token and layer in 16 bits (Korthikanti et al., 2022,
    without the attention matrix); momentum streams and SwiGLU take up to twice that. Without
    activation checkpointing and fragmentation.

    Args:
        model: the GPT; may be on the meta device.
        cfg: a resolved TrainConfig.
        dtype: of the matmuls.
        world_size: the number of processes.
    """
    params = sum(p.numel() for p in model.parameters())
    linears = [m for m in model.transformer.h.modules() if isinstance(m, nn.Linear)]
    matrices = sum(linear.weight.numel() for linear in linears)
    state = 8 * params
    optimizer = 8 * params - 4 * matrices if cfg.optimizer == 'muon' else 8 * params
    bytes_per_channel = 60 if dtype == torch.float32 else 34
    tokens = cfg.batch_size * model.cfg.block_size
    activations = tokens * model.cfg.n_embd * model.cfg.n_layer * bytes_per_channel
    unsharded = 4 * (params - matrices) + 8 * (matrices // model.cfg.n_layer)
    return {
        'ddp': state + optimizer + activations,
        'ddp + zero': state + optimizer // world_size + activations,
        'fsdp': (state + optimizer) // world_size + unsharded + activations,
    }


def memory_text(model, cfg, dtype, world_size):
    """The estimate as one line; see :func:`memory_estimate`."""
    estimate = memory_estimate(model, cfg, dtype, world_size)
    parts = [f'{size / GIB:.1f} GiB ({how})' for how, size in estimate.items()]
    return f'memory on each device about {", ".join(parts)}'


def in_less(cfg, size, times):
    """What to try where memory ran out, as text.

    ``size`` and ``times`` are options whose product stays: the number of sequences in a batch and
    the number of such batches.
    """
    n, count = getattr(cfg, size), getattr(cfg, times)
    parts = next((d for d in range(2, n + 1) if n % d == 0), 1)
    ways = []
    if parts > 1:
        ways.append(f'--{size}={n // parts} --{times}={count * parts} (the same run)')
    if not cfg.activation_checkpointing:
        ways.append('--activation_checkpointing=True')
    if cfg.parallel == 'ddp':
        ways.append('--parallel=fsdp on several GPUs')
    ways.append('a smaller model')
    return f'try {", or ".join(ways)}'
