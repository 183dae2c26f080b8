"""The record of a run: metrics.jsonl, and Weights & Biases on request."""

import json
import math
import statistics
from collections import deque
from pathlib import Path

from nanonag.cli import UserError, warn
from nanonag.files import write_atomically

# A loss is a spike if it lies more than DEVIATIONS standard deviations above the mean of the last
# WINDOW training losses, of which there have to be MIN_LOSSES.
WINDOW = 50
MIN_LOSSES = 10
DEVIATIONS = 5


class Metrics:
    """Writes metrics.jsonl, one JSON object per line, and logs to wandb if cfg.wandb_log is set.

    Records that cannot be written, on a full disk for example, are kept and written together with
    a later one.

    cfg: the run's configuration, with out_dir and the wandb options. facts: what the first record
    says about the run. step: that of the checkpoint from which the run resumes, 0 for a new run;
    records of later steps are dropped from the file. wandb_id: the id of the wandb run to continue,
    None for a new one; the attribute of that name then holds the id of the new one.

    Raises UserError if the file cannot be written at the start.
    """

    def __init__(self, cfg, facts, step, wandb_id=None):
        self.path = Path(cfg.out_dir) / 'metrics.jsonl'
        try:
            lines, losses = kept_records(self.path, step)
            content = ''.join(lines).encode()
            write_atomically(self.path, lambda file: file.write(content))
        except OSError as error:
            raise UserError(f'{self.path}: cannot be written ({error.strerror})') from None
        self.losses = deque(losses, maxlen=WINDOW)
        self.size = len(content)  # bytes of complete records in the file
        self.unwritten = ''
        self.header = ''  # the first record, which a file that is started again begins with
        self.wandb = start_wandb(cfg, facts, wandb_id) if cfg.wandb_log else None
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.write({'step': step, **facts})

    def write(self, record):
        """Appends a record, a dict with a `step`, as one line and logs it to wandb.

        A training record, one with a `loss`, also gets `spike`. Numbers that are not finite, which
        JSON lacks, are written as null. An error of the file system gives a warning only.
        """
        if 'loss' in record:
            record = record | {'spike': self.is_spike(record['loss'])}
        line = json.dumps({key: finite_or_none(value) for key, value in record.items()}) + '\n'
        self.header = self.header or line
        self.unwritten += line
        try:
            self.append_unwritten(record['step'])
        except OSError as error:  # lost only if the run ends before there is room again
            warn(
                f'{self.path}: {error.strerror}; the record of step {record["step"]} waits in '
                f'memory for the next one'
            )
        if self.wandb and 'config' not in record:
            self.wandb.log(record, step=record['step'])

    def append_unwritten(self, step):
        """Writes the lines that are not in the file yet. Raises OSError if that fails."""
        # Opened by name each time, since the folder may have been deleted and made again.
        with open(self.path, 'ab') as file:
            if file.tell() < self.size:
                warn(
                    f'{self.path} has VANISHED with the records before step {step}; '
                    f'starting it again'
                )
                self.size = 0
                self.unwritten = self.header + self.unwritten
            file.truncate(self.size)  # removes part of a line that an earlier failed write left
            content = self.unwritten.encode()
            file.write(content)
        # Only after the file has been closed without an error is the content certainly written.
        self.size += len(content)
        self.unwritten = ''

    def is_spike(self, loss):
        """Whether the loss is not finite or far above the losses before it.

        It depends on training losses alone, which a resumed run reads from metrics.jsonl.
        """
        if not math.isfinite(loss):
            return True
        before = list(self.losses)
        self.losses.append(loss)
        if len(before) < MIN_LOSSES:
            return False
        return loss > statistics.fmean(before) + DEVIATIONS * statistics.pstdev(before)


def kept_records(path, step):
    """The records of a metrics.jsonl up to and including the step from which a run resumes.

    Returns (lines, losses): the lines, each with its newline, and the training losses in them. Both
    are empty at step 0 or if there is no file. Raises OSError if the file cannot be read.
    """
    lines: list[str] = []
    losses: list[float] = []
    if step == 0 or not path.exists():
        return lines, losses
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        record = parse_record(line)
        if record is not None and record['step'] <= step:
            lines.append(line + '\n')
            if isinstance(record.get('loss'), float):
                losses.append(record['loss'])
    return lines, losses


def parse_record(line):
    """The record in a line, `step` as a float; None if a kill or a full disk cut the line off."""
    try:
        record = json.loads(line)
        return {**record, 'step': float(record['step'])}
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def start_wandb(cfg, facts, wandb_id):
    """Starts a run at Weights & Biases, or continues the one of that id; returns the run."""
    import wandb

    return wandb.init(
        project=cfg.wandb_project,
        name=cfg.wandb_run_name or Path(cfg.out_dir).name,
        config=facts,
        dir=cfg.out_dir,
        id=wandb_id,
        resume='allow',
    )


def finite_or_none(value):
    """The value itself, or None for a float that is NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def other_units(val_loss, meta):
    """The validation loss in other units than nats per token, as a dict of metrics.

    val_perplexity; val_bits_per_char if each token is a character; val_bits_per_byte, of UTF-8, if
    `meta`, the content of meta.json, counts the bytes of the validation text. End-of-text tokens
    cost bits there and stand for no bytes.
    """
    bits = val_loss / math.log(2)
    units = {'val_perplexity': math.exp(min(val_loss, 700))}  # exp(710) overflows
    if meta['tokenizer']['kind'] == 'char':
        units['val_bits_per_char'] = bits
    size = meta.get('bytes', {}).get('val')
    if size:
        units['val_bits_per_byte'] = bits * meta['tokens']['val'] / size
    return units
