"""Generation: the caches of keys and values, and the sampling loop, which is GPT.generate."""

import math

import torch

from nanonag.cli import UserError


class KVCache:
    """The keys and values of one layer's earlier tokens.

    Update rules never see it: velocity runs along depth, the cache along time.

    capacity: the number of tokens that it can hold.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.length = 0
        self.kv = None  # (2, B, H, capacity, D), allocated by the first append

    def positions(self, T, device):
        """The positions (T,) of the next T tokens. Raises ValueError if they do not fit."""
        if self.length + T > self.capacity:
            raise ValueError(f'{self.length} + {T} tokens do not fit a cache of {self.capacity}')
        return torch.arange(self.length, self.length + T, device=device)

    def append(self, k, v):
        """Adds the keys and values (B, H, T, D) of T new tokens.

        Returns (keys, values, mask): those of all tokens so far, (B, H, length, D), and the
        attention mask (T, length), True where a query may attend, or None if none is needed.
        """
        T = k.size(2)
        start = self.length
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.capacity, k.shape[3])
        self.length += T
        self.kv[0, :, :, start : self.length] = k
        self.kv[1, :, :, start : self.length] = v
        mask = None
        # After earlier tokens, is_causal would align its triangle with the first key, not the last.
        if start > 0 and T > 1:
            mask = torch.ones(T, self.length, dtype=torch.bool, device=k.device).tril(start)
        keys, values = self.kv[:, :, :, : self.length].unbind(0)
        return keys, values, mask


class StaticKVCache:
    """A KVCache whose shapes never change, so that code compiled for one token fits the next.

    Queries attend to all rows; a mask hides those that are not written yet.

    capacity: the number of tokens that it can hold. start: a 0-dim int64 tensor, the number of
    tokens so far. The caches of all layers share it, and their owner advances it.
    """

    def __init__(self, capacity, start):
        self.capacity = capacity
        self.start = start
        self.kv = None  # (2, B, H, capacity, D), allocated by the first append

    def positions(self, T, device):
        """The positions (T,) of the next T tokens."""
        return torch.arange(T, device=device) + self.start

    def append(self, k, v):
        """Adds the keys and values (B, H, T, D) of T new tokens.

        Returns (keys, values, mask): all rows, (B, H, capacity, D), and the attention mask
        (T, capacity), True where a query may attend.
        """
        if self.kv is None:
            self.kv = k.new_zeros(2, *k.shape[:2], self.capacity, k.shape[3])
            torch._dynamo.mark_static_address(self.kv)  # a CUDA graph may write into it
        pos = self.positions(k.size(2), k.device)
        self.kv[0].index_copy_(2, pos, k)
        self.kv[1].index_copy_(2, pos, v)
        mask = torch.arange(self.capacity, device=k.device) <= pos[:, None]
        return self.kv[0], self.kv[1], mask


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, use_cache=True, stop=None):
    """Continues each of the prompts idx (B, T) by max_new_tokens -> (B, T + max_new_tokens).

    temperature 0 is greedy; top_k restricts sampling to that many likeliest tokens. Each token is
    conditioned on the last block_size tokens, with or without the cache. `stop`, if given, is
    called with idx after every token and ends generation by returning True.

    Raises UserError for a temperature, top_k or max_new_tokens out of range, an empty prompt, or
    logits that are not finite.
    """
    check_request(idx, max_new_tokens, temperature, top_k)
    block_size = model.cfg.block_size
    cache = model.new_cache(min(block_size, idx.size(1) + max_new_tokens))
    uncached = idx
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if use_cache and idx.size(1) <= block_size:
                logits, _ = model(uncached, cache=cache)
            else:
                # Past block_size the window slides: all positions change, so no cache is valid.
                logits, _ = model(idx[:, -block_size:])
            logits = logits[:, -1, : model.cfg.vocab_used].float()
            uncached = sample_token(logits, temperature, top_k)
            idx = torch.cat((idx, uncached), dim=1)
            if stop is not None and stop(idx):
                break
    finally:
        model.train(was_training)
    return idx


def check_request(idx, max_new_tokens, temperature, top_k):
    """Raises UserError for arguments of `generate` that are out of range."""
    is_valid = (
        0 <= temperature < math.inf
        and max_new_tokens >= 0
        and (top_k is None or top_k >= 1)
        and idx.size(1) > 0
    )
    if not is_valid:
        raise UserError(
            f'temperature={temperature} and max_new_tokens={max_new_tokens} must be finite and '
            f'not negative, top_k={top_k} at least 1, the prompt ({idx.size(1)} tokens) not empty'
        )


def sample_token(logits, temperature, top_k):
    """Draws one token per row: logits (B, V) -> ids (B, 1), int64.

    temperature and top_k are those of `generate`. Raises UserError if a logit is not finite.
    """
    if not logits.isfinite().all():
        raise UserError('the model gave non-finite logits: its weights are damaged')
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # The largest becomes 0: no overflow at any temperature, and no 0 / 0.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    ids = None
    if top_k is not None and top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)  # exactly top_k of them, even if some are equal
    # Inversion of the cumulative distribution takes one random number per row, torch.multinomial
    # one per token.
    cumulative = logits.double().softmax(-1).cumsum(-1)
    drawn = torch.rand(len(cumulative), 1, dtype=cumulative.dtype, device=cumulative.device)
    drawn = drawn * cumulative[:, -1:]
    # The first sum above the number, so that no token of probability 0 is chosen.
    choice = torch.searchsorted(cumulative, drawn, right=True).clamp(max=cumulative.size(-1) - 1)
    return choice if ids is None else ids.gather(-1, choice)
