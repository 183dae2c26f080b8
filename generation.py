"""Generation: the KV cache, the sampling loop GPT.generate, and a Decoder that makes its steps
fast."""

import functools
import math

import torch
import torch.nn as nn

import runtime
from configurator import UserError


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


class Decoder(nn.Module):
    """A trained GPT made ready to generate, in place: it can't be trained any more. Called and used
    as the GPT itself.

    A token costs the time of reading every weight once, so the weights of the matmuls are stored in
    `dtype`, the one they are multiplied in; on a CPU packed by oneDNN for steps of `batch_size`
    rows, which it reads up to twice as fast as BLAS the plain matrix (but for one row in float32 on
    Intel, where MKL leads). Learned scalars and scales become the numbers that they stand for.
    `compiled`: on CUDA the step of one token runs as one graph; the first takes its time."""

    def __init__(self, model, dtype, batch_size=1, compiled=False):
        super().__init__()
        self.model, self.cfg, self.device, self.step, self.cache = (
            model,
            model.cfg,
            model.lm_head.weight.device,
            None,
            None,
        )
        mkl_leads = (
            batch_size == 1
            and torch.backends.mkl.is_available()
            and runtime.cpu_features().get('cpu_name', '').startswith('Intel')
        )
        packs = (
            self.device.type == 'cpu'
            and torch.backends.mkldnn.is_available()
            and (
                dtype == torch.float32
                and not mkl_leads
                or dtype == torch.bfloat16
                and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            )
        )
        for module in model.modules():
            if isinstance(module, nn.Linear):
                weight = module.weight.detach().to(dtype)
                # the head's is the token table no more
                module.weight = nn.Parameter(weight, requires_grad=False)
                if packs and not compiled:
                    module.packed, module.weight = (
                        torch.ops.mkldnn._reorder_linear_weight(weight, min(batch_size, 256)),
                        None,
                    )
                    module.forward = functools.partial(packed_linear, module)
            elif hasattr(module, 'raw'):  # a Scalar or Scale
                module.forward = lambda value=module().detach(): value
        if compiled:
            self.step = torch.compile(model, dynamic=False, fullgraph=True, mode='reduce-overhead')

    def new_cache(self, capacity):
        if self.step is None:
            return self.model.new_cache(capacity)
        # few shapes: each is compiled
        capacity = min(self.cfg.block_size, -(-capacity // 128) * 128)
        if self.cache is None or self.cache[0].capacity != capacity:
            start = torch.zeros((), dtype=torch.int64, device=self.device)
            self.cache = [StaticKVCache(capacity, start) for _ in range(self.cfg.n_layer)]
        self.cache[0].start.zero_()
        return self.cache

    def forward(self, idx, cache=None):
        if self.step is None or cache is None:
            return self.model(idx, cache=cache)
        # another batch size than last time
        if cache[0].kv is not None and len(cache[0].kv[0]) != len(idx):
            for one in cache:
                one.kv = None
        # a prompt may have any length
        step = self.step if idx.size(1) == 1 and cache[0].kv is not None else self.model
        logits, loss = step(idx, cache=cache)
        cache[0].start += idx.size(1)
        return logits, loss

    generate = generate


def packed_linear(module, x):
    bias = None if module.bias is None else module.bias.to(module.packed.dtype)
    return torch.ops.mkldnn._linear_pointwise(
        x.to(module.packed.dtype), module.packed, bias, 'none', [], ''
    )
