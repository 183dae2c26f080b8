"""Compares how fast and how large update schemes are, side by side, at any size, on a CPU, a GPU
or a Mac.

    python bench.py                                       gd, lt_nag and ngpt, small: a minute or two on a laptop
    python bench.py --schemes gd lt_nag gd:pos=rope:mlp=swiglu --n_layer=12 --n_embd=768 --block_size=1024 --batch_size=1
    python bench.py --schemes gd lt_nag lt_nag:velocity_init=zero --peer=hf --json=results/bench.json
    python bench.py --suite=cpu --json=results/bench_cpu.json      what README's table tells, some 20 minutes on two cores
    python bench.py --table=results/bench_cpu.json                 that table, from the file

A scheme may carry model options of its own after colons; all other options go for all. Without any
of n_layer, n_head, n_embd and block_size the model is small; with one of them, those not given are
GPTConfig's. The schemes take turns, in an order that rotates from round to round, so that a slow
spell of the machine hits all of them; each is compared with the first one listed, round by round.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    # before torch is imported: instant
    show_help(__doc__, 'bench.py:BenchConfig', 'model.py:GPTConfig')

import contextlib
import itertools
import json
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from model import GPT, GPTConfig
from nanonag import memory, runtime
from nanonag.benchmark.peers import PEER_HAS, PEERS, Apart, HuggingFace, random_tokens
from nanonag.benchmark.tables import markdown, speed_table
from nanonag.benchmark.timing import WARMUP, operations, peak_bytes, race, results
from nanonag.cli import UserError, run
from nanonag.configurator import at_least, build, parse
from nanonag.decoder import Decoder
from nanonag.optim import configure_optimizer
from nanonag.report import check_json, facts
from nanonag.workers import worker_pool
from train import TrainConfig, train_step

SMALL = {'n_layer': 6, 'n_head': 6, 'n_embd': 192, 'block_size': 128}
FAIR = ':pos=rope:mlp=swiglu:tie_weights=False'  # gd with what nGPT has besides its update
BIG = '--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024'
SUITES = {
    name: {  # title: options; time is compared with the first scheme's
        'peak memory, 124M, 8 x 1024': f'{BIG} --schemes gd lt_nag --what=memory --batch_size=8 --peer=hf',
        'training, 6 layers, d=384, 64 x 256 characters': '--schemes gd --n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --vocab_size=65 '
        f'--batch_size=64 --what=train --memory=False --peer={peers}',
        f'training, 124M, {size} x 1024': f'{BIG} --schemes gd --what=train --batch_size={size} --memory=False --peer={peers}',
        f'training, 124M, {size} x 1024, momentum': f'{BIG} --schemes gd lt_nag polyak lt_tmm --what=train --batch_size={size} --memory=False',
        f'training, 124M, {size} x 1024, momentum without a velocity table': f'{BIG} --schemes gd lt_nag:velocity_init=zero --what=train '
        f'--batch_size={size} --memory=False',
        f'training, 124M, {size} x 1024, Euler': f'{BIG} --schemes euler_gd euler_nag euler_polyak --what=train --batch_size={size} --memory=False',
        f'training, 124M, {size} x 1024, nGPT': f'{BIG} --schemes gd{FAIR} ngpt ngpt_nag --what=train --batch_size={size} --memory=False',
        'generation, 124M, one text, float32': f'{BIG} --schemes gd lt_nag lt_tmm euler_nag --what=generate --max_new_tokens=200 '
        f'--dtype=float32 --peer=hf',
        'generation, 124M, one text, float32, nGPT': f'{BIG} --schemes gd{FAIR} ngpt ngpt_nag --what=generate --max_new_tokens=200 '
        f'--dtype=float32',
        'generation, 124M, one text, bfloat16': f'{BIG} --schemes gd lt_nag --what=generate --max_new_tokens=200',
        'generation, 124M, eight texts, float32': f'{BIG} --schemes gd lt_nag --what=generate --max_new_tokens=200 --gen_batch=8 '
        f'--dtype=float32',
        'generation, 124M, eight texts, bfloat16': f'{BIG} --schemes gd lt_nag --what=generate --max_new_tokens=200 --gen_batch=8',
    }
    for name, size, peers in (('cpu', 1, 'hf,hf_tuned'), ('cuda', 16, 'hf'))
}
ONLY_FOR = {  # options: the stages that they matter to
    ('steps', 'memory'): {'train'},
    ('batch_size', 'gradient_accumulation_steps', 'optimizer'): {'train', 'memory'},
    ('rounds',): {'train', 'generate'},
    ('gen_batch', 'prompt_tokens', 'max_new_tokens'): {'generate'},
}
SUITE_OPTIONS = {'suite', 'json', 'device', 'rounds', 'seed'}


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    # NAME or NAME:option=value:...; the first is the measure
    schemes: tuple[str, ...] = ('gd', 'lt_nag', 'ngpt')
    # hf: also transformers' GPT-2 of that size, float32, plain AdamW; hf_tuned: with our setting
    # of the C library's allocator
    peer: tuple[str, ...] = ()
    # instead of all of the above and sizes: the workloads of README's table
    suite: Literal['cpu', 'cuda'] | None = None
    table: str | None = None  # instead of measuring: print README's table from the file of a suite
    what: tuple[str, ...] = ('train', 'generate')  # either or both, or memory alone
    rounds: int = 5  # measurements of each scheme, after two that do not count
    steps: int = 1  # training steps in a measurement
    batch_size: int = 4  # sequences of block_size tokens in a micro-batch
    # micro-batches in a training step; the optimizer's work is per step
    gradient_accumulation_steps: int = 1
    # muon's work is per update: beside one micro-batch it looks too big
    optimizer: Literal['adamw', 'muon'] = 'adamw'
    gen_batch: int = 1  # sequences generated at once
    prompt_tokens: int = 32  # that they start from
    max_new_tokens: int = 64  # that they go on for, sampled, with the KV cache
    memory: bool = True  # also the peak in training, by a process of its own for each scheme
    profile: bool = False  # also the costliest operations of one training step of each scheme
    json: str | None = None  # file for every raw number, the options and the machine
    seed: int = 1337  # of the weights and the random tokens
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    # of the matmuls; auto: bfloat16 where hardware has it
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'
    compile: Literal['auto', 'True', 'False'] = 'auto'  # auto: on CUDA

    def __post_init__(self):
        at_least(
            self,
            rounds=1,
            steps=1,
            batch_size=1,
            gradient_accumulation_steps=1,
            gen_batch=1,
            prompt_tokens=1,
            max_new_tokens=1,
            seed=0,
        )
        if unknown := [name for name in self.what if name not in ('train', 'generate', 'memory')]:
            raise UserError(
                f'what={unknown[0]}: choose among train, generate, memory: --what=train,generate'
            )
        if unknown := [name for name in self.peer if name not in PEERS]:
            raise UserError(f'peer={unknown[0]}: choose among {", ".join(PEERS)}')
        if self.profile and 'train' not in self.what:
            raise UserError('profile=True looks at a training step; add train to --what')


def scheme_config(text, given):
    """The GPTConfig of an entry of `schemes`, 'gd' or 'gd:pos=rope:mlp=swiglu'; `given` are the
    options for all."""
    name, *options = text.split(':')
    try:
        own = parse([f'--{option}' for option in options], GPTConfig)
        if shared := {'update', 'block_size', 'vocab_size'} & own.keys():
            raise UserError(
                f'{min(shared)} cannot stand here: the scheme comes first, and all get the same tokens'
            )
        return GPTConfig(**{**given, **own, 'update': name})
    except UserError as error:
        raise UserError(f'schemes: {text}: {error}') from None


def flops_per_token(model):
    """Operations of one training step per token: 6 for each weight of a matrix (2 forward, 4
    backward), and attention's products with every key, causal or not (PaLM, arXiv 2204.02311,
    appendix B). Tables are looked up, not multiplied."""
    cfg = model.cfg
    weights = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
    return 6 * weights + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


# -----------------------------------------------------------------------------------------------------------------
# contenders: what can take a training step and generate


class Scheme:
    """One of our schemes, trained as train.py does: forward, backward, clip, optimizer."""

    def __init__(self, name, gpt_cfg, cfg, rt):
        self.name, self.cfg, self.rt, self.gpt_cfg = name, cfg, rt, gpt_cfg
        torch.manual_seed(cfg.seed)
        self.model = GPT(gpt_cfg).to(rt.device)
        self.params, self.flops = self.model.num_params(), flops_per_token(self.model)
        self.tokens, self.prompt = random_tokens(gpt_cfg, cfg, rt)
        self.optimizer = self.decoder = None
        if {'train', 'memory'} & set(cfg.what):
            runtime.compile_model(self.model, cfg.compile, rt)
            train_cfg = TrainConfig(optimizer=cfg.optimizer, batch_size=cfg.batch_size).resolve(
                gpt_cfg.normalized
            )
            self.optimizer, self.grad_clip = (
                configure_optimizer(self.model, train_cfg, rt.dtype),
                train_cfg.grad_clip,
            )
            self.scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)

    def step(self):
        batch = self.tokens[:, :-1], self.tokens[:, 1:]
        train_step(
            self.model,
            self.model,
            self.optimizer,
            self.scaler,
            itertools.repeat(batch),
            self.cfg.gradient_accumulation_steps,
            self.grad_clip,
            self.rt,
        )

    def generate(self):
        if self.decoder is None:  # no more training
            self.optimizer = None
            self.decoder = Decoder(
                self.model,
                self.rt.dtype,
                self.cfg.gen_batch,
                runtime.to_compile(self.cfg.compile, self.rt, decoding=True),
            )
        with self.rt.autocast():
            return self.decoder.generate(self.prompt, self.cfg.max_new_tokens)


def contender(name, gpt_cfg, cfg, rt):
    kind = (
        Scheme if name not in PEERS.values() else Apart if rt.device.type == 'cpu' else HuggingFace
    )
    return kind(name, gpt_cfg, cfg, rt)


# -----------------------------------------------------------------------------------------------------------------
# measurements


def peak_bytes_here(name, gpt_cfg, cfg):
    """This process' peak memory after WARMUP training steps: on CUDA that of tensors there, else
    resident."""
    rt = runtime.start(cfg.device, cfg.dtype)
    if name == PEERS['hf'] and rt.device.type == 'cpu':
        memory.keep_freed_memory(False)  # as its user would have it
    one = (HuggingFace if name in PEERS.values() else Scheme)(name, gpt_cfg, cfg, rt)
    for _ in range(WARMUP):
        one.step()
    if rt.device.type == 'cuda':
        return torch.cuda.max_memory_allocated(rt.device)
    # Linux, whose getrusage counts the parent's in
    with contextlib.suppress(OSError), open('/proc/self/status', encoding='utf-8') as file:
        for line in file:
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == 'darwin' else 1024
    )


# -----------------------------------------------------------------------------------------------------------------
# output


def main(argv):
    given = parse(argv, GPTConfig, BenchConfig)
    cfg = build(BenchConfig, given)
    if cfg.table is not None:
        return print(markdown(cfg.table))
    if cfg.json is not None:
        check_json(Path(cfg.json))
    if cfg.suite is None:
        found = compare(given)
        keep(found, cfg.json)
    else:
        if idle := sorted(given.keys() - SUITE_OPTIONS):
            raise UserError(
                f'{idle[0]}={given[idle[0]]}: suite={cfg.suite} has its own; with it go {", ".join(sorted(SUITE_OPTIONS))}'
            )
        common = [f'--{key}={given[key]}' for key in given.keys() & {'device', 'rounds', 'seed'}]
        found = {'suite': []}
        for title, options in SUITES[cfg.suite].items():
            print(f'\n==== {title}: {options}', flush=True)
            shared = [
                option
                for option in common
                if '--what=memory' not in options or '--rounds' not in option
            ]
            # a process of its own: memory that one workload broke up slows the next
            with worker_pool(1) as pool:
                options = parse([*options.split(), *shared], GPTConfig, BenchConfig)
                found['suite'].append({'title': title} | pool.submit(compare, options).result())
            keep(found, cfg.json)  # what was measured, should the next one fail
    if cfg.json is not None:
        print(f'\nevery number: {cfg.json}')


def keep(found, path):
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')


def compare(given):
    """Measures what the checked options ask for -> the facts and every number, as a dict for
    JSON."""
    if 'update' in given:
        raise UserError(
            f'update={given["update"]}: bench.py compares several; write --schemes {given["update"]} ...'
        )
    cfg = build(BenchConfig, given)
    gpt_given = {
        key: value for key, value in given.items() if key in GPTConfig.__dataclass_fields__
    }
    gpt_given = gpt_given if SMALL.keys() & gpt_given else SMALL | gpt_given
    entries = [(text, scheme_config(text, gpt_given)) for text in cfg.schemes]
    for options, stages in ONLY_FOR.items():
        if idle := [name for name in options if name in given and not stages & set(cfg.what)]:
            raise UserError(
                f'no effect with what={",".join(cfg.what)}: {", ".join(f"{name}={given[name]}" for name in idle)}; leave out'
            )
    if cfg.peer:
        if unlike := [
            name for name, value in PEER_HAS.items() if gpt_given.get(name) not in (None, value)
        ]:
            raise UserError(
                f"peer={cfg.peer[0]}: transformers' GPT-2 is always {unlike[0]}={PEER_HAS[unlike[0]]}; leave {unlike[0]} out, or give it "
                f'to a scheme of ours, as in --schemes gd gd:{unlike[0]}={gpt_given[unlike[0]]}'
            )
        try:
            import transformers
        except ImportError:
            raise UserError('peer needs transformers: pip install transformers') from None
        sizes = ('n_layer', 'n_head', 'n_embd', 'vocab_size', 'block_size', 'dropout')
        entries += [
            (
                PEERS[peer],
                GPTConfig(
                    update='gd', **{key: gpt_given[key] for key in sizes if key in gpt_given}
                ),
            )
            for peer in cfg.peer
        ]
    for name, gpt_cfg in entries:
        if 'generate' in cfg.what and cfg.prompt_tokens + cfg.max_new_tokens > gpt_cfg.block_size:
            raise UserError(
                f'prompt_tokens={cfg.prompt_tokens} and max_new_tokens={cfg.max_new_tokens} do not fit block_size='
                f'{gpt_cfg.block_size} of {name}; lower them, or leave generation out with --what=train'
            )
    rt = runtime.start(cfg.device, cfg.dtype)
    if 'hf_tuned' in cfg.peer and rt.device.type != 'cpu':
        raise UserError(
            f'peer=hf_tuned: the allocator of main memory does nothing for device={rt.device.type}; use peer=hf'
        )
    if rt.distributed:
        raise UserError('bench.py measures one process: run it with python, not with torchrun')
    less = (
        f'lower --batch_size, or compare fewer --schemes at a time: all stay loaded on {rt.device}'
    )
    with memory.memory_for(less):
        try:
            return measure(entries, cfg, rt)
        except BrokenProcessPool:
            raise UserError(
                f'the process of a peer was killed, perhaps for memory; {less}'
            ) from None


def measure(entries, cfg, rt):
    """All that cfg asks for, of the entries (name, GPTConfig): prints the tables and returns every
    number."""
    about = facts(cfg, rt, *['transformers'] * bool(cfg.peer))
    print(
        f'{rt.device_name()}, {rt.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, '
        f'{about["dtype"]}'
    )
    # Metal keeps no peak
    memory = (
        cfg.memory and 'train' in cfg.what or 'memory' in cfg.what
    ) and rt.device.type != 'mps'
    block_size, sequences = (
        entries[0][1].block_size,
        cfg.batch_size * cfg.gradient_accumulation_steps,
    )
    with (
        tqdm(
            total=len(entries)
            * (memory + (WARMUP + cfg.rounds) * len({'train', 'generate'} & set(cfg.what))),
            disable=None,
            leave=False,
        ) as bar,
        contextlib.ExitStack() as ends,
    ):

        def tick(stage):
            return lambda name: (bar.set_description(f'{stage} {name}'), bar.update())

        peaks = [None] * len(entries)
        # first, while no other model is there to compete with
        for i, entry in enumerate(entries if memory else ()):
            tick('memory')(entry[0])
            peaks[i] = peak_bytes(peak_bytes_here, *entry, cfg)
        # each scheme's model runs through the same code
        torch._dynamo.config.recompile_limit = 1000
        contenders = []
        for entry in entries:
            contenders.append(contender(*entry, cfg, rt))
            # a worker of a suite would wait for it at its own end
            if isinstance(contenders[-1], Apart):
                ends.callback(contenders[-1].pool.shutdown)
        records = [
            {
                'scheme': one.name,
                'parameters': one.params,
                'peak_memory_bytes': peak,
                'flops_per_token': one.flops,
                'gpt_config': one.gpt_cfg and asdict(one.gpt_cfg),
            }
            for one, peak in zip(contenders, peaks)
        ]
        if 'train' in cfg.what:

            def steps(one):
                for _ in range(cfg.steps):
                    one.step()

            seconds = race(contenders, steps, cfg.rounds, rt, tick('train'))
            peak_flops = rt.peak_flops() if rt.dtype != torch.float32 else None  # it is bfloat16's
            for record, result in zip(
                records, results(seconds, cfg.steps, cfg.steps * sequences * block_size)
            ):
                known = peak_flops and record['flops_per_token']
                record['train'] = result | {
                    'mfu': known and record['flops_per_token'] * result['tokens_per_s'] / peak_flops
                }
        profiles = [
            f'{one.name}: one training step\n{one.ask(operations) if isinstance(one, Apart) else operations(one)}'
            for one in contenders
            if cfg.profile
        ]
        if 'generate' in cfg.what:
            seconds = race(contenders, lambda one: one.generate(), cfg.rounds, rt, tick('generate'))
            for record, result in zip(
                records, results(seconds, cfg.max_new_tokens, cfg.max_new_tokens * cfg.gen_batch)
            ):
                record['generate'] = result

    titles = {
        'train': f'training: {cfg.gradient_accumulation_steps} x {cfg.batch_size} x {block_size} tokens a step, {cfg.optimizer}',
        'generate': f'generation: {cfg.gen_batch} x {cfg.max_new_tokens} tokens after {cfg.prompt_tokens}, KV cache',
    }
    for stage, title in titles.items():
        if stage in cfg.what:
            print(f'\n{title}; median of {cfg.rounds} round{"s" * (cfg.rounds > 1)}')
            print(speed_table(records, stage, rt.device.type == 'cuda'))
    for profile in profiles:
        print(f'\n{profile}')
    if 'memory' in cfg.what:
        print(
            '\n'
            + '\n'.join(
                f'{record["scheme"]}: peak memory {record["peak_memory_bytes"] or 0:,} bytes'
                for record in records
            )
        )
    return about | {'results': records}


if __name__ == '__main__':
    run(main)
