"""Where a run starts from: fresh weights, a checkpoint of ours or of nanoGPT, or GPT-2's weights."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from model import GPT, SCHEMES, GPTConfig
from nanonag import checkpoint, memory, runtime
from nanonag.cli import UserError, warn
from nanonag.configurator import build, convert
from nanonag.data import tokenizer

PRETRAINED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # what GPT.from_pretrained downloads


def pretrained(name, **overrides):
    """GPT.from_pretrained; UserError if transformers or the weights are not to be had."""
    try:
        return GPT.from_pretrained(name, **overrides)
    except (ImportError, OSError) as error:
        raise UserError(
            f'init_from={name}: {str(error).splitlines()[0]:.200}; needs `pip install transformers` and a connection '
            f'(or its cache)'
        ) from None


def build_model(state, where, **overrides):
    """The GPT of a checkpoint's dict; `overrides` replace fields of its GPTConfig. UserError if
    weights and config differ.

    Under torch.device('meta') it holds no numbers, and those of the dict may be None.
    """
    arguments = convert(GPTConfig, {**state['gpt_config'], **overrides}, where)
    try:
        cfg = GPTConfig(**arguments)
    except UserError as error:
        raise UserError(f'{where}: {error}') from None
    weights = state['model']
    layers = len({name.split('.')[2] for name in weights if name.startswith('transformer.h.')})
    if cfg.n_layer != layers:  # before anything is allocated for a config that a file made up
        raise UserError(f'{where}: weights of {layers} layers, but n_layer={cfg.n_layer}')
    table = weights.get('transformer.wte.weight')
    if 'shards' not in state and (table is None or table.shape != (cfg.vocab_size, cfg.n_embd)):
        raise UserError(
            f'{where}: weights that do not fit its configuration: transformer.wte.weight'
        )
    with torch.device('meta'):
        expected = GPT(cfg).state_dict()
    wrong = [
        name
        for name in expected.keys() | weights.keys()
        if name not in expected
        or name not in weights
        or weights[name] is not None
        and expected[name].shape != weights[name].shape
    ]
    if wrong:
        raise UserError(
            f'{where}: weights that do not fit its configuration: {", ".join(sorted(wrong)[:3])} ({len(wrong)} in all)'
        )
    model = GPT(cfg)
    if not next(model.parameters()).is_meta:
        model.load_state_dict(weights)
    return model


def starting_state(cfg):
    """The checkpoint's dict that `init_from` asks for, None for a fresh model. UserError if there
    is none, or if a fresh start would run over another run."""
    folder = Path(cfg.out_dir)
    if cfg.init_from in ('resume', 'auto'):
        state = checkpoint.read_latest(folder, whole=False)
        if state is None and cfg.init_from == 'resume':
            raise UserError(
                f'init_from=resume: no ckpt.pt in {folder}; check --out_dir, or start with --init_from=scratch'
            )
        if state is not None:
            return state
    held = [path.name for path in checkpoint.run_files(folder)]
    # auto: it died before its first checkpoint
    if held and not (cfg.overwrite or cfg.eval_only or cfg.init_from == 'auto'):
        raise UserError(
            f'out_dir={folder} holds a run already ({", ".join(held)}); continue it with --init_from=resume, choose '
            f'another --out_dir, or delete it with --overwrite=True'
        )
    if cfg.init_from in ('scratch', 'auto', *PRETRAINED):
        return None
    if not os.path.isfile(cfg.init_from):
        raise UserError(
            f'init_from={cfg.init_from}: neither a checkpoint file nor one of scratch, resume, auto, '
            f'{", ".join(PRETRAINED)}'
        )
    if cfg.overwrite and Path(cfg.init_from).resolve().parent == folder.resolve():
        raise UserError(
            f'init_from={cfg.init_from} lies in out_dir={folder}, which overwrite=True empties; choose another --out_dir'
        )
    return checkpoint.read(cfg.init_from)


def continued(cfg, given, state):
    """`cfg` with the checkpoint's own options for those not given; UserError if the data order or
    the optimizer would change."""
    saved = type(cfg)(**convert(type(cfg), state['train_config'], f'{cfg.out_dir}/ckpt.pt'))
    folder = cfg.out_dir
    cfg = replace(
        saved,
        **{
            'out_dir': folder,
            'overwrite': False,
            **{key: given[key] for key in cfg.__dataclass_fields__ if key in given},
        },
    )
    normalized = GPTConfig(
        **convert(GPTConfig, state['gpt_config'], f'{folder}/ckpt.pt')
    ).normalized
    then_resolved, now_resolved = saved.resolve(normalized), cfg.resolve(normalized)
    for name in ('seed', 'sequences', 'optimizer', 'muon_qkv'):
        before, now = getattr(then_resolved, name), getattr(now_resolved, name)
        if before != now:
            hint = ' (batch_size x gradient_accumulation_steps)' if name == 'sequences' else ''
            raise UserError(
                f'{name}={now}{hint}, but the run in {folder} was made with {before}; leave it out to resume, or '
                f'start another run with another --out_dir'
            )
    return cfg


def starting_model(given, cfg, state, meta, resumed):
    """The GPT to train, on the CPU; UserError if the options given or the vocabulary contradict its
    weights."""
    gpt, vocab = (
        {key: given[key] for key in GPTConfig.__dataclass_fields__ if key in given},
        meta['vocab_size'],
    )
    if gpt.get('vocab_used') not in (None, vocab):
        raise UserError(
            f'vocab_used={gpt["vocab_used"]}, but dataset={cfg.dataset} has {vocab} token ids: leave it out, the data decide'
        )
    changeable = (
        {}
        if resumed
        else {'vocab_used': vocab, **{key: gpt[key] for key in gpt if key == 'dropout'}}
    )
    if state is not None:
        if state.get('tokenizer', meta['tokenizer']) != meta['tokenizer']:
            raise UserError(
                f"dataset={cfg.dataset} was made with another tokenizer than the checkpoint's data; prepare the text "
                f'with that one, or choose another --dataset'
            )
        model = build_model(state, cfg.out_dir if resumed else cfg.init_from, **changeable)
    elif cfg.init_from in PRETRAINED:
        if meta['tokenizer'] != {'kind': 'gpt2'}:
            raise UserError(
                f'dataset={cfg.dataset} was not made with the tokenizer of {cfg.init_from}'
            )
        model = pretrained(cfg.init_from, **changeable)
    else:
        # whole tiles for the head's matmul
        padded = vocab if vocab < 1024 else -(-vocab // 64) * 64
        gpt = {'vocab_size': padded, **gpt}
        if gpt['vocab_size'] < vocab:
            raise UserError(
                f'vocab_size={gpt["vocab_size"]}, but dataset={cfg.dataset} has {vocab} token ids; leave it out to get '
                f'{padded}, or set --vocab_size={padded}'
            )
        model = GPT(GPTConfig(**{'vocab_used': vocab, **gpt}))
    for key, value in gpt.items():
        if value is not None and value != getattr(model.cfg, key):
            raise UserError(
                f'{key}={value}, but the weights of init_from={cfg.init_from} have {getattr(model.cfg, key)}; leave it '
                f'out, or train from scratch'
            )
    if model.cfg.vocab_size < vocab:
        raise UserError(
            f'dataset={cfg.dataset} has {vocab} token ids, the weights of init_from={cfg.init_from} only '
            f'{model.cfg.vocab_size}; choose another --dataset'
        )
    return model


def preview(given, options):
    """Prints what a run would need, from the meta device."""
    unread = {
        'init_from': options.init_from != 'scratch',
        'overwrite': options.overwrite,
        'eval_only': options.eval_only,
    }
    if idle := [name for name, is_set in unread.items() if is_set]:
        raise UserError(
            f'{idle[0]}={getattr(options, idle[0])} has no effect with dry_run=True, which reads no file and shows a model '
            f'from scratch: leave one out'
        )
    with torch.device('meta'):
        model = GPT(build(GPTConfig, given))
    cfg = options.resolve(model.cfg.normalized, bool(SCHEMES[model.cfg.update][0].scalars))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)
    print(
        f'{model.cfg}\n{model.num_params():,} parameters, {matrices:,} of them in matrices and tables'
    )
    for gpus in (1, 8, 64):
        print(
            f'{gpus} GPU{"s" * (gpus > 1)}: {memory.memory_text(model, cfg, runtime.DTYPES.get(cfg.dtype, torch.bfloat16), gpus)}'
        )


def load(cfg):
    """(GPT, Tokenizer) that `init_from` asks for."""
    if cfg.init_from in PRETRAINED:
        model, description = pretrained(cfg.init_from), {'kind': 'gpt2'}
    else:
        path = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
        if cfg.init_from == 'resume':
            if os.path.isfile(path):
                raise UserError(
                    f"out_dir={path} is a file, not a run's folder; write --init_from={path}"
                )
            state = checkpoint.read_latest(path, best=True)
            if state is None:
                raise UserError(
                    f'{path}: no such checkpoint there (best.pt, ckpt.pt); train one first or give the right --out_dir'
                )
        elif os.path.isfile(path):
            state = checkpoint.read(path)
        else:
            raise UserError(
                f'init_from={path}: neither a checkpoint file nor one of resume, {", ".join(PRETRAINED)}'
            )
        description = state.get('tokenizer')
        if description is None:  # nanoGPT's files do not say
            description = {'kind': 'gpt2'}
            warn(f"{path} names no tokenizer; taking GPT-2's, as nanoGPT does")
        model = build_model(
            state, path, vocab_used=tokenizer.from_description(description).vocab_size
        )
    return model, tokenizer.from_description(description)
