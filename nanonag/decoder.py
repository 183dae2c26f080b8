"""A trained model made fast for generation: weights in the matmuls' dtype, packed or compiled."""

import torch
import torch.nn as nn

from nanonag import runtime
from nanonag.generation import StaticKVCache, generate

MAX_PACKED_ROWS = 256  # of the inputs that packed weights are laid out for
CAPACITY_STEP = 128  # tokens; each capacity of a static cache is compiled separately


class Decoder(nn.Module):
    """A trained GPT made ready to generate, in place; called and used as the GPT itself.

    Generating a token takes the time of reading every weight once. So the weights of the matmuls
    are stored in the dtype that they are multiplied in, and on a CPU packed where that is faster;
    learned scalars and scales are replaced by their values. The model cannot be trained afterwards.

    model: the GPT. dtype: that of the matmuls. batch_size: the number of rows of a step, for which
    packed weights are laid out; others work too. compiled: compile the step of one token, on CUDA
    as one graph; the first step then takes the time of compilation.
    """

    def __init__(self, model, dtype, batch_size=1, compiled=False):
        super().__init__()
        self.model = model
        self.cfg = model.cfg
        self.device = model.lm_head.weight.device
        self.cache = None
        packed = self.device.type == 'cpu' and not compiled and should_pack(dtype, batch_size)
        convert_weights(model, dtype, batch_size if packed else None)
        self.compiled_step = None
        if compiled:
            self.compiled_step = torch.compile(
                model, dynamic=False, fullgraph=True, mode='reduce-overhead'
            )

    def new_cache(self, capacity):
        """An empty cache, a list by layer, for at least `capacity` tokens.

        With compilation it is the same one each time, so that the compiled step keeps its memory.
        """
        if self.compiled_step is None:
            return self.model.new_cache(capacity)
        capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP  # rounded up
        capacity = min(self.cfg.block_size, capacity)
        if self.cache is None or self.cache[0].capacity != capacity:
            start = torch.zeros((), dtype=torch.int64, device=self.device)
            self.cache = [StaticKVCache(capacity, start) for _ in range(self.cfg.n_layer)]
        self.cache[0].start.zero_()
        return self.cache

    def forward(self, idx, cache=None):
        """As GPT.forward without targets: idx (B, T) -> (logits (B, 1, V), None)."""
        if self.compiled_step is None or cache is None:
            return self.model(idx, cache=cache)
        if cache[0].kv is not None and cache[0].kv.size(1) != idx.size(0):
            for layer_cache in cache:  # the memory is that of another batch size
                layer_cache.kv = None
        # A prompt may have any length, so only steps of one token are worth compiling.
        is_step = idx.size(1) == 1 and cache[0].kv is not None
        step = self.compiled_step if is_step else self.model
        logits, loss = step(idx, cache=cache)
        cache[0].start += idx.size(1)  # shared by all layers
        return logits, loss

    generate = generate


def convert_weights(model, dtype, packed_rows):
    """Converts a model for generation, in place.

    Linear layers get weights in `dtype`, packed for inputs of `packed_rows` rows unless that is
    None; learned scalars and scales become constants.
    """
    # Only modules with children: the list must not keep a replaced layer's weight in memory.
    parents = [module for module in model.modules() if list(module.children())]
    for parent in parents:
        for name, module in parent.named_children():
            if isinstance(module, nn.Linear):
                if packed_rows is not None:
                    setattr(parent, name, PackedLinear(module, dtype, packed_rows))
                else:
                    # A new parameter: the token table, which may be the same one, keeps its dtype.
                    weight = module.weight.detach().to(dtype)
                    module.weight = nn.Parameter(weight, requires_grad=False)
            elif hasattr(module, 'raw'):  # a Scalar or Scale
                setattr(parent, name, Constant(module().detach()))


def should_pack(dtype, batch_size):
    """Whether a CPU multiplies faster with weights packed by oneDNN than with plain ones.

    oneDNN reads them up to twice as fast as BLAS reads a plain matrix, in float32 and, where the
    CPU supports it, bfloat16. The exception is a single row in float32 on Intel, where MKL is
    faster.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype != torch.float32:
        return False
    is_intel = runtime.cpu_features().get('cpu_name', '').startswith('Intel')
    return not (batch_size == 1 and torch.backends.mkl.is_available() and is_intel)


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU, whose weight oneDNN has packed.

    linear: the layer to replace. dtype: that of the product. rows: the expected number of input
    rows; another number works too.
    """

    weight = None  # there is no plain matrix

    def __init__(self, linear, dtype, rows):
        super().__init__()
        weight = linear.weight.detach().to(dtype)
        rows = min(rows, MAX_PACKED_ROWS)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x):
        """x: (..., in) -> (..., out), in the dtype of the weight."""
        x = x.to(self.packed.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, 'none', [], '')


class Constant(nn.Module):
    """A module that returns a tensor: the value of a learned Scalar or Scale after training."""

    def __init__(self, value):
        super().__init__()
        self.value = value  # not a buffer, whose lookup would double the time of a call

    def forward(self):
        return self.value
