"""Compares training runs: a table of their losses, speed and parameters, and the picture of their
loss curves.

    python plot.py out/demo_gd out/demo_lt_nag --out=curves.png

The runs' folders come first. In the picture the marked line is the validation loss, the thin one
the smoothed training loss."""

if __name__ == '__main__':
    from nanonag.help import show_help

    show_help(__doc__, 'plot.py:PlotConfig')

import errno
import json
import math
import os
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanonag.cli import UserError, run, tell
from nanonag.configurator import HUGE, MAX_INT, build, parse
from nanonag.report import table

KEYS = {
    'train': ('step', 'tokens', 'loss', 'tokens_per_s'),
    'evals': ('step', 'tokens', 'train_loss', 'val_loss'),
}
COUNTS = ('step', 'tokens')
# colour-blind safe (Okabe, Ito)
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
AXES = {'step': 'updates', 'tokens': 'training tokens', 'time': 'training time, minutes'}


@dataclass(frozen=True)
class PlotConfig:
    """What is compared and shown."""

    runs: tuple[str, ...] = ()  # the runs' folders; `--runs` itself may be left out
    # the picture, of any kind that matplotlib writes; None: only the table
    out: str | None = 'curves.png'
    # of the picture; time is that of training, without evaluations
    x: Literal['step', 'tokens', 'time'] = 'step'
    # each training loss is averaged with its neighbours, this share of the run
    smooth: float = 0.02
    json: str | None = None  # file for the table's numbers

    def __post_init__(self):
        if not self.runs:
            raise UserError(
                'no runs: name the folders that train.py wrote, as in `python plot.py out/a out/b`'
            )
        for name in ('out', 'json'):
            if getattr(self, name) == '':
                raise UserError(f'{name} is empty: name a file, or leave it out with --{name}=None')
        if not 0 <= self.smooth <= 1:
            raise UserError(f'smooth={self.smooth}: must be from 0 to 1')


@dataclass
class Run:
    """What metrics.jsonl tells of a run, its training and evaluation records in the order of their
    steps."""

    name: str
    update: str
    params: int
    train: list
    evals: list


def count(value):
    """A record's number of steps, tokens or parameters; ValueError if it is none."""
    if type(value) not in (int, float) or not 0 <= value < MAX_INT or value != int(value):
        raise ValueError(f'{value!r:.40} is no count')
    return int(value)


def measure(value):
    """A record's loss or speed, NaN where it was not finite (JSON's null) or HUGE; ValueError if it
    is no number."""
    if value is not None and type(value) not in (int, float):
        raise ValueError(f'{value!r:.40} is no number')
    return float(value) if value is not None and abs(value) < HUGE else math.nan


def name_of(value):
    """A scheme's or folder's name, printable and not too long for the table."""
    return ''.join(char if char.isprintable() else '?' for char in str(value)[:60])


def read_run(folder):
    """The Run in `folder`. A last line still being written is left out; UserError if anything else
    is missing or damaged."""
    path = Path(folder) / 'metrics.jsonl'
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(errno.EINVAL, 'not a file')  # a device or pipe has no end
        lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
    except OSError as error:
        raise UserError(
            f'{folder}: no run to read there ({path}: {error.strerror}); name the out_dir of a run'
        ) from None
    head, records = {}, {'train': {}, 'evals': {}}
    # what follows the last line end is empty, or half a line
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            if 'config' in record:  # one for each start of the run, the last holds
                head = {
                    'update': name_of(record['config']['update']),
                    'params': count(record['params']),
                }
            for kind, keys in KEYS.items():
                if keys[-2] in record or keys[-1] in record:
                    row = {key: (count if key in COUNTS else measure)(record[key]) for key in keys}
                    records[kind][row['step']] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f'{path}:{number}: damaged, not a record of train.py ({type(error).__name__}: {error}); mend or '
                f'delete the line'
            ) from None
    if not head:
        raise UserError(
            f'{path}: no record with the config of the run; it has not started yet, or the file is damaged'
        )
    in_order = {kind: [rows[step] for step in sorted(rows)] for kind, rows in records.items()}
    return Run(name_of(Path(folder).resolve().name), **head, **in_order)


def summary(run):
    """The facts of a run for the table; None for what its records don't tell."""
    last = max(run.train + run.evals, key=lambda r: r['step'], default={})
    end = run.evals[-1] if run.evals else {}
    best = min(
        (r for r in run.evals if math.isfinite(r['val_loss'])),
        key=lambda r: r['val_loss'],
        default={},
    )
    speeds = [r['tokens_per_s'] for r in run.train]
    return {
        'run': run.name,
        'scheme': run.update,
        'params': run.params,
        'steps': last.get('step'),
        'tokens': last.get('tokens'),
        'train_loss': end.get('train_loss'),
        'val_loss': end.get('val_loss'),
        'best_val_loss': best.get('val_loss'),
        'best_step': best.get('step'),
        'tokens_per_s': statistics.median(speeds) if speeds else None,
    }


def comparison(facts):
    """The table of several runs' summaries."""
    kinds = {
        'steps': ',.0f',
        'tokens': ',.0f',
        'params': ',',
        'tokens_per_s': ',.0f',
        'best_step': ',.0f',
        'train_loss': '.4f',
        'val_loss': '.4f',
        'best_val_loss': '.4f',
    }
    titles = {
        'params': 'parameters',
        'train_loss': 'train loss',
        'val_loss': 'val loss',
        'best_val_loss': 'best val',
        'best_step': 'at step',
        'tokens_per_s': 'tokens/s',
    }
    rows = [[titles.get(key, key) for key in facts[0]]]
    for fact in facts:
        rows.append(
            [
                '-' if value is None else format(value, kinds.get(key, ''))
                for key, value in fact.items()
            ]
        )
    return table(rows)


# -----------------------------------------------------------------------------------------------------------------
# the picture


def positions(run, x):
    """Where the training and the evaluation records lie on the axis."""
    if x != 'time':
        return [r[x] for r in run.train], [r[x] for r in run.evals]
    import numpy as np

    done = np.diff([0] + [r['tokens'] for r in run.train])
    with np.errstate(divide='ignore', invalid='ignore'):  # a speed of 0 or NaN: a gap
        minutes = np.cumsum(done / np.array([r['tokens_per_s'] for r in run.train])) / 60
    return minutes, np.interp(
        [r['step'] for r in run.evals], [0] + [r['step'] for r in run.train], [0, *minutes]
    )


def smoothed(values, share):
    """Each value averaged with its neighbours, `share` of all values in total; fewer at the
    ends."""
    import numpy as np

    reach = round(share * len(values) / 2)
    if not reach:
        return values
    window = np.ones(2 * reach + 1)
    total, number = (np.convolve(v, window)[reach:-reach] for v in (values, np.ones(len(values))))
    return (total / number).tolist()


def short(number):
    """1500000 -> 1.5M."""
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, 'B'), (1e6, 'M')) if number >= size), (1, '')
    )
    return f'{number / size:,.12g}{unit}'


def labels(runs):
    """Scheme and parameters of each run, and the folder's name where that leaves several alike."""
    texts = [f'{run.update}, {run.params / 1e6:.{1 if run.params >= 1e7 else 2}f}M' for run in runs]
    return [
        text if Counter(texts)[text] == 1 else f'{text} ({run.name})'
        for text, run in zip(texts, runs)
    ]


def limits(runs, smooth):
    """The range of losses worth showing: that of all but each run's first tenth, whose fall would
    flatten what follows."""
    losses = []
    for run in runs:
        points = [
            *zip((r['step'] for r in run.train), smoothed([r['loss'] for r in run.train], smooth)),
            *((r['step'], r['val_loss']) for r in run.evals),
        ]
        start = max(step for step, _ in points) / 10 if points else 0
        losses += [loss for step, loss in points if step >= start and math.isfinite(loss)]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def draw(runs, cfg):
    """Writes the picture to cfg.out; ImportError without matplotlib, UserError if it can't be
    written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout='constrained')
    FigureCanvasAgg(figure)  # no window, no display
    axes = figure.add_subplot()
    for i, (run, label) in enumerate(zip(runs, labels(runs))):
        train_x, eval_x = positions(run, cfg.x)
        colour, dashes = COLOURS[i % len(COLOURS)], ('-', '--', ':')[i // len(COLOURS) % 3]
        axes.plot(
            train_x,
            smoothed([r['loss'] for r in run.train], cfg.smooth),
            color=colour,
            linewidth=0.8,
            alpha=0.45,
        )
        axes.plot(
            eval_x,
            [r['val_loss'] for r in run.evals],
            dashes,
            color=colour,
            linewidth=1.8,
            marker='o',
            markersize=4,
            label=label,
        )
    axes.set_ylim(*limits(runs, cfg.smooth))
    axes.set_xlim(left=0)
    axes.set_xlabel(AXES[cfg.x])
    axes.set_ylabel('loss, nats per token')
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(alpha=0.2, linewidth=0.6)
    legend = axes.legend(
        frameon=False,
        title='scheme, parameters\n(marked: validation, thin: training)',
        alignment='left',
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may hold dollar signs
    try:
        Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(cfg.out, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(f'out={cfg.out}: the picture cannot be written ({error})') from None


def main(argv):
    folders_first = argv and not argv[0].startswith('-')
    cfg = build(PlotConfig, parse(['--runs', *argv] if folders_first else argv, PlotConfig))
    runs = [read_run(folder) for folder in cfg.runs]
    facts = [summary(run) for run in runs]
    print(comparison(facts))
    if cfg.json is not None:
        try:
            Path(cfg.json).parent.mkdir(parents=True, exist_ok=True)
            # JSON has no NaN
            known = [
                {key: None if value != value else value for key, value in row.items()}
                for row in facts
            ]
            Path(cfg.json).write_text(json.dumps(known, indent=1) + '\n', encoding='utf-8')
        except OSError as error:
            raise UserError(f'json={cfg.json}: cannot be written ({error.strerror})') from None
    if cfg.out is not None:
        try:
            draw(runs, cfg)
            print(f'picture: {cfg.out}')
        except ImportError:
            tell('warning: no picture without matplotlib; pip install matplotlib')


if __name__ == '__main__':
    run(main)
