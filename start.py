"""Where a run starts: options, data and weights, all checked before anything is written.

:func:`plan` serves train.py, :func:`load` sample.py and eval.py.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from model import GPT, GPTConfig
from nanonag import checkpoint, memory, runtime
from nanonag.cli import UserError, first_line, warn, world
from nanonag.configurator import Options, build, convert, drop_idle, parse
from nanonag.data import tokenizer
from nanonag.data.folder import find_data, read_meta
from nanonag.data.loader import Split

PRETRAINED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # OpenAI's, by their names on the Hub
MUON = ('muon_lr', 'muon_momentum', 'muon_weight_decay', 'muon_qkv')
DECAY = ('schedule', 'warmup_iters', 'lr_decay_iters', 'min_lr', 'wsd_decay')


@dataclass
class Plan:
    """A checked run: what train.py needs to begin or to resume it."""

    options: Any  # the TrainConfig as given, None for what the scheme decides; checkpoints keep it
    cfg: Any  # the same with every None replaced
    model: GPT  # on the CPU, or on the meta device if its weights come from rank 0 or from shards
    meta: dict  # of the data folder
    splits: dict[str, Split]
    folder: Path  # of the data
    state: dict | None  # the checkpoint to resume; None for a new run
    from_shards: bool  # whether each rank reads the checkpoint's shards itself
    digest: str | None  # of the checkpoint that the weights come from

    @property
    def resumes(self):
        return self.state is not None

    def config(self):
        """All options of the model and the run, as a dict."""
        return asdict(self.model.cfg) | asdict(self.cfg)

    @property
    def tokens_per_step(self):
        """Tokens that one optimizer step trains on, all processes together."""
        return self.cfg.sequences * self.model.cfg.block_size


def plan(argv, train_config):
    """Reads and checks everything that a run starts from; nothing is written.

    Args:
        argv: the command line's arguments.
        train_config: the class TrainConfig.

    Returns:
        A :class:`Plan`, or None with --dry_run=True, which prints its answer.

    Raises:
        UserError: for any mistake in options, data or checkpoints.
    """
    given = drop_unused_by_scheme(parse(argv, GPTConfig, train_config))
    options = build(train_config, given)
    if options.dry_run:
        return preview(given, options)
    if options.init_from in ('resume', 'auto'):
        reason = f'init_from={options.init_from}, which continues the run'
        options = reset(options, ('overwrite',), given.typed, reason)
    state = starting_state(options)
    resumes = state is not None and options.init_from in ('resume', 'auto')
    if resumes:
        options = resumed_options(options, given, state)
    elif state is None and options.init_from not in PRETRAINED:
        build(GPTConfig, given)  # contradictions are reported before missing data
    options = drop_unused_by_launch(options, given.typed)
    check_accumulation(options)
    from_shards = resumes and options.parallel == 'fsdp' and 'shards' in state
    if resumes and 'shards' in state and not from_shards:
        state = checkpoint.with_shards(state, options.out_dir)
    folder = find_data(options.dataset)
    meta = read_meta(folder)
    if resumes:
        check_same_data(options, state, meta)
    if options.init_from in PRETRAINED:
        state = pretrained(options.init_from)
    torch.manual_seed(options.seed)
    gpt_cfg = starting_config(given, options, state, meta, resumes)
    memory.refuse_beyond_memory(gpt_cfg, options.batch_size)
    on_meta = options.parallel == 'fsdp' and (world()[0] > 0 or from_shards)
    device = torch.device('meta') if on_meta else contextlib.nullcontext()
    with memory.memory_for('choose a smaller model: n_layer, n_embd, block_size'), device:
        model = GPT(gpt_cfg) if state is None else fill(GPT(gpt_cfg), state)
    options = drop_unused_by_run(options, gpt_cfg, given.typed)
    return Plan(
        options=options,
        cfg=options.resolve(gpt_cfg.normalized),
        model=model,
        meta=meta,
        splits={name: Split(folder, name, meta, gpt_cfg.block_size) for name in ('train', 'val')},
        folder=folder,
        state=state if resumes else None,
        from_shards=from_shards,
        digest=state.get('digest') if state is not None else None,
    )


def join(plan):
    """The Runtime: device, precision and process group. Raises UserError if ranks differ."""
    cfg = plan.cfg
    rt = runtime.start(cfg.device, cfg.dtype, cfg.backend)
    if len(set(rt.gather(plan.digest))) > 1:
        raise UserError(
            f'the processes read different checkpoints in {cfg.out_dir}; all nodes need the same '
            f'folder, or equal copies'
        )
    torch.manual_seed(cfg.seed + rt.rank)  # for dropout; the weights are drawn, the same on all
    return rt


def summary(plan, rt):
    """What is printed before a run: options, data, tokens in a step, parameters, memory."""
    cfg, model, splits = plan.cfg, plan.model, plan.splits
    lines = []
    for name, config in (('model', model.cfg), ('run', cfg)):
        options = [f'{key}={v}' for key, v in asdict(config).items() if v not in (None, '')]
        lines.append(f'{name}: {" ".join(options)}')
    micro_steps = cfg.gradient_accumulation_steps // rt.world_size
    needs = memory.memory_text(model, cfg, rt.dtype, rt.world_size)
    lines += [
        f'{plan.folder}: {splits["train"].n_tokens:,} train and {splits["val"].n_tokens:,} val '
        f'tokens, {splits["train"].n_windows:,} windows an epoch, sha256 of val '
        f'{plan.meta["sha256"]["val"][:12]}',
        f'a step: {cfg.batch_size} sequences x {micro_steps} micro-steps x {rt.world_size} '
        f'processes x {model.cfg.block_size} tokens = {plan.tokens_per_step:,} tokens',
        f'{model.num_params():,} parameters; {needs}',
    ]
    return '\n'.join(lines)


def changes(plan):
    """What is printed on resume: the step, and the options that differ from the checkpoint's."""
    before = asdict(
        type(plan.options)(**plan.state['train_config']).resolve(plan.model.cfg.normalized)
    )
    parts = [f'resumed {plan.cfg.out_dir} at step {plan.state["step"]:,}']
    for key, value in asdict(plan.cfg).items():
        if value != before[key] and key != 'init_from':
            parts.append(f'{key}: {before[key]} -> {value}')
    return '; '.join(parts)


# ---------------------------------------------------------------- options that have no effect


def drop_unused_by_scheme(given):
    """The options without those of the model that the scheme has no use for.

    Those from a config file are dropped and reported; GPTConfig refuses those typed.
    """
    with contextlib.suppress(UserError):  # an unknown scheme is reported later
        scheme = {key: given[key] for key in ('update', 'pos') if key in given}
        cfg = GPTConfig(**scheme)
        numbers = {name for name, default in cfg.numbers().items() if default is None}
        unused = numbers if cfg.rule.uses_velocity else numbers | {'velocity_init'}
        idle = {
            name: given[name]
            for name in sorted(unused & given.keys() - given.typed)
            if given[name] is not None
        }
        drop_idle(idle, given.typed, f'update={cfg.update}, pos={cfg.pos}')
        kept = {key: value for key, value in given.items() if key not in idle}
        return Options(kept, given.typed)
    return given


def drop_unused_by_launch(options, typed):
    """The options without those that only matter to several processes, if there is one."""
    if world()[1] > 1:
        return options
    typed = set() if options.eval_only else typed - {'backend'}
    names = ('zero', 'parallel', 'save_sharded', 'backend')
    return reset(options, names, typed, 'one process; torchrun starts several')


def drop_unused_by_run(options, gpt_cfg, typed):
    """The options without those that other options, or the scheme, make useless."""
    for reason, names in unused_options(options, gpt_cfg):
        options = reset(options, names, typed, reason)
    return options


def unused_options(options, gpt_cfg) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields (reason, names of the options that have no effect for this reason)."""
    optimizer = options.optimizer or ('adamw' if gpt_cfg.normalized else 'muon')
    if optimizer != 'muon':
        yield f'optimizer={optimizer}', MUON
    if not options.decay_lr:
        yield 'decay_lr=False', DECAY
    elif options.schedule != 'wsd':
        yield f'schedule={options.schedule}', ('wsd_decay',)
    if not gpt_cfg.learns_scalars:
        yield f'update={gpt_cfg.update}', ('scalar_lr_mult',)
    if not options.wandb_log:
        yield 'wandb_log=False', ('wandb_project', 'wandb_run_name')
    if options.parallel != 'fsdp':
        yield f'parallel={options.parallel}', ('save_sharded',)
    else:
        yield 'parallel=fsdp, which shards the optimizer already', ('zero',)
    if options.parallel == 'fsdp' and options.compile == 'True':
        yield 'parallel=fsdp, which runs uncompiled', ('compile',)


def reset(options, names, typed, reason):
    """The options with the named ones at their defaults; UserError if one of them was typed."""
    defaults = {name: getattr(type(options), name) for name in names}
    idle = {
        name: getattr(options, name)
        for name, default in defaults.items()
        if getattr(options, name) != default
    }
    drop_idle(idle, typed, reason)
    return replace(options, **{name: defaults[name] for name in idle})


def check_accumulation(options):
    """Raises UserError unless the micro-batches of a step divide evenly among the processes."""
    micro_batches = options.gradient_accumulation_steps
    world_size = world()[1]
    if micro_batches % world_size:
        nearest = max(1, round(micro_batches / world_size)) * world_size
        raise UserError(
            f'gradient_accumulation_steps={micro_batches} (all processes together) is not '
            f'divisible by the {world_size} processes; the nearest that is: {nearest}'
        )


# ------------------------------------------------------------------------ the run to continue


def starting_state(options):
    """The checkpoint that ``init_from`` names, None for fresh or OpenAI's weights.

    Raises UserError if there is none, or if a new run would mix with the one in out_dir.
    """
    folder = Path(options.out_dir)
    if options.init_from in ('resume', 'auto'):
        state = checkpoint.read_latest(folder, whole=False)
        if state is None and options.init_from == 'resume':
            raise UserError(
                f'init_from=resume: no ckpt.pt in {folder}; check --out_dir, or start with '
                f'--init_from=scratch'
            )
        if state is not None:
            return state
    existing = [path.name for path in checkpoint.run_files(folder)]
    # with auto, the run in the folder ended before its first checkpoint
    if existing and not (options.overwrite or options.eval_only or options.init_from == 'auto'):
        raise UserError(
            f'out_dir={folder} holds a run already ({", ".join(existing)}); continue it with '
            f'--init_from=resume, choose another --out_dir, or delete it with --overwrite=True'
        )
    if options.init_from in ('scratch', 'auto', *PRETRAINED):
        return None
    if not os.path.isfile(options.init_from):
        raise UserError(
            f'init_from={options.init_from}: neither a checkpoint file nor one of scratch, resume, '
            f'auto, {", ".join(PRETRAINED)}'
        )
    if options.overwrite and Path(options.init_from).resolve().parent == folder.resolve():
        raise UserError(
            f'init_from={options.init_from} lies in out_dir={folder}, which overwrite=True '
            f'empties; choose another --out_dir'
        )
    return checkpoint.read(options.init_from)


def resumed_options(options, given, state):
    """The checkpoint's options, with those given now in their place.

    Raises UserError if the checkpoint holds weights only, or if the order of the data or the
    optimizer would change.
    """
    folder = options.out_dir
    train_config = type(options)
    if not {'train_config', *checkpoint.RESUMABLE} <= state.keys():
        raise UserError(
            f'{folder}/ckpt.pt holds weights only; start a run from them with '
            f'--init_from={folder}/ckpt.pt --out_dir=OTHER'
        )
    where = f'{folder}/ckpt.pt'
    saved = train_config(**convert(train_config, state['train_config'], where))
    options = replace(saved, **given.of(train_config) | {'out_dir': folder, 'overwrite': False})
    normalized = config_of(state, where).normalized
    before = saved.resolve(normalized)
    now = options.resolve(normalized)
    for name in ('seed', 'sequences', 'optimizer', 'muon_qkv'):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            product = ' (batch_size x gradient_accumulation_steps)' if name == 'sequences' else ''
            raise UserError(
                f'{name}={new}{product}, but the run in {folder} was made with {old}; leave it out '
                f'to resume, or start another run with another --out_dir'
            )
    return options


def check_same_data(options, state, meta):
    """Raises UserError unless the data are those that the checkpoint was trained on."""
    if state['data'] != meta['sha256']:
        raise UserError(
            f'dataset={options.dataset}: not the data of the run in {options.out_dir} (sha256 of '
            f'train.bin {meta["sha256"]["train"][:12]}, there {state["data"]["train"][:12]}); to '
            f'train on with other data start a run from its weights: '
            f'--init_from={options.out_dir}/ckpt.pt --out_dir=OTHER'
        )


# ------------------------------------------------------------------------------------ weights


def starting_config(given, options, state, meta, resumes):
    """The GPTConfig of the model to train.

    Raises UserError if the options or the vocabulary contradict the weights that it starts from.
    """
    typed = given.of(GPTConfig)
    vocab = meta['vocab_size']
    if typed.get('vocab_used') not in (None, vocab):
        raise UserError(
            f'vocab_used={typed["vocab_used"]}, but dataset={options.dataset} has {vocab} token '
            f'ids: leave it out, the data decide'
        )
    if state is None:
        return fresh_config(typed, options, vocab)
    source = options.init_from
    if state.get('tokenizer', meta['tokenizer']) != meta['tokenizer']:
        raise UserError(
            f'dataset={options.dataset} was made with another tokenizer than the data of '
            f'init_from={source}; prepare the text with that one, or choose another --dataset'
        )
    changed = {}
    if not resumes:
        changed = {'vocab_used': vocab}
        changed |= {key: typed[key] for key in typed if key == 'dropout'}
    cfg = config_of(state, options.out_dir if resumes else source, **changed)
    for key, value in typed.items():
        if value is not None and value != getattr(cfg, key):
            raise UserError(
                f'{key}={value}, but the weights of init_from={source} have {getattr(cfg, key)}; '
                f'leave it out, or train from scratch'
            )
    if cfg.vocab_size < vocab:
        raise UserError(
            f'dataset={options.dataset} has {vocab} token ids, the weights of init_from={source} '
            f'only {cfg.vocab_size}; choose another --dataset'
        )
    return cfg


def fresh_config(typed, options, vocab):
    """The GPTConfig of a model from scratch, its table as large as the data's vocabulary."""
    padded = vocab if vocab < 1024 else -(-vocab // 64) * 64  # full tiles for the head's matmul
    if typed.get('vocab_size', padded) < vocab:
        raise UserError(
            f'vocab_size={typed["vocab_size"]}, but dataset={options.dataset} has {vocab} token '
            f'ids; leave it out to get {padded}, or set --vocab_size={padded}'
        )
    return GPTConfig(**{'vocab_used': vocab, 'vocab_size': padded, **typed})


def config_of(state, where, **overrides):
    """The GPTConfig of a checkpoint, with some fields replaced.

    Raises UserError, beginning with ``where``, if the weights do not fit it; nothing is allocated.
    """
    arguments = convert(GPTConfig, {**state['gpt_config'], **overrides}, where)
    try:
        cfg = GPTConfig(**arguments)
    except UserError as error:
        raise UserError(f'{where}: {error}') from None
    weights = state['model']
    layers = len({name.split('.')[2] for name in weights if name.startswith('transformer.h.')})
    if cfg.n_layer != layers:
        raise UserError(f'{where}: weights of {layers} layers, but n_layer={cfg.n_layer}')
    table = weights.get('transformer.wte.weight')
    if 'shards' not in state and (table is None or table.shape != (cfg.vocab_size, cfg.n_embd)):
        raise UserError(
            f'{where}: weights that do not fit its configuration: transformer.wte.weight'
        )
    with torch.device('meta'):
        expected = GPT(cfg).state_dict()
    wrong = expected.keys() ^ weights.keys()
    for name in expected.keys() & weights.keys():
        if weights[name] is not None and weights[name].shape != expected[name].shape:
            wrong.add(name)
    if wrong:
        raise UserError(
            f'{where}: weights that do not fit its configuration: '
            f'{", ".join(sorted(wrong)[:3])} ({len(wrong)} in all)'
        )
    return cfg


def fill(model, state):
    """Copies a checkpoint's weights into a model; one on the meta device stays without numbers."""
    if not next(model.parameters()).is_meta:
        model.load_state_dict(state['model'])
    return model


def build_model(state, where, **overrides):
    """The GPT of a checkpoint; see :func:`config_of`."""
    return fill(GPT(config_of(state, where, **overrides)), state)


def pretrained(name):
    """OpenAI's GPT-2 weights, as a checkpoint of ``update=gd`` without an optimizer.

    Args:
        name: one of PRETRAINED, or a folder that transformers wrote.

    Raises:
        UserError: if transformers or the weights are not available.
    """
    try:
        from transformers import GPT2LMHeadModel

        source = GPT2LMHeadModel.from_pretrained(name)
    except (ImportError, OSError) as error:
        raise UserError(
            f'init_from={name}: {first_line(error):.200}; needs `pip install transformers` and a '
            f'connection (or its cache)'
        ) from None
    config = source.config
    sizes = {key: getattr(config, key) for key in ('n_layer', 'n_head', 'n_embd', 'vocab_size')}
    transposed = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # Conv1D holds (in, out)
    weights = {
        key: w.t() if key.endswith(transposed) else w
        for key, w in source.state_dict().items()
        if not key.endswith(('.attn.bias', '.attn.masked_bias'))  # the causal mask
    }
    return {
        'model': weights,
        'gpt_config': {'update': 'gd', 'bias': True, 'block_size': config.n_positions, **sizes},
        'tokenizer': {'kind': 'gpt2'},
    }


# ------------------------------------------------------------- without training, and previews


def load(cfg):
    """The (GPT, tokenizer) that ``init_from``, ``out_dir`` and ``dataset`` of sample.py name."""
    where = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
    state = state_to_load(cfg, where)
    description = description_to_load(cfg, state, where)
    tok = tokenizer.from_description(description)
    return build_model(state, where, vocab_used=tok.vocab_size), tok


def state_to_load(cfg, where):
    """The checkpoint with the weights to generate or to evaluate with."""
    if cfg.init_from in PRETRAINED:
        return pretrained(cfg.init_from)
    if cfg.init_from == 'resume':
        if os.path.isfile(where):
            raise UserError(
                f"out_dir={where} is a file, not a run's folder; write --init_from={where}"
            )
        state = checkpoint.read_latest(where, best=True)
        if state is None:
            raise UserError(
                f'{where}: no such checkpoint there (best.pt, ckpt.pt); train one first or give '
                f'the right --out_dir'
            )
        return state
    if not os.path.isfile(where):
        raise UserError(
            f'init_from={where}: neither a checkpoint file nor one of resume, '
            f'{", ".join(PRETRAINED)}'
        )
    return checkpoint.read(where)


def description_to_load(cfg, state, where):
    """The tokenizer's description: the checkpoint's, or for nanoGPT's files that of --dataset."""
    own = state.get('tokenizer')
    asked = read_meta(find_data(cfg.dataset))['tokenizer'] if cfg.dataset is not None else None
    if own is not None and asked not in (None, own):
        raise UserError(
            f'dataset={cfg.dataset} was made with another tokenizer than {where}, which holds its '
            f'own; leave dataset out'
        )
    if own is not None or asked is not None:
        return own or asked
    gpt2 = {'kind': 'gpt2'}
    vocab_size = state['gpt_config'].get('vocab_size', 0)
    needed = tokenizer.from_description(gpt2).vocab_size
    if type(vocab_size) is int and vocab_size < needed:
        raise UserError(
            f"{where} names no tokenizer, and its vocab_size={vocab_size} is too small for GPT-2's "
            f'{needed} entries; give the data folder that it was trained on, or one prepared from '
            f'the same text: --dataset=FOLDER'
        )
    warn(f"{where} names no tokenizer; taking GPT-2's, as nanoGPT does")
    return gpt2


def preview(given, options):
    """Prints what a run would need; nothing is allocated or read."""
    reason = 'dry_run=True, which reads no file and shows a model from scratch'
    options = reset(options, ('init_from', 'overwrite', 'eval_only'), given.typed, reason)
    with torch.device('meta'):
        model = GPT(build(GPTConfig, given))
    options = drop_unused_by_run(options, model.cfg, given.typed)
    cfg = options.resolve(model.cfg.normalized)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    print(f'{model.cfg}')
    print(f'{model.num_params():,} parameters, {matrices:,} of them in matrices and tables')
    dtype = runtime.DTYPES.get(cfg.dtype, torch.bfloat16)
    for gpus in (1, 8, 64):
        needs = memory.memory_text(model, cfg, dtype, gpus)
        print(f'{gpus} {"GPU" if gpus == 1 else "GPUs"}: {needs}')
