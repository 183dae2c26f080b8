"""Results of a benchmark as a text table, and the file of a suite as a Markdown table."""

import json
import math
from pathlib import Path

import torch

from nanonag.cli import UserError
from nanonag.report import table

MARKDOWN_HEADER = (
    'workload',
    'scheme',
    'milliseconds (middle half)',
    'tokens/s',
    'time / first (middle half)',
    'peak memory',
)


def heading(rt):
    """Returns the line that names the machine, its threads, torch's version and the dtype."""
    return (
        f'{rt.device_name()}, {rt.device.type}, {torch.get_num_threads()} threads, '
        f'torch {torch.__version__}, {rt.dtype_name}'
    )


def report_text(records, profiles, cfg, rt):
    """Returns everything that a benchmark prints at its end.

    Args:
        records: dicts as bench.py writes them to its JSON file; the first is one of our schemes.
        profiles: texts to be printed between the speeds and the memory.
        cfg: the BenchConfig.
        rt: the Runtime that the records were measured on.
    """
    on_gpu = rt.device.type == 'cuda'
    rounds = f'median of {cfg.rounds} round{"s" if cfg.rounds > 1 else ""}'
    parts = []
    if 'train' in cfg.what:
        block_size = records[0]['gpt_config']['block_size']
        parts.append(
            f'training: {cfg.gradient_accumulation_steps} x {cfg.batch_size} x {block_size} tokens '
            f'a step, {cfg.optimizer}; {rounds}\n' + speed_table(records, 'train', on_gpu)
        )
    if 'generate' in cfg.what:
        parts.append(
            f'generation: {cfg.gen_batch} x {cfg.max_new_tokens} tokens after '
            f'{cfg.prompt_tokens}, KV cache; {rounds}\n' + speed_table(records, 'generate', on_gpu)
        )
    parts += profiles
    if 'memory' in cfg.what:
        lines = []
        for record in records:
            peak = record['peak_memory_bytes'] or 0
            lines.append(f'{record["scheme"]}: peak memory {peak:,} bytes')
        parts.append('\n'.join(lines))
    return '\n' + '\n\n'.join(parts)


def speed_table(records, stage, on_gpu):
    """Returns the results of one stage as a text table, a line for each record.

    Columns without a single value are left out.

    Args:
        records: dicts as bench.py writes them to its JSON file.
        stage: 'train' or 'generate'.
        on_gpu: whether peak memory is the GPU's, rather than the process's.
    """
    rows = [speed_cells(record, stage, on_gpu, records[0]['scheme']) for record in records]
    titles = [title for title in rows[0] if any(row[title] != '-' for row in rows)]
    cells = [[row[title] for title in titles] for row in rows]
    return table([titles, *cells], align='<>', ruled=True)


def speed_cells(record, stage, on_gpu, first):
    """Returns the cells of one line of the speed table, a dict by column title; '-' is no value."""
    result = record[stage]
    ms = {key: 1e3 * seconds for key, seconds in result['seconds_spread'].items()}
    relative = result['relative_spread']
    # Three significant figures: timings are not more precise.
    digits = max(0, 2 - math.floor(math.log10(ms['median'])))
    peak = record['peak_memory_bytes'] if stage == 'train' else None
    mfu = result.get('mfu')
    return {
        'scheme': record['scheme'],
        'parameters': f'{record["parameters"]:,}',
        'ms/step' if stage == 'train' else 'ms/token': f'{ms["median"]:,.{digits}f}',
        'middle half': f'{ms["q1"]:,.{digits}f} to {ms["q3"]:,.{digits}f}',
        'range': f'{ms["min"]:,.{digits}f} to {ms["max"]:,.{digits}f}',
        'tokens/s': f'{result["tokens_per_s"]:,.0f}',
        f'time / {first}': f'{relative["median"]:.3f}',
        '(middle half)': f'{relative["q1"]:.3f} to {relative["q3"]:.3f}',
        'GPU peak' if on_gpu else 'process peak': gibibytes(peak) if peak else '-',
        'MFU': f'{mfu:.1%}' if mfu else '-',
    }


def markdown(path):
    """Returns the file that bench.py --suite wrote as a Markdown table.

    Raises UserError if `path` is no such file.
    """
    try:
        suite = json.loads(Path(path).read_text(encoding='utf-8'))['suite']
        rows = [list(MARKDOWN_HEADER)]
        for workload in suite:
            for record in workload['results']:
                rows.append([workload['title'], *markdown_cells(record)])
        lines = [f'| {" | ".join(row)} |' for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'table={path}: not the file of a suite ({error}); '
            f'make one with --suite=cpu --json={path}'
        ) from None
    lines.insert(1, '|---' * len(MARKDOWN_HEADER) + '|')
    return '\n'.join(lines)


def markdown_cells(record):
    """Returns the cells of one line of the Markdown table, all but the workload's title."""
    peak = record['peak_memory_bytes']
    speed = ['', '', '']
    result = record.get('train') or record.get('generate')
    if result:
        ms = {key: 1e3 * seconds for key, seconds in result['seconds_spread'].items()}
        relative = result['relative_spread']
        speed = [
            f'{ms["median"]:,.1f} ({ms["q1"]:,.1f} to {ms["q3"]:,.1f})',
            f'{result["tokens_per_s"]:,.0f}',
            f'{relative["median"]:.3f} ({relative["q1"]:.3f} to {relative["q3"]:.3f})',
        ]
    return [f'`{record["scheme"]}`', *speed, gibibytes(peak) if peak else '']


def gibibytes(count):
    """Returns a number of bytes as text, such as '6.32 GiB'."""
    return f'{count / 2**30:.2f} GiB'
