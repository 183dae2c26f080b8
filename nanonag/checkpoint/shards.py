"""Checkpoints in shards, for models too large to gather on one process: each rank writes its own,
any number of ranks reads.

torch.distributed.checkpoint plans, writes and reshards; the files are safetensors, since its own
format keeps a pickle. A run's ckpt.pt stays what one opens: its entry `shards` names the folder
beside it and the digest of each file in there."""

import os
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException  # no Exception: not caught as one
from torch.distributed.tensor import DTensor

from nanonag.checkpoint.checksum import digest
from nanonag.cli import UserError


def split(state):
    """A checkpoint's dict -> (the same with None for each sharded tensor of model and optimizer,
    {key: these tensors})."""
    tensors = {f'model.{name}': w for name, w in state['model'].items()}
    tensors |= {
        f'optimizer.{name}.{key}': value
        for name, values in state['optimizer'].items()
        for key, value in values.items()
        if isinstance(value, DTensor)
    }
    optimizer = {
        name: {key: None if isinstance(value, DTensor) else value for key, value in values.items()}
        for name, values in state['optimizer'].items()
    }
    return state | {'model': dict.fromkeys(state['model']), 'optimizer': optimizer}, tensors


def joined(state, tensors, where):
    """`split` undone. UserError if a tensor is missing."""
    try:
        state = state | {'model': {name: tensors[f'model.{name}'] for name in state['model']}}
        if 'optimizer' in state:
            state['optimizer'] = {
                name: {
                    key: tensors[f'optimizer.{name}.{key}'] if value is None else value
                    for key, value in values.items()
                }
                for name, values in state['optimizer'].items()
            }
    except (KeyError, AttributeError) as error:
        raise UserError(f'{where}: its shards lack {error}') from None
    return state


def write(folder, tensors, group):
    """Writes this rank's part of the tensors (in main memory) and reads it back -> {file: digest}
    of all ranks' files.

    All ranks must call it, with a gloo group that nothing else uses. Raises OSError on all of them
    if one could not write."""
    rank, problem, mine = dist.get_rank(), None, {}
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # what a kill left of it
    dist.barrier(group)
    try:
        local = {key: tensor.to_local() for key, tensor in tensors.items()}
        if not all(tensor.isfinite().all() for tensor in local.values()):
            raise OSError('the weights are not finite')
        dcp.save(
            tensors,
            storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=group,
        )
        for path in Path(folder).glob(f'shard-{rank + 1:05d}-*.safetensors'):
            with open(path, 'rb') as file:
                os.fsync(file.fileno())
            # a disk that lies is found out while the old checkpoint is still there
            stored = load_file(path)
            if any(not torch.equal(local.pop(key), tensor) for key, tensor in stored.items()):
                raise OSError(f'{path.name} does not hold what was written')
            mine[path.name] = digest(stored)
        if lost := [key for key, tensor in local.items() if tensor.numel()]:
            raise OSError(f'{lost[0]} was not written')
    # the latter tells all ranks of one's disk errors
    except (Exception, CheckpointException) as error:
        problem = last_line(error)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (problem, mine), group=group)
    if problems := [problem for problem, _ in found if problem]:
        raise OSError(problems[0])
    return {name: value for _, files in found for name, value in files.items()}


def load(folder, state, model, optimizer):
    """Fills a sharded model and optimizer in place from the shards of a checkpoint's dict; all
    ranks must call it.

    Raises UserError if they do not fit.
    """
    folder = Path(folder) / state['shards']['folder']
    _, tensors = split(
        {'model': model.state_dict(), 'optimizer': optimizer.state_dict(gather=False)}
    )
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except (Exception, CheckpointException) as error:
        raise UserError(f'{folder}: not the shards of this run ({last_line(error)})') from None


def read(folder, shards, whole, prefix=''):
    """{key: whole tensor}, of the keys that begin with `prefix`, read by this process alone; {}
    unless `whole`.

    `shards` is a checkpoint's entry. Raises UserError for a missing or damaged file.
    """
    try:
        name, digests = shards['folder'], shards['files']
        if not re.fullmatch(r'shards-\d{8,}', name) or not all(
            re.fullmatch(r'[\w-]+\.safetensors', file) for file in digests
        ):
            raise ValueError(f'{shards!r:.80} names no shards')
        folder, tensors = Path(folder) / name, {}
        if sorted(digests) != sorted(path.name for path in folder.glob('*.safetensors')):
            raise ValueError(f'it should hold {", ".join(digests):.200}')
        for file, expected in digests.items():
            if digest(load_file(folder / file)) != expected:
                raise ValueError(f'the contents of {file} do not match their digest')
        if whole:
            reader = dcp.HuggingFaceStorageReader(str(folder))
            for key, facts in reader.read_metadata().state_dict_metadata.items():
                if key.startswith(prefix):
                    if sum(chunk.sizes.numel() for chunk in facts.chunks) != facts.size.numel():
                        raise ValueError(f'parts of {key:.80} are missing')
                    tensors[key] = torch.empty(facts.size, dtype=facts.properties.dtype)
            with warnings.catch_warnings():  # that no process group is there, as asked for
                warnings.simplefilter('ignore')
                dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors
    # a damaged or hostile file can fail anywhere in the readers
    except (Exception, CheckpointException) as error:
        raise UserError(
            f'{folder}: not readable as the shards of a checkpoint ({last_line(error)})'
        ) from None


def last_line(error):
    """What an error says in the end; the library puts the traceback before it."""
    return f'{(str(error).strip() or type(error).__name__).splitlines()[-1]:.200}'


def folders(folder):
    """The folders of shards in a run's folder."""
    return sorted(
        path for path in Path(folder).glob('shards-*') if re.fullmatch(r'shards-\d{8,}', path.name)
    )
