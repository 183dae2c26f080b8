"""Compares training runs: a table of their losses, speed and parameters, and a picture of their
loss curves.

    python plot.py out/demo_gd out/demo_lt_nag --out=curves.png

The runs' folders come first. In the picture the marked line is the validation loss, the thin one
the smoothed training loss.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    show_help(__doc__, 'plot.py:PlotConfig')

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanonag.cli import UserError, run, warn
from nanonag.configurator import FilePath, build, parse
from nanonag.history import read_history
from nanonag.report import check_json, table, write_json

# column of the table: (title, format)
COLUMNS = {
    'run': ('run', ''),
    'scheme': ('scheme', ''),
    'params': ('parameters', ','),
    'steps': ('steps', ',.0f'),
    'tokens': ('tokens', ',.0f'),
    'train_loss': ('train loss', '.4f'),
    'val_loss': ('val loss', '.4f'),
    'best_val_loss': ('best val', '.4f'),
    'best_step': ('at step', ',.0f'),
    'tokens_per_s': ('tokens/s', ',.0f'),
}
# colour-blind safe (Okabe, Ito)
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
DASHES = ('-', '--', ':')  # after each round of the colours the next ones
AXES = {'step': 'steps', 'tokens': 'training tokens', 'time': 'training time, minutes'}


@dataclass(frozen=True)
class PlotConfig:
    """What is compared and shown."""

    runs: tuple[FilePath, ...] = ()  # the runs' folders; `--runs` itself may be left out
    # the picture, of any kind that matplotlib writes; None: only the table
    out: FilePath | None = 'curves.png'
    # of the picture; time is that of training, without evaluations
    x: Literal['step', 'tokens', 'time'] = 'step'
    # each training loss is averaged with its neighbours, this share of the run
    smooth: float = 0.02
    json: FilePath | None = None  # file for the table's numbers

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


# -----------------------------------------------------------------------------
# the table


def summary(history):
    """Returns a run's line of the table, a dict by COLUMNS; None for what its records lack."""
    last = max(history.train + history.evals, key=lambda record: record['step'], default={})
    last_eval = history.evals[-1] if history.evals else {}
    finite = [record for record in history.evals if math.isfinite(record['val_loss'])]
    best = min(finite, key=lambda record: record['val_loss'], default={})
    speeds = [record['tokens_per_s'] for record in history.train]
    return {
        'run': history.name,
        'scheme': history.update,
        'params': history.params,
        'steps': last.get('step'),
        'tokens': last.get('tokens'),
        'train_loss': last_eval.get('train_loss'),
        'val_loss': last_eval.get('val_loss'),
        'best_val_loss': best.get('val_loss'),
        'best_step': best.get('step'),
        'tokens_per_s': statistics.median(speeds) if speeds else None,
    }


def comparison(summaries):
    """Returns the summaries of several runs as a text table."""
    rows = [[title for title, _ in COLUMNS.values()]]
    for values in summaries:
        row = []
        for key, (_, kind) in COLUMNS.items():
            row.append('-' if values[key] is None else format(values[key], kind))
        rows.append(row)
    return table(rows, align='<>', ruled=True)


def without_nan(summaries):
    """Returns the summaries with None for NaN, which JSON does not have."""
    return [
        {key: None if value != value else value for key, value in values.items()}
        for values in summaries
    ]


# -----------------------------------------------------------------------------
# the picture


def column(records, key):
    """Returns the values of one key of all records."""
    return [record[key] for record in records]


def positions(history, x):
    """Returns where the training and the evaluation records lie on the axis `x`."""
    if x != 'time':
        return column(history.train, x), column(history.evals, x)
    import numpy as np

    tokens = np.diff([0, *column(history.train, 'tokens')])
    with np.errstate(divide='ignore', invalid='ignore'):  # a speed of 0 or NaN: a gap
        seconds = np.cumsum(tokens / np.array(column(history.train, 'tokens_per_s')))
    minutes = seconds / 60
    steps = [0, *column(history.train, 'step')]
    return minutes, np.interp(column(history.evals, 'step'), steps, [0, *minutes])


def smoothed(values, share):
    """Returns each value averaged with its neighbours, `share` of all in total; fewer at the
    ends."""
    import numpy as np

    reach = round(share * len(values) / 2)
    if not reach:
        return values
    window = np.ones(2 * reach + 1)
    totals = np.convolve(values, window)[reach:-reach]
    counts = np.convolve(np.ones(len(values)), window)[reach:-reach]
    return (totals / counts).tolist()


def short(number):
    """Returns a number as text: 20,000, 1.5M, 14B."""
    for size, unit in ((1e9, 'B'), (1e6, 'M')):
        if number >= size:
            return f'{number / size:,.12g}{unit}'
    return f'{number:,.12g}'


def labels(histories):
    """Returns each run's scheme and parameters, and the folder's name where those are the same."""
    texts = []
    for history in histories:
        digits = 1 if history.params >= 1e7 else 2
        texts.append(f'{history.update}, {history.params / 1e6:.{digits}f}M')
    counts = Counter(texts)
    return [
        text if counts[text] == 1 else f'{text} ({history.name})'
        for text, history in zip(texts, histories)
    ]


def limits(histories, smooth):
    """Returns the range (low, high) of losses worth showing.

    That of all but each run's first tenth, whose fall would flatten what follows.
    """
    losses = []
    for history in histories:
        train_loss = smoothed(column(history.train, 'loss'), smooth)
        points = list(zip(column(history.train, 'step'), train_loss))
        points += [(record['step'], record['val_loss']) for record in history.evals]
        start = max(step for step, _ in points) / 10 if points else 0
        losses += [loss for step, loss in points if step >= start and math.isfinite(loss)]
    low = min(losses, default=0.0)
    high = max(losses, default=1.0)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def draw(histories, cfg):
    """Writes the picture to cfg.out.

    Raises ImportError without matplotlib, UserError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout='constrained')
    FigureCanvasAgg(figure)  # no window, no display
    axes = figure.add_subplot()
    for i, (history, label) in enumerate(zip(histories, labels(histories))):
        colour = COLOURS[i % len(COLOURS)]
        dashes = DASHES[i // len(COLOURS) % len(DASHES)]
        draw_run(axes, history, cfg, label, colour, dashes)
    axes.set_ylim(*limits(histories, cfg.smooth))
    axes.set_xlim(left=0)
    axes.set_xlabel(AXES[cfg.x])
    axes.set_ylabel('loss, nats per token')
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(alpha=0.2, linewidth=0.6)
    title = 'scheme, parameters\n(marked: validation, thin: training)'
    legend = axes.legend(frameon=False, title=title, alignment='left')
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain dollar signs
    try:
        Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(cfg.out, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(f'out={cfg.out}: the picture cannot be written ({error})') from None


def draw_run(axes, history, cfg, label, colour, dashes):
    """Draws the two curves of a run: training loss, thin, and validation loss, marked."""
    train_x, eval_x = positions(history, cfg.x)
    train_loss = smoothed(column(history.train, 'loss'), cfg.smooth)
    axes.plot(train_x, train_loss, color=colour, linewidth=0.8, alpha=0.45)
    style = {'linewidth': 1.8, 'marker': 'o', 'markersize': 4}
    val_loss = column(history.evals, 'val_loss')
    axes.plot(eval_x, val_loss, dashes, color=colour, label=label, **style)


def main(argv):
    if argv and not argv[0].startswith('-'):
        argv = ['--runs', *argv]
    cfg = build(PlotConfig, parse(argv, PlotConfig))
    check_json(cfg.json)
    histories = [read_history(folder) for folder in cfg.runs]
    summaries = [summary(history) for history in histories]
    print(comparison(summaries))
    write_json(cfg.json, without_nan(summaries))
    if cfg.out is not None:
        try:
            draw(histories, cfg)
            print(f'picture: {cfg.out}')
        except ImportError:
            warn('no picture without matplotlib; pip install matplotlib')


if __name__ == '__main__':
    run(main)
