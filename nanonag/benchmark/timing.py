"""Measuring contenders side by side: time in rotating rounds, peak memory in processes of their own."""

import statistics
import time
from concurrent.futures.process import BrokenProcessPool

import torch

from nanonag.cli import warn
from nanonag.workers import worker_pool

# steps of the memory measurement, rounds of the others: from the second on, the optimizer's state
# lies beside the gradients
WARMUP = 2


def race(contenders, act, rounds, rt, tick=lambda name: None):
    """Seconds that `act` takes with each contender, a list per contender of one number per round.

    Round after round all take their turn, each time another one first. WARMUP more rounds before do
    not count."""
    seconds, n = [[] for _ in contenders], len(contenders)
    for i in range(WARMUP + rounds):
        for j in range(n):
            k = (i + j) % n
            tick(contenders[k].name)
            rt.synchronize()
            t0 = time.perf_counter()
            act(contenders[k])
            rt.synchronize()
            seconds[k].append(time.perf_counter() - t0)
    return [numbers[WARMUP:] for numbers in seconds]


def spread(numbers):
    """Median, extremes and quartiles of a list."""
    q1, median, q3 = (
        statistics.quantiles(numbers, n=4, method='inclusive') if len(numbers) > 1 else numbers * 3
    )
    return {'median': median, 'min': min(numbers), 'max': max(numbers), 'q1': q1, 'q3': q3}


def peak_bytes(measure, *args):
    """measure(*args) in a fresh process, which holds nothing else; None where it can't be had."""
    try:
        with worker_pool(1) as pool:
            return pool.submit(measure, *args).result()
    except (BrokenProcessPool, ImportError) as error:
        warn(f'no peak memory of {args[0]}: {error}')


def operations(one):
    """A table of the costliest operations of one training step."""
    with torch.profiler.profile() as profiler:
        one.step()
        one.rt.synchronize()
    where = 'self_device_time_total' if one.rt.device.type == 'cuda' else 'self_cpu_time_total'
    return profiler.key_averages().table(sort_by=where, row_limit=15, max_name_column_width=40)


def results(seconds, count, tokens):
    """One record for each contender of a race; a measurement took it through `count` steps and
    `tokens` tokens."""
    for numbers in seconds:
        # round by round: both ran within the same moments
        ratios = [a / b for a, b in zip(numbers, seconds[0])]
        each = [number / count for number in numbers]
        yield {
            'seconds': each,
            'seconds_spread': spread(each),
            'tokens_per_s': tokens / count / spread(each)['median'],
            'relative': ratios,
            'relative_spread': spread(ratios),
        }
