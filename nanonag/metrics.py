"""The record of a run: metrics.jsonl, and Weights & Biases on request."""

import json
import math
import os
import statistics
from collections import deque
from pathlib import Path

from nanonag.cli import UserError, warn

# a spike: a loss so many standard deviations above the mean of so many training records before it
WINDOW, DEVIATIONS = 50, 5


def parsed(line):
    """The record in a line; one of step infinity for a line cut off by a kill or a full disk."""
    try:
        record = json.loads(line)
        return {**record, 'step': float(record['step'])}
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return {'step': math.inf}


def other_units(val_loss, meta):
    """The validation loss (nats per token) in other units: perplexity; bits per character if tokens
    are characters; bits per byte of UTF-8 if meta.json tells the bytes of val (end-of-text tokens
    cost bits and stand for no bytes)."""
    bits, size = val_loss / math.log(2), meta.get('bytes', {}).get('val')
    return (
        {'val_perplexity': math.exp(min(val_loss, 700))}
        | ({'val_bits_per_char': bits} if meta['tokenizer']['kind'] == 'char' else {})
        | ({'val_bits_per_byte': bits * meta['tokens']['val'] / size} if size else {})
    )


class Metrics:
    """metrics.jsonl, one JSON object a line, and wandb if asked for. On resume, records past the
    checkpoint are dropped.

    Records that can't be written (a full disk) are written with a later one.
    """

    def __init__(self, cfg, facts, step, wandb_id=None):
        self.path, self.wandb_id = Path(cfg.out_dir) / 'metrics.jsonl', wandb_id
        self.losses, self.unwritten, self.head = deque(maxlen=WINDOW), '', ''
        try:
            kept = []
            if step and self.path.exists():
                for line in self.path.read_text(encoding='utf-8', errors='replace').splitlines():
                    record = parsed(line)
                    if record['step'] <= step:
                        kept.append(line + '\n')
                        self.losses.extend(
                            loss for loss in [record.get('loss')] if isinstance(loss, float)
                        )
            content = ''.join(kept).encode()
            temporary = self.path.with_suffix('.tmp')
            with open(temporary, 'wb') as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            raise UserError(f'{self.path}: cannot be written ({error.strerror})') from None
        self.size = len(content)  # bytes of whole records in the file
        self.wandb = None
        if cfg.wandb_log:
            import wandb

            self.wandb = wandb.init(
                project=cfg.wandb_project,
                name=cfg.wandb_run_name or Path(cfg.out_dir).name,
                config=facts,
                dir=cfg.out_dir,
                id=wandb_id,
                resume='allow',
            )
            self.wandb_id = self.wandb.id
        self.write({'step': step, **facts})

    def write(self, record):
        if 'loss' in record:
            record = record | {'spike': self.is_spike(record['loss'])}
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        line = json.dumps(finite) + '\n'  # JSON has no NaN
        self.head = self.head or line
        self.unwritten += line
        try:
            # by its name each time: the folder may have been deleted and made again
            with open(self.path, 'ab') as file:
                if file.tell() < self.size:
                    warn(
                        f'{self.path} has VANISHED with the records before step {record["step"]}; starting it again'
                    )
                    self.size, self.unwritten = 0, self.head + self.unwritten
                file.truncate(self.size)  # half a line of a write that failed
                file.write(self.unwritten.encode())
            self.size += len(self.unwritten.encode())
            self.unwritten = ''
        except OSError as error:  # costs nothing unless the run ends before there is room again
            warn(
                f'{self.path}: {error.strerror}; the record of step {record["step"]} waits in memory for the next one'
            )
        if self.wandb and 'config' not in record:
            self.wandb.log(record, step=record['step'])

    def is_spike(self, loss):
        """Whether it is not finite or far above the losses before it, which a resumed run reads
        from metrics.jsonl."""
        before = list(self.losses)
        if not math.isfinite(loss):
            return True
        self.losses.append(loss)
        return len(before) >= WINDOW // 5 and loss > statistics.fmean(
            before
        ) + DEVIATIONS * statistics.pstdev(before)
