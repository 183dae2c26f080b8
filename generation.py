"""Generation: the KV cache and the sampling loop, GPT.generate."""
import math

import torch

from configurator import UserError


class KVCache:
    """Keys and values of one layer's earlier tokens. Velocity runs along depth, this along time: no rule sees it."""

    def __init__(self, capacity):
        self.capacity, self.length, self.kv = capacity, 0, None

    def append(self, k, v):
        """k, v: (B, H, T, D) of new tokens -> keys, values (B, H, length, D) of all so far, and the mask that they need."""
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.capacity, k.shape[3])
        start, T, self.length = self.length, k.size(2), self.length + k.size(2)
        self.kv[0, :, :, start:self.length] = k
        self.kv[1, :, :, start:self.length] = v
        mask = None
        if start and T > 1:  # a later chunk: is_causal would align its triangle with the first key, not the last
            mask = torch.ones(T, self.length, dtype=torch.bool, device=k.device).tril(start)
        return *self.kv[:, :, :, :self.length].unbind(0), mask


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, use_cache=True):
    """Continues each of the prompts idx (B, T) by max_new_tokens -> (B, T + max_new_tokens).

    temperature 0 is greedy; top_k keeps that many likeliest tokens. Each token is conditioned on the last block_size
    tokens, with or without the cache. Raises UserError for a bad temperature, top_k or an empty prompt.
    """
    if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1) or max_new_tokens < 0 or idx.size(1) == 0:
        raise UserError(f'temperature={temperature} and max_new_tokens={max_new_tokens} must be finite and not negative, '
                        f'top_k={top_k} at least 1, the prompt ({idx.size(1)} tokens) not empty')
    training, cache = model.training, model.new_cache()
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if use_cache and idx.size(1) <= model.cfg.block_size:
                logits, _ = model(idx[:, cache[0].length:], cache=cache)
            else:  # past block_size the window slides: every position changes, so nothing cached stays valid
                logits, _ = model(idx[:, -model.cfg.block_size:])
            idx = torch.cat((idx, sample_token(logits[:, -1, :model.cfg.vocab_used].float(), temperature, top_k)), dim=1)
    finally:
        model.train(training)
    return idx


def sample_token(logits, temperature, top_k):
    """logits (B, V) -> ids (B, 1). Raises UserError if they are not finite."""
    if not logits.isfinite().all():
        raise UserError('the model gave non-finite logits: its weights are damaged')
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)  # at most 0: no overflow however cold, nor 0 / 0
    if top_k is not None and top_k < logits.size(-1):
        values, ids = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, values)  # exactly top_k of them, ties or not
    return torch.multinomial(logits.softmax(-1), 1)
