"""Reads metrics.jsonl: what is known about a run afterwards, or while it goes on."""

import errno
import json
import math
from dataclasses import dataclass
from pathlib import Path

from nanonag.cli import UserError
from nanonag.configurator import HUGE, MAX_INT


@dataclass
class History:
    """What metrics.jsonl says about a run; training and evaluation records in order of steps."""

    name: str
    update: str
    params: int
    train: list[dict]
    evals: list[dict]


def count(value):
    """Returns a record's number of steps, tokens or parameters; ValueError if it is none."""
    if type(value) not in (int, float) or not 0 <= value < MAX_INT or value != int(value):
        raise ValueError(f'{value!r:.40} is no count')
    return int(value)


def measure(value):
    """Returns a record's loss or speed, NaN where it was not finite (JSON's null) or is HUGE.

    Raises ValueError if it is no number.
    """
    if value is not None and type(value) not in (int, float):
        raise ValueError(f'{value!r:.40} is no number')
    return float(value) if value is not None and abs(value) < HUGE else math.nan


# The records of a run: their keys, and what reads the values.
TRAIN_RECORD = {'step': count, 'tokens': count, 'loss': measure, 'tokens_per_s': measure}
EVAL_RECORD = {'step': count, 'tokens': count, 'train_loss': measure, 'val_loss': measure}


def printable(value):
    """Returns the name of a scheme or folder without line breaks, and short enough for a table."""
    return ''.join(char if char.isprintable() else '?' for char in str(value)[:60])


def read_history(folder):
    """Returns the History of the run in `folder`.

    A last line without its end is still being written and left out. A step that a resumed run
    repeated counts once. Raises UserError if anything else is missing or damaged.
    """
    path = Path(folder) / 'metrics.jsonl'
    start = {}
    train = {}
    evals = {}
    # What follows the last line end is empty, or half a line.
    for number, line in enumerate(read_lines(path, folder)[:-1], start=1):
        try:
            record = json.loads(line)
            if 'config' in record:  # once for each start of the run; the last one holds
                update = printable(record['config']['update'])
                start = {'update': update, 'params': count(record['params'])}
            if 'loss' in record or 'tokens_per_s' in record:
                row = {key: read(record[key]) for key, read in TRAIN_RECORD.items()}
                train[row['step']] = row
            if 'train_loss' in record or 'val_loss' in record:
                row = {key: read(record[key]) for key, read in EVAL_RECORD.items()}
                evals[row['step']] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f'{path}:{number}: damaged, not a record of train.py '
                f'({type(error).__name__}: {error}); mend or delete the line'
            ) from None
    if not start:
        raise UserError(
            f'{path}: no record with the config of the run; it has not started yet, or the file '
            'is damaged'
        )
    return History(
        name=printable(Path(folder).resolve().name),
        train=[train[step] for step in sorted(train)],
        evals=[evals[step] for step in sorted(evals)],
        **start,
    )


def read_lines(path, folder):
    """Returns the lines of a run's metrics.jsonl; UserError if there is none."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, 'not a file')  # a device or pipe has no end
        return path.read_text(encoding='utf-8', errors='replace').split('\n')
    except OSError as error:
        raise UserError(
            f'{folder}: no run to read there ({path}: {error.strerror}); name the out_dir of a run'
        ) from None
