"""What a benchmark compares: the interface, and what is known of a contender."""

import contextlib
from dataclasses import asdict

import torch

from nanonag.benchmark.timing import operations


class Contender:
    """A model that takes training steps and generates tokens: one row of a table.

    A subclass sets `params` (number of parameters) and defines step() and generate().

    Args:
        name: what the tables call it.
        gpt_cfg: the GPTConfig of the model, or of the model of ours that a peer is compared with.
        cfg: the BenchConfig.
        rt: the Runtime that it is measured on.
    """

    gpt_cfg = None  # None: not one of our models
    flops_per_token = None  # of a training step; None: not known

    def __init__(self, name, gpt_cfg, cfg, rt):
        self.name = name
        self.cfg = cfg
        self.rt = rt
        self.tokens, self.prompt = random_tokens(gpt_cfg, cfg, rt.device)

    def step(self):
        """Takes one training step on `tokens`."""
        raise NotImplementedError

    def generate(self):
        """Returns `prompt`, followed by cfg.max_new_tokens sampled tokens."""
        raise NotImplementedError

    def profile(self):
        """Returns a text with the costliest operations of one training step."""
        return f'{self.name}: one training step\n{operations(self.step, self.rt)}'

    def close(self):
        """Frees what would outlive this object."""


def random_tokens(gpt_cfg, cfg, device):
    """Returns the token ids that every contender gets, the same for the same seed and sizes.

    Two tensors: ids to train on, (batch_size, block_size + 1), and prompts to generate from,
    (gen_batch, prompt_tokens).
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(
        gpt_cfg.vocab_used, (cfg.batch_size, gpt_cfg.block_size + 1), generator=generator
    )
    prompt = torch.randint(
        gpt_cfg.vocab_used, (cfg.gen_batch, cfg.prompt_tokens), generator=generator
    )
    return tokens.to(device), prompt.to(device)


def flops_per_token(model):
    """Returns the number of operations of one training step per token.

    6 for each weight of a matrix (2 forward, 4 backward), and attention's products with every key,
    causal or not (PaLM, arXiv 2204.02311, appendix B). Tables are looked up, not multiplied.
    """
    cfg = model.cfg
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(linear.weight.numel() for linear in linears)
    return 6 * weights + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


@contextlib.contextmanager
def closing_all(contenders):
    """A context manager whose value is the list of contenders; all are closed at its end.

    `contenders` is an iterator that creates them one by one: if one fails, those before it are
    closed.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(contender)) for contender in contenders]


def records_of(contenders, peaks, timed):
    """Returns all numbers as a list of dicts for JSON, one per contender.

    Args:
        contenders: what was compared.
        peaks: for each its peak memory in bytes, or None.
        timed: a dict {'train' or 'generate': the results of each contender}.
    """
    records = []
    for i, contender in enumerate(contenders):
        record = {
            'scheme': contender.name,
            'parameters': contender.params,
            'peak_memory_bytes': peaks[i],
            'flops_per_token': contender.flops_per_token,
            'gpt_config': contender.gpt_cfg and asdict(contender.gpt_cfg),
        }
        for stage, stage_results in timed.items():
            record[stage] = stage_results[i]
        records.append(record)
    return records
