"""One model on several processes: DDP keeps a copy on each, FSDP2 a shard, for models beyond one
GPU's memory."""

import contextlib
import functools

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model):
    """Keeps only the streams between layers for backward and computes the rest of each layer a
    second time there."""
    for block in model.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard(model, rt):
    """Shards the parameters of `model` in place over all processes, each layer's matrices a unit
    that is gathered when used.

    Rank 0's weights are dealt out; the others' are ignored and best on the meta device, which takes
    no memory. If rank 0's are there, too, all hold arbitrary numbers afterwards, to be filled from
    shards. Parameters, gradients and optimizer state stay float32. The matrices inside the layers
    travel and work in rt.dtype; norms, scalars and tables, small or used once, travel in float32,
    so that every sum is made as it is without sharding."""
    weights, filled = (
        model.state_dict(),
        not rt.any(rt.is_main and next(model.parameters()).is_meta),
    )
    mesh = init_device_mesh(rt.device.type, (rt.world_size,))
    half = MixedPrecisionPolicy(
        param_dtype=None if rt.dtype == torch.float32 else rt.dtype, reduce_dtype=torch.float32
    )
    for block in model.transformer.h:
        fully_shard(
            [module for module in block.modules() if isinstance(module, nn.Linear)],
            mesh=mesh,
            mp_policy=half,
        )
    fully_shard(model, mesh=mesh)
    if next(model.parameters()).is_meta:
        model.to_empty(device=rt.device)
    if filled:
        set_model_state_dict(
            model,
            weights if rt.is_main else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )


def replicate(model, rt):
    """What to call in training instead of `model`: it averages the gradients over all processes."""
    if not rt.distributed or isinstance(model, FSDPModule):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[rt.device] if rt.device.type == 'cuda' else None,
        gradient_as_bucket_view=True,
    )


def only_local(module):
    """A context in which backward leaves the gradients unaveraged: for all micro-steps but an
    update's last.

    Under FSDP every micro-step is averaged, since unsharded gradients would need the memory that
    sharding saves."""
    return (
        module.no_sync()
        if isinstance(module, DistributedDataParallel)
        else contextlib.nullcontext()
    )


def clip_grad_norm(model, limit):
    """Scales the gradient of all parameters to a norm of at most `limit`; returns the norm before,
    a number."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    number = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if number > limit:  # the others are spared a pass over memory
        clip_grads_with_norm_(model.parameters(), limit, norm)
    return number


def whole_state(model):
    """The model's state dict, put together on rank 0; all ranks must take part."""
    if not isinstance(model, FSDPModule):
        return model.state_dict()
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
