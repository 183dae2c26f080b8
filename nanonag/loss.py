"""The head and its cross-entropy in one operation that never holds all the logits."""

import torch
from torch.autograd.function import once_differentiable

# logits made at a time: 64 MiB in bfloat16, and their softmax's 128 in float32, twice for a moment
CHUNK = 2**25
TILE = 128  # rows come in multiples of it, for the matmuls' sake


class LinearCrossEntropy(torch.autograd.Function):
    """Works through the rows in chunks and makes the gradients along the way, so nothing is
    recomputed in backward."""

    @staticmethod
    def forward(ctx, x, w, targets, dtype):
        w_ = w.to(dtype)
        valid = targets != -1
        n = valid.sum()
        loss = x.new_zeros(())
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = None
        rows = max(1, CHUNK // w.size(0))
        rows -= rows % TILE if rows > TILE else 0
        for i in range(0, x.size(0), rows):
            x_, t, keep = (
                x[i : i + rows].to(dtype),
                targets[i : i + rows].clamp(min=0),
                valid[i : i + rows, None].to(x.dtype),
            )
            logp = (x_ @ w_.T).log_softmax(-1, dtype=x.dtype)
            loss = loss - (logp.gather(1, t[:, None]) * keep).sum()
            p = logp.exp_().to(dtype)
            del logp
            if grad_x is not None:  # d loss / d logits = p - onehot(target)
                grad_x[i : i + rows] = (p @ w_ - w[t]) * keep
            if ctx.needs_input_grad[1]:
                part = p.T @ (x_ * keep.to(dtype))
                grad_w = part.to(x.dtype) if grad_w is None else grad_w.add_(part)
                grad_w.index_add_(0, t, x[i : i + rows] * keep, alpha=-1)
        ctx.save_for_backward(grad_x, grad_w, n)
        ctx.w_dtype = w.dtype
        return loss / n

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x, grad_w, n = ctx.saved_tensors
        scale = grad / n
        return (
            None if grad_x is None else grad_x * scale,
            None if grad_w is None else (grad_w * scale).to(ctx.w_dtype),
            None,
            None,
        )


def linear_cross_entropy(x, w, targets):
    """x: (N, C) states, w: (V, C) head, targets: (N,) ids, -1 ignored -> mean cross-entropy in nats
    (float32 or float64).

    The same as cross_entropy(x @ w.T, targets, ignore_index=-1): matmuls in autocast's precision,
    softmax and sums in float32. torch's F.linear_cross_entropy also chunks, but returns the loss in
    the matmuls' precision (three digits in bfloat16) and knows no autocast."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w.dtype
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # needs_input_grad does not know: spare evaluation the gradients
    if not torch.is_grad_enabled():
        x, w = x.detach(), w.detach()
    with torch.autocast(device, enabled=False):
        return LinearCrossEntropy.apply(x, w, targets, dtype)
