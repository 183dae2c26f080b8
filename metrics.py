"""The record of a run: metrics.jsonl, and Weights & Biases on request."""
import json
import math
import os
from pathlib import Path

from configurator import UserError
from runtime import warn


def step_of(line):
    try:
        return float(json.loads(line)['step'])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):  # cut off by a kill or a full disk
        return math.inf


class Metrics:
    """metrics.jsonl, one JSON object a line, and wandb if asked for. On resume, records past the checkpoint are dropped."""

    def __init__(self, cfg, facts, step, wandb_id=None):
        self.path, self.wandb_id = Path(cfg.out_dir) / 'metrics.jsonl', wandb_id
        try:
            kept = []
            if step and self.path.exists():
                lines = self.path.read_text(encoding='utf-8', errors='replace').splitlines()
                kept = [line for line in lines if step_of(line) <= step]
            temporary = self.path.with_suffix('.tmp')
            temporary.write_text(''.join(line + '\n' for line in kept), encoding='utf-8')
            os.replace(temporary, self.path)
            self.file = open(self.path, 'a', encoding='utf-8')
        except OSError as error:
            raise UserError(f'{self.path}: cannot be written ({error.strerror})') from None
        self.wandb = None
        if cfg.wandb_log:
            import wandb
            self.wandb = wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or Path(cfg.out_dir).name,
                                    config=facts, dir=cfg.out_dir, id=wandb_id, resume='allow')
            self.wandb_id = self.wandb.id
        self.write({'step': step, **facts})

    def write(self, record):
        try:
            finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
            self.file.write(json.dumps(finite) + '\n')  # JSON has no NaN
            self.file.flush()
        except OSError as error:  # a full disk costs records, not the run
            warn(f'{self.path}: {error.strerror}; the record of step {record["step"]} is lost')
        if self.wandb and 'config' not in record:
            self.wandb.log(record, step=record['step'])
