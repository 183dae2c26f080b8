"""Measures contenders side by side: time in rotating rounds, peak memory in fresh processes."""

import functools
import statistics
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import torch

from nanonag.cli import warn
from nanonag.workers import worker_pool

# Steps of a memory measurement, and rounds before those that count: from the second step on, the
# optimizer's state lies beside the gradients.
WARMUP = 2

# -----------------------------------------------------------------------------
# time


def time_training(contenders, cfg, rt, on_turn):
    """Times training steps.

    Args:
        contenders: what is compared; the first is one of our schemes.
        cfg: the BenchConfig.
        rt: the Runtime that all run on.
        on_turn: function called with 'train' and a contender's name before its turn.

    Returns:
        for each contender a dict for JSON: what results() says of a step, and `mfu`, the share of
        the device's peak speed, None where it or the operations of a step are not known.
    """

    def take_steps(contender):
        for _ in range(cfg.steps):
            contender.step()

    durations = race(contenders, take_steps, cfg.rounds, rt, functools.partial(on_turn, 'train'))
    block_size = contenders[0].gpt_cfg.block_size  # the same for all
    tokens_per_step = cfg.gradient_accumulation_steps * cfg.batch_size * block_size
    records = results(durations, cfg.steps, cfg.steps * tokens_per_step)
    # The known peak speeds are those of bfloat16.
    peak_flops = rt.peak_flops() if rt.dtype != torch.float32 else None
    for contender, record in zip(contenders, records):
        record['mfu'] = None
        if peak_flops and contender.flops_per_token:
            record['mfu'] = contender.flops_per_token * record['tokens_per_s'] / peak_flops
    return records


def time_generation(contenders, cfg, rt, on_turn):
    """Times generation; the arguments are time_training's.

    Returns for each contender a dict for JSON: what results() says of one token per sequence.
    """

    def generate(contender):
        contender.generate()

    durations = race(contenders, generate, cfg.rounds, rt, functools.partial(on_turn, 'generate'))
    return results(durations, cfg.max_new_tokens, cfg.max_new_tokens * cfg.gen_batch)


def race(contenders, act, rounds, rt, on_turn=lambda name: None):
    """Times `act` on each contender, round by round.

    In each round every contender has one turn. The order rotates from round to round, so that a
    slow spell of the machine hits all of them. WARMUP rounds come before those that count.

    Args:
        contenders: what is compared.
        act: function of a contender, the work that is timed.
        rounds: number of rounds that count.
        rt: the Runtime, whose device is synchronized before and after each turn.
        on_turn: function of a contender's name, called before its turn.

    Returns:
        for each contender a list of `rounds` durations in seconds.
    """
    durations: list[list[float]] = [[] for _ in contenders]
    for i in range(WARMUP + rounds):
        for j in range(len(contenders)):
            turn = (i + j) % len(contenders)
            on_turn(contenders[turn].name)
            rt.synchronize()
            t0 = time.perf_counter()
            act(contenders[turn])
            rt.synchronize()
            durations[turn].append(time.perf_counter() - t0)
    return [seconds[WARMUP:] for seconds in durations]


def results(durations, count, tokens):
    """Returns the results of a race, one dict for JSON per contender.

    Each duration is compared with the first contender's in the same round: the two were measured
    within moments of each other.

    Args:
        durations: what race() returns.
        count: number of steps in one duration.
        tokens: number of tokens in one duration.
    """
    records = []
    for seconds in durations:
        seconds_per_step = [duration / count for duration in seconds]
        relative = [duration / first for duration, first in zip(seconds, durations[0])]
        seconds_spread = spread(seconds_per_step)
        records.append(
            {
                'seconds': seconds_per_step,
                'seconds_spread': seconds_spread,
                'tokens_per_s': tokens / count / seconds_spread['median'],
                'relative': relative,
                'relative_spread': spread(relative),
            }
        )
    return records


def spread(numbers):
    """Returns the median, the extremes and the quartiles of a list, as a dict."""
    if len(numbers) == 1:
        q1 = median = q3 = numbers[0]
    else:
        q1, median, q3 = statistics.quantiles(numbers, n=4, method='inclusive')
    return {'median': median, 'min': min(numbers), 'max': max(numbers), 'q1': q1, 'q3': q3}


def operations(step, rt):
    """Returns a table, as text, of the costliest operations of one call of `step`."""
    with torch.profiler.profile() as profiler:
        step()
        rt.synchronize()
    sort_by = 'self_device_time_total' if rt.device.type == 'cuda' else 'self_cpu_time_total'
    return profiler.key_averages().table(sort_by=sort_by, row_limit=15, max_name_column_width=40)


# -----------------------------------------------------------------------------
# memory


def peak_bytes(name, make):
    """Measures the peak memory of training in a fresh process, which holds nothing else.

    Args:
        name: of the contender, for the warning.
        make: function without arguments that returns the contender; it must be picklable.

    Returns:
        bytes, or None, with a warning, where the process fails or the system does not tell.
    """
    try:
        with worker_pool(1) as pool:
            return pool.submit(peak_bytes_here, make).result()
    except (BrokenProcessPool, ImportError) as error:
        warn(f'no peak memory of {name}: {error}')
        return None


def peak_bytes_here(make):
    """Returns this process's peak memory in bytes after WARMUP training steps of make().

    On CUDA that of the tensors on the device, elsewhere the resident memory of the process.
    """
    contender = make()
    for _ in range(WARMUP):
        contender.step()
    if contender.rt.device.type == 'cuda':
        return torch.cuda.max_memory_allocated(contender.rt.device)
    return peak_resident_bytes()


def peak_resident_bytes():
    """Returns the largest resident memory that this process has had, in bytes."""
    # getrusage on Linux includes what the parent process had when it started this one.
    try:
        with open('/proc/self/status', encoding='utf-8') as file:
            for line in file:
                if line.startswith('VmHWM:'):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # missing on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024
