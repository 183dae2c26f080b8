"""The head and its cross-entropy in one operation that never holds all the logits."""
import torch
from torch.autograd.function import once_differentiable

CHUNK = 2 ** 25  # logits held at a time: 64 MiB in bfloat16, 128 in float32
TILE = 128  # rows come in multiples of it, for the matmuls' sake


class LinearCrossEntropy(torch.autograd.Function):
    """Works through the rows in chunks and makes the gradients along the way, so nothing is recomputed in backward."""

    @staticmethod
    def forward(ctx, x, w, targets, dtype):
        w_ = w.to(dtype)
        valid = targets != -1
        n = valid.sum()
        loss = x.new_zeros(())
        grad_x, grad_w = (torch.zeros_like(t, dtype=x.dtype) if need else None
                          for t, need in zip((x, w), ctx.needs_input_grad))
        rows = max(1, CHUNK // w.size(0))
        rows -= rows % TILE if rows > TILE else 0
        for i in range(0, x.size(0), rows):
            x_, t, keep = x[i:i + rows].to(dtype), targets[i:i + rows].clamp(min=0), valid[i:i + rows, None].to(x.dtype)
            logits = x_ @ w_.T
            top, hit = logits.amax(-1, keepdim=True), logits.gather(1, t[:, None])
            p = logits.sub_(top).exp_()  # the softmax but for its denominator z: dividing x by z saves a pass over p
            z = p.sum(-1, keepdim=True, dtype=x.dtype)
            loss = loss + ((top.to(x.dtype) - hit + z.log()) * keep).sum()
            if grad_x is not None:  # d loss / d logits = p / z - onehot(target)
                grad_x[i:i + rows] = (p @ w_) * (keep / z) - w[t] * keep
            if grad_w is not None:
                grad_w += p.T @ (x_ * (keep / z)).to(dtype)
                grad_w.index_add_(0, t, x[i:i + rows] * keep, alpha=-1)
        ctx.save_for_backward(grad_x, grad_w, n)
        ctx.w_dtype = w.dtype
        return loss / n

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x, grad_w, n = ctx.saved_tensors
        scale = grad / n
        return (None if grad_x is None else grad_x * scale,
                None if grad_w is None else (grad_w * scale).to(ctx.w_dtype), None, None)


def linear_cross_entropy(x, w, targets):
    """x: (N, C) states, w: (V, C) head, targets: (N,) ids, -1 ignored -> mean cross-entropy in nats (float32 or float64).

    The same as cross_entropy(x @ w.T, targets, ignore_index=-1): matmuls and exponentials in autocast's precision, sums in float32.
    torch's F.linear_cross_entropy also chunks, but returns the loss in the matmuls' precision (three digits in bfloat16)
    and knows no autocast.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w.dtype
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not torch.is_grad_enabled():  # needs_input_grad does not know: spare evaluation the gradients
        x, w = x.detach(), w.detach()
    with torch.autocast(device, enabled=False):
        return LinearCrossEntropy.apply(x, w, targets, dtype)
