"""What a training run reports while it trains: its records, a progress bar, warnings."""

from tqdm import tqdm


class Progress:
    """The training records of a run and its progress bar.

    Args:
        name: shown before the bar.
        cfg: a TrainConfig; of it log_interval and max_iters are used.
        run: the RunState.
        tokens_per_step: of all processes together.
        metrics: where the records go; None on other ranks than 0.
        rt: the Runtime.
    """

    def __init__(self, name, cfg, run, tokens_per_step, metrics, rt):
        self.cfg = cfg
        self.run = run
        self.tokens_per_step = tokens_per_step
        self.metrics = metrics
        self.rt = rt
        self.first_step = run.step
        self.seconds = 0.0  # of training since the last record
        self.bar = tqdm(
            total=cfg.max_iters,
            initial=run.step,
            desc=name,
            unit='step',
            disable=None if rt.is_main else True,
        )

    def step(self, loss, grad_norm, seconds):
        """Reports a step that took ``seconds``; every rank must call it.

        Raises SystemExit after too many steps in a row whose gradient was not finite.
        """
        run = self.run
        self.seconds += seconds
        if run.skipped:
            self.rt.print(
                f'warning: step {run.step:,}: gradient norm {grad_norm}, weights unchanged '
                f'({run.skipped} in a row)'
            )
        # the scaler of float16 halves its way from 2^16 down to its scale first
        patience = self.cfg.max_skipped + (20 if run.scaler.is_enabled() else 0)
        if run.skipped >= patience:
            raise SystemExit(
                f'stopped at step {run.step:,}: {run.skipped} steps in a row with a non-finite '
                f'gradient; the last checkpoint is untouched; try a lower learning rate'
            )
        self.bar.update()
        if every(self.cfg.log_interval, run.step):
            self.record(self.rt.mean(loss), grad_norm)
            self.seconds = 0.0

    def record(self, loss, grad_norm):
        """Writes a training record."""
        run = self.run
        steps = min(self.cfg.log_interval, run.step - self.first_step)
        speed = steps * self.tokens_per_step / self.seconds
        rates = run.optimizer.lr()
        if not self.rt.is_main:
            return
        self.metrics.write(
            {
                'step': run.step,
                'tokens': run.step * self.tokens_per_step,
                'loss': loss,
                'lr': rates['embeddings'],
                'grad_norm': grad_norm,
                'tokens_per_s': speed,
                'skipped': run.skipped,
                'lrs': rates,
            }
        )
        self.bar.set_postfix_str(f'loss {loss:.4f}, {speed:,.0f} tokens/s')
        if self.bar.disable:
            minutes = (self.cfg.max_iters - run.step) * self.tokens_per_step / speed / 60
            self.rt.print(
                f'step {run.step:,}/{self.cfg.max_iters:,}: loss {loss:.4f}, gradient norm '
                f'{grad_norm:.2f}, {speed:,.0f} tokens/s, {minutes:.1f} min left'
            )

    def close(self):
        self.bar.close()


def every(interval, step):
    """Whether something that happens each ``interval`` steps (0: never) happens at this one."""
    return interval > 0 and step % interval == 0
