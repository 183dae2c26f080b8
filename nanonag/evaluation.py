"""The loss of a model over a split, the same windows whoever asks."""

import torch

from nanonag.data.loader import eval_windows


@torch.no_grad()
def evaluate(model, split, count, batch_size, rt):
    """Mean loss (nats per token) over ``count`` fixed windows of a split, shared by all ranks."""
    windows = eval_windows(split.n_windows, count)
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    rounds = -(-len(batches) // rt.world_size)
    total = weight = 0.0
    model.eval()
    for i in range(rt.rank, rounds * rt.world_size, rt.world_size):
        # in the last round the ranks left over repeat the last batch, with weight 0
        x, y = split.batch(batches[min(i, len(batches) - 1)])
        with rt.autocast():
            _, loss = model(x.to(rt.device), y.to(rt.device))
        sequences = len(x) if i < len(batches) else 0
        total = total + loss * sequences
        weight += sequences
    model.train()
    total, weight = rt.sum([total, weight])
    return total / weight


def in_words(losses):
    """'train loss 1.2345, val loss 1.2345'."""
    return f'train loss {losses["train_loss"]:.4f}, val loss {losses["val_loss"]:.4f}'
