"""
Trains one update scheme on a prepared data set.

    python train.py config/demo_lt_nag.py                                    one process: GPU, Mac or CPU
    torchrun --standalone --nproc_per_node=8 train.py config/owt_lt_nag.py   eight GPUs of one machine
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py ...   several machines

Every option can be given as --key=value; config files and options apply from left to right.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    # before torch is imported: instant
    show_help(__doc__, 'model.py:GPTConfig', 'train.py:TrainConfig')

import contextlib
import importlib.util
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

from model import SCHEMES, GPTConfig
from nanonag import checkpoint, memory, parallel, runtime
from nanonag.checkpoint import shards
from nanonag.cli import UserError, run, world
from nanonag.configurator import at_least, between, build, parse
from nanonag.data.folder import find_data, read_meta
from nanonag.data.loader import Split, TrainLoader, eval_windows
from nanonag.metrics import Metrics, other_units
from nanonag.optim import configure_optimizer, describe, lr_multiplier
from nanonag.report import code_version
from start import PRETRAINED, continued, preview, starting_model, starting_state

# exit code after a signal, the state saved: EX_TEMPFAIL, "try again"; 0: finished, 2: user's
# mistake
STOPPED = 75


@dataclass(frozen=True)
class TrainConfig:
    """The run. None stands for a default that depends on the rest; `resolve` fills it in."""

    out_dir: str = 'out'  # the run's folder: checkpoints and metrics.jsonl
    dataset: str = 'openwebtext'  # a folder under data/, or a path to any prepared folder
    # scratch, resume, auto (resume if there is something), gpt2[-medium|-large|-xl], or a
    # checkpoint file
    init_from: str = 'scratch'
    overwrite: bool = False  # scratch: delete the run that out_dir holds
    seed: int = 1337  # of the weights, the data order and dropout
    # ---- batch: batch_size x gradient_accumulation_steps sequences an update, whatever the number of processes
    batch_size: int = 12  # sequences in a micro-batch
    gradient_accumulation_steps: int = 40  # micro-batches in an update, all processes together
    max_iters: int = 30000  # updates; 0 only evaluates and saves
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
    lr_decay_iters: int | None = None  # update at which min_lr is reached; default max_iters
    min_lr: float | None = None  # default learning_rate / 10, for ngpt 0
    # wsd: the share of lr_decay_iters that the decay takes; default 0.2
    wsd_decay: float | None = None
    # ---- evaluation, logging, checkpoints
    eval_interval: int = 1000  # updates between evaluations; 0: only at the end
    eval_iters: int = 200  # batches of each split in an evaluation, always the same windows
    # their sequences; apart from batch_size, so that splitting an update otherwise changes no
    # evaluation
    eval_batch_size: int = 12
    full_eval: bool = False  # evaluate on every window of val
    eval_only: bool = False  # one evaluation, nothing written
    dry_run: bool = False  # only print parameters and memory, nothing is allocated, read or written
    log_interval: int = 10  # updates between training records; 0: none
    always_save_checkpoint: bool = True  # at every evaluation, not only after an improvement
    save_interval: int = 0  # updates between further checkpoints; 0: none
    keep_last: int = 1  # older checkpoints kept beside ckpt.pt
    max_skipped: int = 10  # updates in a row with a non-finite gradient before the run gives up
    wandb_log: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = 'nanonag'
    wandb_run_name: str = ''  # default: the name of out_dir
    # ---- system
    zero: bool = False  # share the optimizer's state and work among the processes; the same result
    parallel: Literal['ddp', 'fsdp'] = 'ddp'  # every process holds the model, or a shard of it
    # fsdp: every process writes its own shard of a checkpoint, nothing is gathered
    save_sharded: bool = False
    # compute each layer twice rather than keep its activations
    activation_checkpointing: bool = False
    backend: Literal['auto', 'nccl', 'gloo'] = 'auto'  # between processes
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    # of the matmuls; auto: bfloat16 where hardware has it
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'
    compile: Literal['auto', 'True', 'False'] = 'auto'  # auto: on CUDA

    def __post_init__(self):
        at_least(
            self,
            batch_size=1,
            gradient_accumulation_steps=1,
            max_iters=0,
            eval_interval=0,
            eval_iters=1,
            eval_batch_size=1,
            log_interval=0,
            save_interval=0,
            keep_last=0,
            max_skipped=1,
            seed=0,
            warmup_iters=0,
            lr_decay_iters=1,
            weight_decay=0,
            muon_weight_decay=0,
            grad_clip=0,
            min_lr=0,
        )
        between(
            self,
            learning_rate=(0, 1e6),
            muon_lr=(0, 1e6),
            scalar_lr_mult=(0, 1e6),
            muon_momentum=(0, 1),
            beta1=(0, 1),
            beta2=(0, 1),
            wsd_decay=(0, 1),
        )
        if self.sequences >= 2**31:
            raise UserError(
                f'batch_size x gradient_accumulation_steps = {self.sequences}: at most 2^31 sequences an update'
            )
        if not self.out_dir:
            raise UserError('out_dir is empty: name the folder of the run')
        if self.wandb_log and importlib.util.find_spec('wandb') is None:
            raise UserError('wandb_log=True needs the package wandb: pip install wandb')
        if self.overwrite and self.init_from in ('resume', 'auto'):
            raise UserError(
                f'overwrite=True would delete the run that init_from={self.init_from} goes on with; leave one out'
            )
        if self.parallel == 'fsdp' and (self.zero or self.compile == 'True'):
            raise UserError(
                'parallel=fsdp shards the optimizer already and runs uncompiled: leave out zero and compile'
            )
        if self.save_sharded and self.parallel != 'fsdp':
            raise UserError(
                "save_sharded=True: only parallel=fsdp has shards to save; leave it out, or undo a checkpoint's with "
                '--save_sharded=False'
            )

    def resolve(self, normalized, learns_scalars=True):
        """The same with every None filled in, for a scheme on the sphere or not; UserError for
        options without effect."""
        optimizer = self.optimizer or ('adamw' if normalized else 'muon')
        rate = self.learning_rate or (15e-4 if normalized else 6e-4)
        muon, decay = optimizer == 'muon', self.decay_lr
        if self.min_lr is not None and self.min_lr > rate:
            raise UserError(f'min_lr={self.min_lr} is above learning_rate={rate}')
        defaults = {  # name: (has an effect, default)
            'optimizer': (True, optimizer),
            'learning_rate': (True, rate),
            'weight_decay': (True, 0.0 if normalized else 0.1),
            'warmup_iters': (decay, 0 if normalized else self.max_iters // 10),
            'muon_lr': (muon, 0.004),
            'muon_momentum': (muon, 0.95),
            'muon_weight_decay': (muon, 0.0),
            'muon_qkv': (muon, 'fused'),
            'lr_decay_iters': (decay, max(1, self.max_iters)),
            'min_lr': (decay, 0.0 if normalized else rate / 10),
            'wsd_decay': (decay and self.schedule == 'wsd', 0.2),
        }
        needs = {
            'schedule': decay,
            'scalar_lr_mult': learns_scalars,
            'wandb_project': self.wandb_log,
            'wandb_run_name': self.wandb_log,
        }
        effects = {name: has_effect for name, (has_effect, _) in defaults.items()} | needs
        if idle := [
            name
            for name, has_effect in effects.items()
            if not has_effect and getattr(self, name) != getattr(TrainConfig, name)
        ]:
            raise UserError(
                f'no effect with optimizer={optimizer}, decay_lr={decay}, schedule={self.schedule}, wandb_log={self.wandb_log} '
                f'and this scheme: {", ".join(f"{name}={getattr(self, name)}" for name in idle)}; leave out, or undo a config '
                f"file's with {' '.join(f'--{name}={getattr(TrainConfig, name)}' for name in idle)}"
            )
        cfg = replace(
            self,
            **{
                name: default
                for name, (has_effect, default) in defaults.items()
                if has_effect and getattr(self, name) is None
            },
        )
        # without it: a run cut short
        if self.lr_decay_iters is not None and decay and cfg.warmup_iters > cfg.lr_decay_iters:
            raise UserError(
                f'warmup_iters={cfg.warmup_iters} is more than lr_decay_iters={cfg.lr_decay_iters}: the decay would be over '
                f'before it begins; lower the one or raise the other'
            )
        return cfg

    @property
    def sequences(self):
        """Sequences in an update."""
        return self.batch_size * self.gradient_accumulation_steps


# -----------------------------------------------------------------------------------------------------------------
# where a run starts from


# -----------------------------------------------------------------------------------------------------------------
# evaluation and records


@torch.no_grad()
def evaluate(model, split, count, batch_size, rt):
    """Mean loss (nats per token) over `count` fixed windows of a split; every world_size-th batch
    is this rank's."""
    windows = eval_windows(split.n_windows, count)
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    total = weight = 0.0
    model.eval()
    for i in range(rt.rank, -(-len(batches) // rt.world_size) * rt.world_size, rt.world_size):
        # ranks left over repeat the last batch, unweighted
        x, y = split.batch(batches[min(i, len(batches) - 1)])
        with rt.autocast():
            _, loss = model(x.to(rt.device), y.to(rt.device))
        sequences = len(x) if i < len(batches) else 0
        total, weight = total + loss * sequences, weight + sequences
    model.train()
    total, weight = rt.sum([total, weight])
    return total / weight


def update(model, trained, optimizer, scaler, batches, micro_steps, grad_clip, rt):
    """One update over this rank's next `micro_steps` batches -> (their mean loss, 0-dim; norm of
    the whole gradient).

    `trained` is what calls `model` (DDP's wrapper, or itself). A gradient that is not finite leaves
    the weights alone."""
    loss = torch.zeros((), device=rt.device)
    for micro_step in range(micro_steps):
        x, y = next(batches)
        last = micro_step == micro_steps - 1  # gradients cross the network once an update
        with contextlib.nullcontext() if last else parallel.only_local(trained):
            with rt.autocast():
                _, micro_loss = trained(x, y)
            # averaged over the ranks, so divided by this one's count
            scaler.scale(micro_loss / micro_steps).backward()
        loss += micro_loss.detach() / micro_steps
    scaler.unscale_(optimizer)
    grad_norm = parallel.clip_grad_norm(model, grad_clip or math.inf)  # waits for the GPU
    if math.isfinite(grad_norm):
        optimizer.step()
    scaler.update()
    model.zero_grad(set_to_none=True)
    return loss, grad_norm


# -----------------------------------------------------------------------------------------------------------------
# the run


def main(argv):
    # options, data, model: everything a user can get wrong, before anything is written
    given = parse(argv, GPTConfig, TrainConfig)
    options = build(TrainConfig, given)
    if options.dry_run:
        return preview(given, options)
    state = starting_state(options)
    resumed = state is not None and options.init_from in ('resume', 'auto')
    if resumed and not {'train_config', *checkpoint.RESUMABLE} <= state.keys():
        raise UserError(
            f'{options.out_dir}/ckpt.pt holds weights only; start a run from them with '
            f'--init_from={options.out_dir}/ckpt.pt --out_dir=OTHER'
        )
    if resumed:
        options = continued(options, given, state)
        if 'shards' in state and options.parallel == 'ddp':
            state = checkpoint.with_shards(state, options.out_dir)
    elif state is None and options.init_from not in PRETRAINED:
        # contradictions come before the data's
        memory.refuse_beyond_memory(build(GPTConfig, given), options.batch_size)
    (rank, world_size), accum_steps = world(), options.gradient_accumulation_steps
    if (
        'RANK' not in os.environ
        and (options.zero or options.parallel == 'fsdp')
        and not options.eval_only
    ):
        raise UserError(
            'zero and parallel=fsdp share the work of several processes: start with torchrun, or leave them out'
        )
    if 'RANK' not in os.environ and given.get('backend', 'auto') != 'auto':
        raise UserError(
            f'backend={options.backend} has no effect on a single process: start with torchrun, or leave it out'
        )
    if accum_steps % world_size:
        raise UserError(
            f'gradient_accumulation_steps={accum_steps} (all processes together) is not divisible by the {world_size} '
            f'processes; the nearest that is: {max(1, round(accum_steps / world_size)) * world_size}'
        )
    folder = find_data(options.dataset)
    meta = read_meta(folder)
    if resumed and state['data'] != meta['sha256']:
        raise UserError(
            f'dataset={options.dataset}: not the data of the run in {options.out_dir} (sha256 of train.bin '
            f'{meta["sha256"]["train"][:12]}, there {state["data"]["train"][:12]}); to train on with other data start a run '
            f'from its weights: --init_from={options.out_dir}/ckpt.pt --out_dir=OTHER'
        )
    torch.manual_seed(options.seed)
    from_shards = resumed and options.parallel == 'fsdp' and 'shards' in state
    # its weights come from rank 0's or from the shards
    elsewhere = options.parallel == 'fsdp' and (rank or from_shards)
    with (
        memory.memory_for('choose a smaller model: n_layer, n_embd, block_size'),
        torch.device('meta') if elsewhere else contextlib.nullcontext(),
    ):
        model = starting_model(given, options, state, meta, resumed)
    if not elsewhere:
        memory.refuse_beyond_memory(model.cfg, options.batch_size)
    cfg = options.resolve(model.cfg.normalized, bool(SCHEMES[model.cfg.update][0].scalars))
    train_split, val_split = (
        Split(folder, name, meta, model.cfg.block_size) for name in ('train', 'val')
    )

    # device and processes
    rt = runtime.start(cfg.device, cfg.dtype, cfg.backend)
    if len(set(rt.gather(state and state.get('digest')))) > 1:
        raise UserError(
            f'the processes read different checkpoints in {cfg.out_dir}; all nodes need the same folder, or equal copies'
        )
    # dropout: each rank its own; the weights are drawn already, the same on all
    torch.manual_seed(cfg.seed + rt.rank)
    local_accum_steps, tokens_per_step = (
        accum_steps // rt.world_size,
        cfg.sequences * model.cfg.block_size,
    )
    for name, one in (('model', model.cfg), ('run', cfg)):
        rt.print(
            f'{name}:',
            ' '.join(
                f'{key}={value}' for key, value in asdict(one).items() if value not in (None, '')
            ),
        )
    rt.print(
        f'{folder}: {train_split.n_tokens:,} train and {val_split.n_tokens:,} val tokens, {train_split.n_windows:,} windows an '
        f'epoch, sha256 of val {meta["sha256"]["val"][:12]}\n'
        f'an update: {cfg.batch_size} sequences x {local_accum_steps} micro-steps x {rt.world_size} processes x '
        f'{model.cfg.block_size} tokens = {tokens_per_step:,} tokens\n'
        f'{model.num_params():,} parameters; {memory.memory_text(model, cfg, rt.dtype, rt.world_size)}'
    )
    if cfg.activation_checkpointing:
        parallel.checkpoint_activations(model)
    if cfg.parallel == 'fsdp':
        parallel.shard(model, rt)
    with memory.memory_for(
        'try --parallel=fsdp on several GPUs, or a smaller model; --dry_run=True tells what one needs',
        SystemExit,
    ):
        model.to(rt.device)
    compiled = cfg.parallel == 'ddp' and runtime.compile_model(model, cfg.compile, rt)
    rt.print(f'{rt.device_name()}, {str(rt.dtype)[6:]}, {"" if compiled else "not "}compiled')

    def losses():
        count, size = cfg.eval_iters * cfg.eval_batch_size, cfg.eval_batch_size
        with memory.memory_for(memory.in_less(cfg, 'eval_batch_size', 'eval_iters'), SystemExit):
            return {
                'train_loss': evaluate(model, train_split, count, size, rt),
                'val_loss': evaluate(
                    model, val_split, val_split.n_windows if cfg.full_eval else count, size, rt
                ),
            }

    if cfg.eval_only:
        rt.print(
            'train loss {train_loss:.4f}, val loss {val_loss:.4f} nats per token'.format(**losses())
        )
        return runtime.stop()

    # optimizer and, on resume, the state of everything
    optimizer = configure_optimizer(model, cfg, rt.dtype)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
    rt.print(describe(optimizer))
    step, best_val_loss, skipped, wandb_id, rng = 0, math.inf, 0, None, None
    if resumed:
        if state['step'] > cfg.max_iters:
            raise UserError(
                f'max_iters={cfg.max_iters}, but the run in {cfg.out_dir} is at step {state["step"]} already'
            )
        step, best_val_loss, skipped, wandb_id, rng = (
            state[key] for key in ('step', 'best_val_loss', 'skipped', 'wandb_id', 'rng')
        )
        try:
            optimizer.load_state_dict(state['optimizer'])
            if from_shards:
                shards.load(cfg.out_dir, state, model, optimizer)
            if state['scaler']:  # not of a run that had none
                scaler.load_state_dict(state['scaler'])
        except (ValueError, KeyError, RuntimeError) as error:
            raise UserError(
                f'{cfg.out_dir}: the checkpoint does not fit its model: {error}'
            ) from None
        before = asdict(TrainConfig(**state['train_config']).resolve(model.cfg.normalized))
        rt.print(
            '; '.join(
                [f'resumed {cfg.out_dir} at step {step:,}']
                + [
                    f'{key}: {before[key]} -> {value}'
                    for key, value in asdict(cfg).items()
                    if value != before[key] and key != 'init_from'
                ]
            )
        )
    first_step, state = step, None  # the checkpoint's tensors are copied by now
    metrics = saver = None
    if rt.is_main:
        lock = checkpoint.claim(cfg.out_dir)  # noqa: F841, held until this process ends
        if not resumed:
            checkpoint.clear(cfg.out_dir)
        facts = {
            'config': asdict(model.cfg) | asdict(cfg),
            'params': model.num_params(),
            'world_size': rt.world_size,
            'device': rt.device_name(),
            'dtype': str(rt.dtype)[6:],
            'compiled': compiled,
            'torch': torch.__version__,
            'commit': code_version(),
            'command': ' '.join(sys.argv),
        }
        metrics = Metrics(cfg, facts, step, wandb_id)
    if rt.is_main or cfg.save_sharded:
        # of the savers' threads only
        group = dist.new_group(backend='gloo') if cfg.save_sharded else None
        saver = checkpoint.Saver(
            cfg.out_dir, cfg.keep_last, step if resumed else None, best_val_loss, group
        )

    def save(best):
        rng, gather = rt.gather(runtime.rng_state(rt.device)), not cfg.save_sharded
        optimizer_state, weights = (
            optimizer.state_dict(gather),
            parallel.whole_state(model) if gather else model.state_dict(),
        )
        if saver:
            saver.save(
                {
                    'version': checkpoint.VERSION,
                    'model': weights,
                    'gpt_config': asdict(model.cfg),
                    'step': step,
                    'best_val_loss': best_val_loss,
                    'tokenizer': meta['tokenizer'],
                    'optimizer': optimizer_state,
                    'scaler': scaler.state_dict(),
                    'train_config': asdict(options),
                    'skipped': skipped,
                    'rng': rng,
                    'data': meta['sha256'],
                    'wandb_id': metrics and metrics.wandb_id,
                },
                best,
            )

    trained = parallel.replicate(model, rt)
    batches = iter(
        TrainLoader(
            train_split,
            cfg.batch_size,
            accum_steps,
            cfg.seed,
            step,
            rt.rank,
            rt.world_size,
            rt.device,
        )
    )
    signals, seconds = runtime.Signals(), 0.0
    bar = tqdm(
        total=cfg.max_iters,
        initial=step,
        desc=model.cfg.update,
        unit='step',
        disable=None if rt.is_main else True,
    )
    if rng and len(rng) == rt.world_size:
        runtime.set_rng_state(rt.device, rng[rt.rank])  # last, so that nothing draws in between
    elif rng and model.cfg.dropout:
        rt.print(
            f'note: a checkpoint of {len(rng)} processes goes on with {rt.world_size}: same data, other dropout masks'
        )

    while True:
        # now and then: evaluate and save
        stopping = rt.any(signals.caught is not None)
        finished = step >= cfg.max_iters
        # a checkpoint of this step was made after its evaluation
        if step > first_step or not resumed:
            improved, evaluated = False, finished or every(cfg.eval_interval, step)
            if evaluated:
                record = {'step': step, 'tokens': step * tokens_per_step, **losses()}
                improved, best_val_loss = (
                    record['val_loss'] < best_val_loss,
                    min(best_val_loss, record['val_loss']),
                )
                rt.print(
                    f'step {step:,}: train loss {record["train_loss"]:.4f}, val loss {record["val_loss"]:.4f}'
                )
                if rt.is_main:
                    metrics.write(
                        record
                        | {'best_val_loss': best_val_loss, **other_units(record['val_loss'], meta)}
                    )
            if (
                finished
                or stopping
                or step
                and (
                    every(cfg.save_interval, step)
                    or evaluated
                    and (improved or cfg.always_save_checkpoint)
                )
            ):
                save(improved)
        if finished or stopping:
            break

        # one update
        started = time.perf_counter()
        optimizer.set_lr(lr_multiplier(step, cfg))
        with memory.memory_for(
            memory.in_less(cfg, 'batch_size', 'gradient_accumulation_steps'), SystemExit
        ):
            loss, grad_norm = update(
                model, trained, optimizer, scaler, batches, local_accum_steps, cfg.grad_clip, rt
            )
        skipped = 0 if math.isfinite(grad_norm) else skipped + 1
        step += 1
        seconds += time.perf_counter() - started

        # tell
        if skipped:
            rt.print(
                f'warning: step {step:,}: gradient norm {grad_norm}, update skipped ({skipped} in a row)'
            )
            # float16's scaler halves its way from 2^16 to its scale
            if skipped >= cfg.max_skipped + 20 * scaler.is_enabled():
                raise SystemExit(
                    f'stopped at step {step:,}: {skipped} updates in a row with a non-finite gradient; the last checkpoint '
                    f'is untouched; try a lower learning rate'
                )
        bar.update()
        if every(cfg.log_interval, step):
            loss, steps = rt.mean(loss), min(cfg.log_interval, step - first_step)
            record = {
                'step': step,
                'tokens': step * tokens_per_step,
                'loss': loss,
                'lr': optimizer.lr()['embeddings'],
                'grad_norm': grad_norm,
                'tokens_per_s': steps * tokens_per_step / seconds,
                'skipped': skipped,
                'lrs': optimizer.lr(),
            }
            seconds = 0.0
            if rt.is_main:
                metrics.write(record)
                bar.set_postfix_str(f'loss {loss:.4f}, {record["tokens_per_s"]:,.0f} tokens/s')
                if bar.disable:
                    left = (cfg.max_iters - step) * tokens_per_step / record['tokens_per_s']
                    rt.print(
                        f'step {step:,}/{cfg.max_iters:,}: loss {loss:.4f}, gradient norm {grad_norm:.2f}, '
                        f'{record["tokens_per_s"]:,.0f} tokens/s, {left / 60:.1f} min left'
                    )

    bar.close()
    trained = batches = None  # let go of DDP's reducer while the process group is whole
    saved = saver is None or saver.wait()
    runtime.stop()
    if not saved:
        raise SystemExit(
            f'the final checkpoint could not be written to {cfg.out_dir}; see the warning above'
        )
    if signals.caught and not finished:
        rt.print(
            f'{signals.caught}: saved step {step:,} in {cfg.out_dir}; go on with --init_from=resume --out_dir={cfg.out_dir}'
        )
        raise SystemExit(STOPPED)
    rt.print(
        f'done: {step:,} updates, best val loss {best_val_loss:.4f}, checkpoint in {cfg.out_dir}/ckpt.pt'
    )


def every(interval, step):
    return interval > 0 and step % interval == 0


if __name__ == '__main__':
    run(main)
