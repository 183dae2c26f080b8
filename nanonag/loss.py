"""The head and its cross-entropy in one operation that never holds all the logits."""

import torch
from torch.autograd.function import once_differentiable

# Logits made at a time: 64 MiB in bfloat16, and 128 MiB for their softmax in float32, twice for a
# moment.
CHUNK = 2**25
TILE = 128  # chunks of more rows than this are multiples of it, which suits the matmuls


class LinearCrossEntropy(torch.autograd.Function):
    """linear_cross_entropy with its gradients.

    forward works through the rows in chunks and computes the gradients along the way, so that
    backward recomputes nothing.
    """

    @staticmethod
    def forward(ctx, x, w, targets, dtype):
        """As linear_cross_entropy; `dtype`: that of the matmuls."""
        w_matmul = w.to(dtype)
        is_counted = targets != -1
        n_counted = is_counted.sum()
        loss = x.new_zeros(())
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = None
        n_rows = max(1, CHUNK // w.size(0))
        if n_rows > TILE:
            n_rows -= n_rows % TILE
        for start in range(0, x.size(0), n_rows):
            rows = slice(start, start + n_rows)
            x_matmul = x[rows].to(dtype)
            target = targets[rows].clamp(min=0)
            keep = is_counted[rows, None].to(x.dtype)
            logp = (x_matmul @ w_matmul.T).log_softmax(-1, dtype=x.dtype)
            loss = loss - (logp.gather(1, target[:, None]) * keep).sum()
            p = logp.exp_().to(dtype)
            del logp  # frees its memory before the gradients take theirs
            # d loss / d logits = p - onehot(target)
            if grad_x is not None:
                grad_x[rows] = (p @ w_matmul - w[target]) * keep
            if ctx.needs_input_grad[1]:
                part = p.T @ (x_matmul * keep.to(dtype))
                grad_w = part.to(x.dtype) if grad_w is None else grad_w.add_(part)
                grad_w.index_add_(0, target, x[rows] * keep, alpha=-1)
        ctx.save_for_backward(grad_x, grad_w, n_counted)
        ctx.w_dtype = w.dtype
        return loss / n_counted

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The gradients of x and w; None for what needs none, as targets and dtype."""
        grad_x, grad_w, n_counted = ctx.saved_tensors
        scale = grad / n_counted
        if grad_x is not None:
            grad_x = grad_x * scale
        if grad_w is not None:
            grad_w = (grad_w * scale).to(ctx.w_dtype)
        return grad_x, grad_w, None, None


def linear_cross_entropy(x, w, targets):
    """Mean cross-entropy in nats of the logits x @ w.T, as a 0-dim tensor in float32 or float64.

    x: (N, C) states. w: (V, C) weight of the head. targets: (N,) int64 ids, -1 for rows that do not
    count.

    The same as F.cross_entropy(x @ w.T, targets, ignore_index=-1), with matmuls in autocast's dtype
    and softmax and sums in float32 at least. torch's F.linear_cross_entropy also works in chunks,
    but returns the loss in the dtype of the matmuls (three digits in bfloat16) and ignores
    autocast.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w.dtype
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not torch.is_grad_enabled():
        # needs_input_grad ignores no_grad; without this, evaluation would compute gradients.
        x = x.detach()
        w = w.detach()
    with torch.autocast(device, enabled=False):
        return LinearCrossEntropy.apply(x, w, targets, dtype)
