"""The state of a training run beside the model: what a checkpoint holds and a resume reads."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanonag import checkpoint, parallel
from nanonag.checkpoint import shards
from nanonag.cli import UserError


@dataclass
class RunState:
    """What changes while a run trains."""

    optimizer: Any
    scaler: torch.amp.GradScaler
    step: int = 0  # optimizer steps taken
    best_val_loss: float = math.inf
    skipped: int = 0  # steps in a row whose gradient was not finite
    wandb_id: str | None = None

    def count(self, grad_norm):
        """Counts a step; one whose gradient is not finite has changed nothing."""
        self.step += 1
        self.skipped = 0 if math.isfinite(grad_norm) else self.skipped + 1

    def to_dict(self, plan, model, rng):
        """All that a checkpoint holds; every rank must call it."""
        gather = not plan.cfg.save_sharded
        return {
            'version': checkpoint.VERSION,
            'optimizer': self.optimizer.state_dict(gather),
            'model': parallel.whole_state(model) if gather else model.state_dict(),
            'gpt_config': asdict(model.cfg),
            'train_config': asdict(plan.options),
            'tokenizer': plan.meta['tokenizer'],
            'data': plan.meta['sha256'],
            'step': self.step,
            'best_val_loss': self.best_val_loss,
            'skipped': self.skipped,
            'scaler': self.scaler.state_dict(),
            'rng': rng,
            'wandb_id': self.wandb_id,
        }

    def load(self, plan, model):
        """Continues the plan's checkpoint, whose weights ``model`` has unless they are in shards.

        Raises UserError if the checkpoint does not fit.
        """
        state, cfg = plan.state, plan.cfg
        if state['step'] > cfg.max_iters:
            raise UserError(
                f'max_iters={cfg.max_iters}, but the run in {cfg.out_dir} is at step '
                f'{state["step"]} already'
            )
        for name in ('step', 'best_val_loss', 'skipped', 'wandb_id'):
            setattr(self, name, state[name])
        try:
            self.optimizer.load_state_dict(state['optimizer'])
            if plan.from_shards:
                shards.load(cfg.out_dir, state, model, self.optimizer)
            if state['scaler']:  # empty for a run without float16
                self.scaler.load_state_dict(state['scaler'])
        except (ValueError, KeyError, RuntimeError) as error:
            raise UserError(
                f'{cfg.out_dir}: the checkpoint does not fit its model: {error}'
            ) from None
