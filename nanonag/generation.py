"""Generation: the KV cache, the sampling loop GPT.generate, and a Decoder that makes its steps
fast."""

import math

import torch

from nanonag.cli import UserError


class KVCache:
    """Keys and values of one layer's earlier tokens. Velocity runs along depth, this along time: no
    rule sees it."""

    def __init__(self, capacity):
        self.capacity, self.length, self.kv = capacity, 0, None

    def positions(self, T, device):
        """The positions (T) of the next T tokens. Raises ValueError if they do not fit."""
        if self.length + T > self.capacity:
            raise ValueError(f'{self.length} + {T} tokens do not fit a cache of {self.capacity}')
        return torch.arange(self.length, self.length + T, device=device)

    def append(self, k, v):
        """k, v: (B, H, T, D) of new tokens -> keys, values (B, H, length, D) of all so far, and the
        mask that they need."""
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.capacity, k.shape[3])
        start, T, self.length = self.length, k.size(2), self.length + k.size(2)
        self.kv[0, :, :, start : self.length] = k
        self.kv[1, :, :, start : self.length] = v
        mask = None
        # a later chunk: is_causal would align its triangle with the first key, not the last
        if start and T > 1:
            mask = torch.ones(T, self.length, dtype=torch.bool, device=k.device).tril(start)
        return *self.kv[:, :, :, : self.length].unbind(0), mask


class StaticKVCache:
    """A KVCache whose shapes never change, so that code compiled for one token fits the next: all
    rows are attended to, those not written yet masked. `start` is a tensor of one number, shared by
    the layers, that the owner moves on."""

    def __init__(self, capacity, start):
        self.capacity, self.start, self.kv = capacity, start, None

    def positions(self, T, device):
        return torch.arange(T, device=device) + self.start

    def append(self, k, v):
        if self.kv is None:
            self.kv = k.new_zeros(2, *k.shape[:2], self.capacity, k.shape[3])
            torch._dynamo.mark_static_address(self.kv)  # a CUDA graph may write into it
        pos = self.positions(k.size(2), k.device)
        self.kv[0].index_copy_(2, pos, k)
        self.kv[1].index_copy_(2, pos, v)
        return self.kv[0], self.kv[1], torch.arange(self.capacity, device=k.device) <= pos[:, None]


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, use_cache=True, stop=None):
    """Continues each of the prompts idx (B, T) by max_new_tokens -> (B, T + max_new_tokens).

    temperature 0 is greedy; top_k keeps that many likeliest tokens. Each token is conditioned on
    the last block_size tokens, with or without the cache. `stop`, if given, is shown idx after
    every token and ends it by returning True. Raises UserError for a bad temperature, top_k or an
    empty prompt."""
    if (
        not 0 <= temperature < math.inf
        or (top_k is not None and top_k < 1)
        or max_new_tokens < 0
        or idx.size(1) == 0
    ):
        raise UserError(
            f'temperature={temperature} and max_new_tokens={max_new_tokens} must be finite and not negative, '
            f'top_k={top_k} at least 1, the prompt ({idx.size(1)} tokens) not empty'
        )
    # new: not in the cache yet
    training, block_size, new = model.training, model.cfg.block_size, idx
    cache = model.new_cache(min(block_size, idx.size(1) + max_new_tokens))
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if use_cache and idx.size(1) <= block_size:
                logits, _ = model(new, cache=cache)
            # past block_size the window slides: every position changes, so nothing cached stays
            # valid
            else:
                logits, _ = model(idx[:, -block_size:])
            new = sample_token(logits[:, -1, : model.cfg.vocab_used].float(), temperature, top_k)
            idx = torch.cat((idx, new), dim=1)
            if stop is not None and stop(idx):
                break
    finally:
        model.train(training)
    return idx


def sample_token(logits, temperature, top_k):
    """logits (B, V) -> ids (B, 1). Raises UserError if they are not finite."""
    if not logits.isfinite().all():
        raise UserError('the model gave non-finite logits: its weights are damaged')
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # at most 0: no overflow however cold, nor 0 / 0
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    ids = None
    if top_k is not None and top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)  # exactly top_k of them, ties or not
    # one random number a row, where torch.multinomial draws one for each token
    sums = logits.double().softmax(-1).cumsum(-1)
    drawn = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device) * sums[:, -1:]
    # the first sum above it: no token of probability 0
    choice = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.size(-1) - 1)
    return choice if ids is None else ids.gather(-1, choice)
