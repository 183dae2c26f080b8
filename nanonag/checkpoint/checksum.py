"""A checksum over the contents of a checkpoint."""

import hashlib

import torch


def digest(value, sha=None):
    """SHA-256 over the contents of nested dicts and lists of tensors and plain values, but a key
    `digest`, as hex."""
    top, sha = sha is None, sha or hashlib.sha256()
    if top and isinstance(value, dict):
        value = {key: item for key, item in value.items() if key != 'digest'}
    if isinstance(value, torch.Tensor):
        if not is_stored(value):
            raise ValueError('a tensor larger than what the file stores of it')
        sha.update(f'{value.dtype}{tuple(value.shape)}'.encode())
        sha.update(value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    elif isinstance(value, (dict, list, tuple)):
        for item in sorted(value.items()) if isinstance(value, dict) else value:
            digest(item, sha)
        sha.update(f'end of {len(value)}'.encode())
    else:
        sha.update(repr(value).encode())
    return sha.hexdigest() if top else None


def is_stored(tensor):
    """Whether its memory holds all its elements: strides of zero would make a tensor of any size of
    one."""
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
