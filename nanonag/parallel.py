"""One model on several processes: DDP keeps a copy on each of them, FSDP2 a shard."""

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
    """Keeps the streams between layers for backward, which computes each layer a second time."""
    for block in model.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard(model, rt):
    """Shards the parameters of a model in place over all processes (FSDP2).

    Each layer's matrices are a unit that is gathered when it is used. Rank 0's weights are
    distributed; those of other ranks are ignored and may be on the meta device. If rank 0's weights
    are on meta too, nothing is distributed: the caller loads the shards. Parameters, gradients and
    optimizer state stay float32. The matrices inside the layers are sent and multiplied in
    rt.dtype; norms, scalars and tables, small or used once, are sent in float32, so that their sums
    are those of a model that is not sharded.
    """
    weights = model.state_dict()
    has_weights = not rt.any(rt.is_main and next(model.parameters()).is_meta)
    mesh = init_device_mesh(rt.device.type, (rt.world_size,))
    param_dtype = None if rt.dtype == torch.float32 else rt.dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        matrices: list[nn.Module] = [m for m in block.modules() if isinstance(m, nn.Linear)]
        fully_shard(matrices, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    if next(model.parameters()).is_meta:
        model.to_empty(device=rt.device)
    if has_weights:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights if rt.is_main else {}, options=options)


def replicate(model, rt):
    """What training calls instead of the model: DDP, which averages gradients over processes."""
    if not rt.distributed or isinstance(model, FSDPModule):
        return model
    device_ids = [rt.device] if rt.device.type == 'cuda' else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def only_local(module):
    """A context in which backward does not average gradients, for all micro-steps but the last.

    Under FSDP every micro-step is averaged, since unsharded gradients would need the memory that
    sharding saves.
    """
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return contextlib.nullcontext()


def clip_grad_norm(model, limit):
    """Scales the gradient of all parameters to a norm <= limit; returns the norm before (float)."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    number = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if number > limit:  # otherwise a pass over the gradient is saved
        clip_grads_with_norm_(model.parameters(), limit, norm)
    return number


def whole_state(model):
    """The state dict of a model, sharded or not, whole on rank 0; every rank must call it."""
    if not isinstance(model, FSDPModule):
        return model.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)  # type: ignore[arg-type]
