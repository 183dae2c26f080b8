"""Layers that every transformer here is made of, with what they declare of their parameters.

``param_kind`` is the optimizer's kind of parameter (see nanonag.optim.route).
"""

import torch
import torch.nn as nn


class Linear(nn.Linear):
    """nn.Linear that declares what the optimizer and the sphere need to know of its weight.

    ``embd_axis``: the weight's axis, of (out, in), along the embedding, which has unit norm on the
    sphere. ``stacked``: how many matrices the weight holds along its first axis.
    """

    def __init__(self, n_in, n_out, bias, embd_axis, stacked=1, param_kind='matrices'):
        super().__init__(n_in, n_out, bias=bias)
        self.embd_axis = embd_axis
        self.stacked = stacked
        self.param_kind = param_kind

    def reset_parameters(self):  # the model draws its weights
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    param_kind = 'embeddings'
    embd_axis = 1

    def reset_parameters(self):
        pass


def rotary_table(pos, dim, base, dtype):
    """cos and sin of pos * base^(-2i / dim), (T, dim / 2) each, for positions (T).

    In float32 at least, since bfloat16 has no integers beyond 256.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponent = -torch.arange(0, dim, 2, device=pos.device, dtype=dtype) / dim
    angle = pos[:, None].to(dtype) * base**exponent
    return angle.cos(), angle.sin()


def rotate(x, rotary):
    """RoPE: turns each pair (x_2i, x_2i+1) of x (B, H, T, D) by its angle (arXiv 2104.09864)."""
    cos, sin = rotary
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
