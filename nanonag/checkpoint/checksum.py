"""A checksum over the contents of a checkpoint."""

import hashlib

import torch


def digest(value):
    """SHA-256, in hex, over nested dicts, lists and tuples of tensors and plain values.

    It depends on contents only, not on the order of a dict's keys or on how tensors are stored. If
    `value` is a dict, its own entry `digest` is left out. Raises ValueError for a tensor with more
    elements than its memory holds.
    """
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key != 'digest'}
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha, value):
    """Feeds a value and all that it contains to the hash."""
    if isinstance(value, torch.Tensor):
        if not is_stored(value):
            raise ValueError('a tensor larger than what the file stores of it')
        sha.update(f'{value.dtype}{tuple(value.shape)}'.encode())
        sha.update(value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    elif isinstance(value, (dict, list, tuple)):
        items = sorted(value.items()) if isinstance(value, dict) else value
        for item in items:
            _feed(sha, item)
        sha.update(f'end of {len(items)}'.encode())
    else:
        sha.update(repr(value).encode())


def is_stored(tensor):
    """Whether the tensor's memory holds all of its elements.

    A zero-stride tensor can claim more elements than the file stores.
    """
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
