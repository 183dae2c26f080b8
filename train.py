"""
Trains one update scheme on a prepared data set.

    python train.py config/demo_lt_nag.py                                    GPU, Mac or CPU
    torchrun --standalone --nproc_per_node=8 train.py config/owt_lt_nag.py   8 GPUs of one machine
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
        train.py config/owt_lt_nag.py                                        several machines

Every option can be given as --key=value; config files and options apply from left to right.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    show_help(__doc__, 'model.py:GPTConfig', 'train.py:TrainConfig')  # before torch is imported

import contextlib
import importlib.util
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

import start
from nanonag import checkpoint, memory, parallel, report, runtime
from nanonag.cli import UserError, check_launcher, run
from nanonag.configurator import FilePath, at_least, between, require
from nanonag.data.loader import TrainLoader
from nanonag.evaluation import evaluate, in_words
from nanonag.metrics import Metrics, other_units
from nanonag.optim import configure_optimizer, describe, lr_multiplier
from nanonag.progress import Progress, every
from nanonag.run_state import RunState

STOPPED = 75  # exit code after a signal, the state saved: EX_TEMPFAIL, "try again"


@dataclass(frozen=True)
class TrainConfig:
    """The run. None stands for a default that depends on the rest; :meth:`resolve` fills it in."""

    out_dir: FilePath = 'out'  # the run's folder: checkpoints and metrics.jsonl
    dataset: FilePath = 'openwebtext'  # a folder under data/, or a path to any prepared folder
    # scratch, resume, auto (resume if there is a checkpoint), gpt2[-medium|-large|-xl], or a
    # checkpoint file
    init_from: FilePath = 'scratch'
    overwrite: bool = False  # scratch: delete the run that out_dir holds
    seed: int = 1337  # of the weights, the data order and dropout
    # ---- batch
    batch_size: int = 12  # sequences in a micro-batch
    gradient_accumulation_steps: int = 40  # micro-batches in a step, all processes together
    max_iters: int = 30000  # steps; 0 only evaluates and saves
    # ---- optimizer
    # muon (default): for the matrices inside the layers; ngpt's default: adamw
    optimizer: Literal['adamw', 'muon'] | None = None
    learning_rate: float | None = None  # AdamW's peak rate; default 6e-4, for ngpt 15e-4
    # AdamW's, on matrices and embeddings; default 0.1, for ngpt 0
    weight_decay: float | None = None
    beta1: float = 0.9  # AdamW's
    beta2: float = 0.95  # AdamW's
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    # Muon's peak rate, scaled per matrix by sqrt(max(1, rows / columns)); default 0.004
    muon_lr: float | None = None
    muon_momentum: float | None = None  # with Nesterov; default 0.95
    muon_weight_decay: float | None = None  # default 0
    # orthogonalize c_attn whole (default, the papers' code) or q, k, v each
    muon_qkv: Literal['fused', 'split'] | None = None
    scalar_lr_mult: float = 5.0  # the rate of mu, beta, gamma, nu over learning_rate
    # ---- schedule, of every group
    schedule: Literal['cosine', 'wsd'] = 'cosine'  # cosine, or warmup-stable-decay
    decay_lr: bool = True  # False: constant, without warmup
    warmup_iters: int | None = None  # default max_iters / 10, for ngpt 0
    lr_decay_iters: int | None = None  # step at which min_lr is reached; default max_iters
    min_lr: float | None = None  # default learning_rate / 10, for ngpt 0
    wsd_decay: float | None = None  # wsd: the decay's share of lr_decay_iters; default 0.2
    # ---- evaluation, logging, checkpoints
    eval_interval: int = 1000  # steps between evaluations; 0: only at the end
    eval_iters: int = 200  # batches of each split in an evaluation, always the same windows
    eval_batch_size: int = 12  # their sequences; independent of batch_size
    full_eval: bool = False  # evaluate on every window of val
    eval_only: bool = False  # one evaluation, nothing written
    dry_run: bool = False  # only print parameters and memory; nothing is read or written
    log_interval: int = 10  # steps between training records; 0: none
    always_save_checkpoint: bool = True  # at every evaluation, not only after an improvement
    save_interval: int = 0  # steps between further checkpoints; 0: none
    keep_last: int = 1  # older checkpoints kept beside ckpt.pt
    max_skipped: int = 10  # steps in a row with a non-finite gradient before the run ends
    wandb_log: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = 'nanonag'
    wandb_run_name: str = ''  # default: the name of out_dir
    # ---- system
    zero: bool = False  # share the optimizer's state and work among the processes; the same result
    parallel: Literal['ddp', 'fsdp'] = 'ddp'  # every process holds the model, or a shard of it
    save_sharded: bool = False  # fsdp: every process writes its own shard of a checkpoint
    activation_checkpointing: bool = False  # compute each layer twice, keep no activations
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # between processes
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    # of the matmuls; auto: bfloat16 where hardware has it
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'
    compile: Literal['auto', 'True', 'False'] = 'auto'  # auto: on CUDA

    def __post_init__(self):
        at_least(self, batch_size=1, gradient_accumulation_steps=1, eval_iters=1, max_skipped=1)
        at_least(self, eval_batch_size=1, lr_decay_iters=1, max_iters=0, eval_interval=0, seed=0)
        at_least(self, log_interval=0, save_interval=0, keep_last=0, warmup_iters=0, grad_clip=0)
        at_least(self, weight_decay=0, muon_weight_decay=0, min_lr=0)
        between(self, learning_rate=(0, 1e6), muon_lr=(0, 1e6), scalar_lr_mult=(0, 1e6))
        between(self, beta1=(0, 1), beta2=(0, 1), muon_momentum=(0, 1), wsd_decay=(0, 1))
        product = f'batch_size x gradient_accumulation_steps = {self.sequences}'
        require(self.sequences < 2**31, f'{product}: at most 2^31 sequences a step')
        require(self.out_dir, 'out_dir is empty: name the folder of the run')
        if self.wandb_log and importlib.util.find_spec('wandb') is None:
            raise UserError('wandb_log=True needs the package wandb: pip install wandb')

    @property
    def sequences(self):
        """Sequences in a step, all processes together."""
        return self.batch_size * self.gradient_accumulation_steps

    def resolve(self, normalized):
        """The same with every None that matters replaced, for a scheme on the sphere or not."""
        rate = self.learning_rate or (15e-4 if normalized else 6e-4)
        optimizer = self.optimizer or ('adamw' if normalized else 'muon')
        defaults = {'learning_rate': rate, 'optimizer': optimizer}
        defaults['weight_decay'] = 0.0 if normalized else 0.1
        if optimizer == 'muon':
            defaults |= {'muon_lr': 0.004, 'muon_momentum': 0.95}
            defaults |= {'muon_weight_decay': 0.0, 'muon_qkv': 'fused'}
        if self.decay_lr:
            defaults['lr_decay_iters'] = max(1, self.max_iters)
            defaults['warmup_iters'] = 0 if normalized else self.max_iters // 10
            defaults['min_lr'] = 0.0 if normalized else rate / 10
        if self.decay_lr and self.schedule == 'wsd':
            defaults['wsd_decay'] = 0.2
        unset = [name for name in defaults if getattr(self, name) is None]
        cfg = replace(self, **{name: defaults[name] for name in unset})
        too_high = f'min_lr={self.min_lr} is above learning_rate={rate}'
        require(self.min_lr is None or self.min_lr <= rate, too_high)
        if self.decay_lr and self.lr_decay_iters is not None:
            lengths = f'warmup_iters={cfg.warmup_iters}, lr_decay_iters={cfg.lr_decay_iters}'
            overlap = f'{lengths}: the decay would end before the warmup; change either'
            require(cfg.warmup_iters <= cfg.lr_decay_iters, overlap)
        return cfg


# ---------------------------------------------------------------------- evaluating and training


def evaluate_splits(model, plan, rt):
    """{'train_loss', 'val_loss'}: mean losses in nats per token."""
    cfg = plan.cfg
    count = cfg.eval_iters * cfg.eval_batch_size
    counts = {'train': count, 'val': plan.splits['val'].n_windows if cfg.full_eval else count}
    with memory.memory_for(memory.in_less(cfg, 'eval_batch_size', 'eval_iters'), SystemExit):
        return {
            f'{name}_loss': evaluate(model, split, counts[name], cfg.eval_batch_size, rt)
            for name, split in plan.splits.items()
        }


def train_step(model, trained, optimizer, scaler, batches, micro_steps, grad_clip, rt):
    """One optimizer step over this rank's next ``micro_steps`` batches.

    ``trained`` is what calls ``model``: DDP's wrapper, or the model itself. A gradient that is not
    finite leaves the weights as they are. Returns the mean loss of these batches (0-dim, nats per
    token) and the norm of the whole gradient (float).
    """
    loss = torch.zeros((), device=rt.device)
    for micro_step in range(micro_steps):
        x, y = next(batches)
        is_last = micro_step == micro_steps - 1  # gradients cross the network once a step
        with contextlib.nullcontext() if is_last else parallel.only_local(trained):
            with rt.autocast():
                _, micro_loss = trained(x, y)
            # DDP averages over the ranks, so the divisor is this rank's count
            scaler.scale(micro_loss / micro_steps).backward()
        loss += micro_loss.detach() / micro_steps
    scaler.unscale_(optimizer)
    grad_norm = parallel.clip_grad_norm(model, grad_clip or math.inf)  # waits for the GPU
    if math.isfinite(grad_norm):
        optimizer.step()
    scaler.update()
    model.zero_grad(set_to_none=True)
    return loss, grad_norm


# --------------------------------------------------------------------------------------- the run


def main(argv):
    check_launcher()
    plan = start.plan(argv, TrainConfig)  # what a user can get wrong is found here
    if plan is None:  # --dry_run
        return
    rt = start.join(plan)
    rt.print(start.summary(plan, rt))
    model, compiled = place(plan, rt)
    if plan.cfg.eval_only:
        losses = evaluate_splits(model, plan, rt)
        rt.print(f'{in_words(losses)} nats per token')
        return runtime.stop()
    state = RunState(
        configure_optimizer(model, plan.cfg, rt.dtype),
        torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16),
    )
    rt.print(describe(state.optimizer))
    if plan.resumes:
        state.load(plan, model)
        rt.print(start.changes(plan))
        plan.state['model'] = plan.state['optimizer'] = None  # copied; their memory is free again
    outputs = open_outputs(plan, state, compiled, rt)
    caught = fit(plan, state, model, outputs, rt)
    saved = outputs.saver is None or outputs.saver.wait()
    runtime.stop()
    out_dir = plan.cfg.out_dir
    if not saved:
        raise SystemExit(f'the final checkpoint could not be written to {out_dir}; see above')
    if caught:
        rt.print(
            f'{caught}: saved step {state.step:,} in {out_dir}; continue with --init_from=resume '
            f'--out_dir={out_dir}'
        )
        raise SystemExit(STOPPED)
    rt.print(
        f'done: {state.step:,} steps, best val loss {state.best_val_loss:.4f}, checkpoint in '
        f'{out_dir}/ckpt.pt'
    )


def place(plan, rt):
    """Puts the model on the device, sharded or compiled as asked -> (model, whether compiled)."""
    cfg, model = plan.cfg, plan.model
    if cfg.activation_checkpointing:
        parallel.checkpoint_activations(model)
    if cfg.parallel == 'fsdp':
        parallel.shard(model, rt)
    remedy = (
        'try --parallel=fsdp on several GPUs, or a smaller model; --dry_run=True estimates both'
    )
    with memory.memory_for(remedy, SystemExit):
        model.to(rt.device)
    compiled = cfg.parallel == 'ddp' and runtime.compile_model(model, cfg.compile, rt)
    rt.print(f'{rt.device_name()}, {rt.dtype_name}, {"compiled" if compiled else "not compiled"}')
    return model, compiled


class Outputs(NamedTuple):
    """What a run writes to; None where that is another rank's work."""

    lock: Any  # an open file, by which other processes are refused until this one ends
    metrics: Metrics | None
    saver: checkpoint.Saver | None


def open_outputs(plan, state, compiled, rt):
    """Claims the run's folder, which nothing has written to before -> Outputs."""
    cfg = plan.cfg
    lock = metrics = saver = None
    if rt.is_main:
        lock = checkpoint.claim(cfg.out_dir)
        if not plan.resumes:
            checkpoint.clear(cfg.out_dir)
        facts = report.training_facts(plan.config(), rt, plan.model.num_params(), compiled)
        metrics = Metrics(cfg, facts, state.step, state.wandb_id)
        state.wandb_id = metrics.wandb_id
    if rt.is_main or cfg.save_sharded:
        group = dist.new_group(backend='gloo') if cfg.save_sharded else None  # the saver's threads
        step = state.step if plan.resumes else None
        saver = checkpoint.Saver(cfg.out_dir, cfg.keep_last, step, state.best_val_loss, group)
    return Outputs(lock, metrics, saver)


def fit(plan, state, model, outputs, rt):
    """Trains until max_iters or a signal, whose name is returned; the state is saved by then."""
    cfg = plan.cfg
    trained = parallel.replicate(model, rt)
    micro_batches = cfg.gradient_accumulation_steps
    place_in_batch = (state.step, rt.rank, rt.world_size)
    loader = TrainLoader(
        plan.splits['train'], cfg.batch_size, micro_batches, cfg.seed, *place_in_batch, rt.device
    )
    batches = iter(loader)
    progress = Progress(model.cfg.update, cfg, state, plan.tokens_per_step, outputs.metrics, rt)
    signals = runtime.Signals()
    restored_step = state.step if plan.resumes else None
    if plan.resumes:
        runtime.restore_rng(rt, plan.state['rng'], model.cfg.dropout)  # nothing may draw after it
    while True:
        stopping = rt.any(signals.caught is not None)
        finished = state.step >= cfg.max_iters
        if state.step != restored_step:  # its checkpoint was written after its evaluation
            evaluated = finished or every(cfg.eval_interval, state.step)
            improved = evaluated and record_evaluation(plan, state, model, outputs.metrics, rt)
            worth_saving = evaluated and (improved or cfg.always_save_checkpoint)
            due = state.step > 0 and (worth_saving or every(cfg.save_interval, state.step))
            if finished or stopping or due:
                save(plan, state, model, outputs.saver, improved, rt)
        if finished or stopping:
            progress.close()
            return None if finished else signals.caught

        t0 = time.perf_counter()
        state.optimizer.set_lr(lr_multiplier(state.step, cfg))
        remedy = memory.in_less(cfg, 'batch_size', 'gradient_accumulation_steps')
        with memory.memory_for(remedy, SystemExit):
            micro_steps = micro_batches // rt.world_size
            optimizer, scaler = state.optimizer, state.scaler
            loss, grad_norm = train_step(
                model, trained, optimizer, scaler, batches, micro_steps, cfg.grad_clip, rt
            )
        state.count(grad_norm)
        progress.step(loss, grad_norm, time.perf_counter() - t0)


def record_evaluation(plan, state, model, metrics, rt):
    """Evaluates, writes the record, and returns whether the validation loss is the best so far."""
    losses = evaluate_splits(model, plan, rt)
    val_loss = losses['val_loss']
    improved = val_loss < state.best_val_loss
    state.best_val_loss = min(state.best_val_loss, val_loss)
    rt.print(f'step {state.step:,}: {in_words(losses)}')
    if rt.is_main:
        record = {'step': state.step, 'tokens': state.step * plan.tokens_per_step, **losses}
        record['best_val_loss'] = state.best_val_loss
        metrics.write(record | other_units(val_loss, plan.meta))
    return improved


def save(plan, state, model, saver, best, rt):
    """Hands a checkpoint to the saver, also as best.pt if ``best``; every rank must call it."""
    content = state.to_dict(plan, model, rt.gather(runtime.rng_state(rt.device)))
    if saver is not None:
        saver.save(content, best)


if __name__ == '__main__':
    run(main)
