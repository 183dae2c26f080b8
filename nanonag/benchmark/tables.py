"""Results of a benchmark as text, and a suite's file as a Markdown table."""

import json
import math
from pathlib import Path

from nanonag.cli import UserError
from nanonag.report import table


def speed_table(records, stage, on_gpu):
    """The records' results of one stage, 'train' or 'generate', as text; columns that nothing is
    known for are left out."""
    columns, first = {}, records[0]['scheme']
    for record in records:
        result, peak = record[stage], record['peak_memory_bytes'] if stage == 'train' else None
        ms, ratio = (
            {key: 1e3 * value for key, value in result['seconds_spread'].items()},
            result['relative_spread'],
        )
        # three figures: machines are no better
        digits = max(0, 2 - math.floor(math.log10(ms['median'])))
        row = {
            'scheme': record['scheme'],
            'parameters': f'{record["parameters"]:,}',
            'ms/step' if stage == 'train' else 'ms/token': f'{ms["median"]:,.{digits}f}',
            'middle half': f'{ms["q1"]:,.{digits}f} to {ms["q3"]:,.{digits}f}',
            'range': f'{ms["min"]:,.{digits}f} to {ms["max"]:,.{digits}f}',
            'tokens/s': f'{result["tokens_per_s"]:,.0f}',
            f'time / {first}': f'{ratio["median"]:.3f}',
            '(middle half)': f'{ratio["q1"]:.3f} to {ratio["q3"]:.3f}',
            'GPU peak' if on_gpu else 'process peak': f'{peak / 2**30:.2f} GiB' if peak else '-',
            'MFU': f'{result["mfu"]:.1%}' if result.get('mfu') else '-',
        }
        for title, text in row.items():
            columns.setdefault(title, [title]).append(text)
    return table(list(zip(*(texts for texts in columns.values() if set(texts[1:]) != {'-'}))))


def markdown(path):
    """A suite's file as a table for README."""
    try:
        suite = json.loads(Path(path).read_text(encoding='utf-8'))['suite']
        rows = [
            '| workload | scheme | milliseconds (middle half) | tokens/s | time / first (middle half) | peak memory |',
            '|---|---|---|---|---|---|',
        ]
        for one in suite:
            for record in one['results']:
                timed = next(
                    (record[stage] for stage in ('train', 'generate') if stage in record), None
                )
                cells = ['', '', '']
                if timed:
                    ms, ratio = (
                        {key: value * scale for key, value in timed[name].items()}
                        for name, scale in (('seconds_spread', 1e3), ('relative_spread', 1))
                    )
                    cells = [
                        f'{ms["median"]:,.1f} ({ms["q1"]:,.1f} to {ms["q3"]:,.1f})',
                        f'{timed["tokens_per_s"]:,.0f}',
                        f'{ratio["median"]:.3f} ({ratio["q1"]:.3f} to {ratio["q3"]:.3f})',
                    ]
                peak = record['peak_memory_bytes']
                cells = [
                    one['title'],
                    f'`{record["scheme"]}`',
                    *cells,
                    f'{peak / 2**30:.2f} GiB' if peak else '',
                ]
                rows.append(f'| {" | ".join(cells)} |')
        return '\n'.join(rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'table={path}: not the file of a suite ({error}); make one with --suite=cpu --json={path}'
        ) from None
