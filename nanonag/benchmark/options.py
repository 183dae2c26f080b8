"""Checks of bench.py's options beside their types: those that would have no effect."""

from nanonag.cli import UserError

ONLY_FOR = {  # option: the stages of `what` that it has an effect on
    'steps': {'train'},
    'batch_size': {'train', 'memory'},
    'gradient_accumulation_steps': {'train', 'memory'},
    'optimizer': {'train', 'memory'},
    'rounds': {'train', 'generate'},
    'gen_batch': {'generate'},
    'prompt_tokens': {'generate'},
    'max_new_tokens': {'generate'},
}
FOR_WORKLOADS = ('device', 'rounds', 'seed')  # options that --suite passes on to its workloads


def check_effect(given, cfg):
    """Raises UserError for given options that have no effect on what is measured.

    `memory` is accepted where it says what happens anyway: False where nothing is trained, True
    with what=memory.

    Args:
        given: the options given by the user, a dict.
        cfg: the BenchConfig that they make.
    """
    idle = [key for key in ONLY_FOR if key in given and not ONLY_FOR[key] & set(cfg.what)]
    if 'memory' in given and cfg.memory != cfg.measures_memory:
        idle.append('memory')
    if idle:
        options = ', '.join(f'{key}={given[key]}' for key in idle)
        raise UserError(f'no effect with what={",".join(cfg.what)}: {options}; leave out')


def check_lengths(entries, cfg):
    """Raises UserError if a prompt and the tokens generated after it exceed a model's context.

    `entries` are the models (name, GPTConfig).
    """
    if 'generate' not in cfg.what:
        return
    for name, gpt_cfg in entries:
        if cfg.prompt_tokens + cfg.max_new_tokens > gpt_cfg.block_size:
            raise UserError(
                f'prompt_tokens={cfg.prompt_tokens} and max_new_tokens={cfg.max_new_tokens} do not '
                f'fit block_size={gpt_cfg.block_size} of {name}; lower them, or leave generation '
                'out with --what=train'
            )


def check_suite(given):
    """Raises UserError for given options that a suite sets itself."""
    allowed = sorted((*FOR_WORKLOADS, 'json', 'suite'))
    for key in sorted(given):
        if key not in allowed:
            raise UserError(
                f'{key}={given[key]}: suite={given["suite"]} has its own; with it go '
                f'{", ".join(allowed)}'
            )
