"""A trained model made ready to generate: weights in the matmuls' precision, packed or compiled."""

import functools

import torch
import torch.nn as nn

from nanonag import runtime
from nanonag.generation import StaticKVCache, generate


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
