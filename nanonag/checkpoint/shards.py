"""Sharded checkpoints, for models that are too large to gather on one process.

Each rank writes its own shard of the tensors; any number of ranks can read them. Planning, writing
and resharding are torch.distributed.checkpoint's. The files are safetensors, because the library's
own format contains a pickle. The entry `shards` of ckpt.pt names the folder of these files beside
it and the digest of each of them.
"""

import math
import os
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from nanonag.checkpoint.checksum import digest
from nanonag.cli import UserError


def split(state):
    """Separates a checkpoint's dict from its sharded tensors.

    Returns (state, tensors): the state with None for each weight and for each sharded tensor of the
    optimizer, and these tensors by the keys model.NAME and optimizer.NAME.KEY.
    """
    tensors = {f'model.{name}': weight for name, weight in state['model'].items()}
    optimizer = {}
    for name, values in state['optimizer'].items():
        optimizer[name] = dict(values)
        for key, value in values.items():
            if isinstance(value, DTensor):
                tensors[f'optimizer.{name}.{key}'] = value
                optimizer[name][key] = None
    return state | {'model': dict.fromkeys(state['model']), 'optimizer': optimizer}, tensors


def join(state, tensors, folder):
    """Puts the tensors that `split` took out back into a checkpoint's dict.

    Raises UserError, naming the folder, if one of them is missing.
    """
    try:
        joined = state | {'model': {name: tensors[f'model.{name}'] for name in state['model']}}
        if 'optimizer' in state:
            joined['optimizer'] = {}
            for name, values in state['optimizer'].items():
                joined['optimizer'][name] = {}
                for key, value in values.items():
                    if value is None:
                        value = tensors[f'optimizer.{name}.{key}']
                    joined['optimizer'][name][key] = value
    except (KeyError, AttributeError) as error:
        raise UserError(f'{folder}: its shards lack {error}') from None
    return joined


def folders(folder):
    """The folders of shards in a run's folder, oldest first."""
    paths = Path(folder).glob('shards-*')
    return sorted(path for path in paths if is_folder_name(path.name))


def is_folder_name(name):
    return re.fullmatch(r'shards-\d{8,}', name) is not None


def is_file_name(name):
    return re.fullmatch(r'[\w-]+\.safetensors', name) is not None


def write(folder, tensors, group):
    """Writes this rank's part of the tensors and reads it back.

    tensors: DTensors in main memory. group: a gloo process group that nothing else uses. All ranks
    must call it. Returns {file name: digest} of the files of all ranks. Raises OSError on all ranks
    if one of them could not write or has values that are not finite.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run may have left there
    local = {key: tensor.to_local() for key, tensor in tensors.items()}
    is_finite = all(tensor.isfinite().all() for tensor in local.values())
    # All ranks have to agree before dcp.save, in which they wait for each other. Rank 0 has removed
    # the folder by then.
    if not all(gather(is_finite, group)):
        raise OSError('the weights are not finite')
    problem = None
    digests = {}
    try:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, process_group=group)
        digests = verify_own_files(folder, local)
    # dcp.save raises CheckpointException on every rank if one of them fails.
    except (Exception, CheckpointException) as error:
        problem = last_line(error)
    all_digests = {}
    for rank_problem, rank_digests in gather((problem, digests), group):
        if rank_problem is not None:
            raise OSError(rank_problem)
        all_digests.update(rank_digests)
    return all_digests


def gather(value, group):
    """The values of all ranks, a list by rank. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def verify_own_files(folder, local):
    """Synchronizes this rank's files to the disk and reads them back.

    A disk that stores something else is found out while the old checkpoint is still there.

    local: {key: this rank's part of the tensor}. Returns {file name: digest}. Raises OSError if the
    files do not hold exactly these parts.
    """
    missing = dict(local)
    digests = {}
    for path in Path(folder).glob(f'shard-{dist.get_rank() + 1:05d}-*.safetensors'):
        with open(path, 'rb') as file:
            os.fsync(file.fileno())
        stored = load_file(path)
        for key, tensor in stored.items():
            if not torch.equal(missing.pop(key), tensor):
                raise OSError(f'{path.name} does not hold what was written')
        digests[path.name] = digest(stored)
    for key, tensor in missing.items():
        if tensor.numel() > 0:
            raise OSError(f'{key} was not written')
    return digests


def load(folder, state, model, optimizer):
    """Fills a sharded model and its optimizer in place from the shards of a checkpoint.

    folder: the run's folder. state: the checkpoint's dict. All ranks must call it. Raises UserError
    if the shards are not those of such a model.
    """
    folder = Path(folder) / state['shards']['folder']
    current = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(gather=False)}
    _, tensors = split(current)
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except (Exception, CheckpointException) as error:
        raise UserError(f'{folder}: not the shards of this run ({last_line(error)})') from None


def read(folder, shards, whole, prefix=''):
    """Checks the shards of a checkpoint and reads their tensors, in this process alone.

    folder: the run's folder. shards: the checkpoint's entry of that name. Returns {key: tensor} of
    the keys that begin with `prefix`, {} unless `whole`. Raises UserError for a missing or damaged
    file.
    """
    try:
        require_names(shards)
        folder = Path(folder) / shards['folder']
        require_digests(folder, shards['files'])
        return read_tensors(folder, prefix) if whole else {}
    # A damaged or hostile file can fail anywhere in the readers.
    except (Exception, CheckpointException) as error:
        raise UserError(
            f'{folder}: not readable as the shards of a checkpoint ({last_line(error)})'
        ) from None


def require_names(shards):
    """ValueError unless the entry names a folder of shards and files in it, and nothing outside."""
    if not is_folder_name(shards['folder']) or not all(map(is_file_name, shards['files'])):
        raise ValueError(f'{shards!r:.80} names no shards')


def require_digests(folder, digests):
    """ValueError unless the folder holds exactly the files {name: digest}, undamaged."""
    if sorted(digests) != sorted(path.name for path in folder.glob('*.safetensors')):
        raise ValueError(f'it should hold {", ".join(digests):.200}')
    for name, expected in digests.items():
        if digest(load_file(folder / name)) != expected:
            raise ValueError(f'the contents of {name} do not match their digest')


def read_tensors(folder, prefix):
    """{key: whole tensor} of the keys that begin with `prefix`, from all files in the folder.

    Raises ValueError if a part of one of them is missing.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    tensors = {}
    for key, metadata in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(prefix):
            if not isinstance(metadata, TensorStorageMetadata):
                raise ValueError(f'{key:.80} is no tensor')
            stored = sum(math.prod(chunk.sizes) for chunk in metadata.chunks)
            if stored != math.prod(metadata.size):
                raise ValueError(f'parts of {key:.80} are missing')
            tensors[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that there is no process group, which is intended
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def last_line(error):
    """The last line of an exception's message; this library puts a traceback before it."""
    return f'{(str(error).strip() or type(error).__name__).splitlines()[-1]:.200}'
