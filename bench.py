"""Compares the speed and the memory of update schemes side by side, on a CPU, a GPU or a Mac.

    python bench.py                                   # gd, lt_nag and ngpt, small: a minute or two
    python bench.py --schemes gd lt_nag gd:pos=rope:mlp=swiglu --n_layer=12 --batch_size=1
    python bench.py --schemes gd lt_nag --peer=hf --json=results/bench.json
    python bench.py --suite=cpu --json=results/bench_cpu.json    # README's table, some 20 minutes
    python bench.py --table=results/bench_cpu.json               # that table, from the file

A scheme may carry model options of its own after colons; all other options hold for all schemes.
Without any of n_layer, n_head, n_embd and block_size the model is small; with one of them, those
not given are GPTConfig's defaults. The schemes take turns, in an order that rotates from round to
round, so that a slow spell of the machine hits all of them; each is compared with the first one
listed, round by round.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    # before torch is imported: instant
    show_help(__doc__, 'bench.py:BenchConfig', 'model.py:GPTConfig')

import functools
import itertools
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm

from model import GPT, GPTConfig
from nanonag import memory, runtime
from nanonag.benchmark import peers
from nanonag.benchmark.contender import Contender, closing_all, flops_per_token, records_of
from nanonag.benchmark.options import FOR_WORKLOADS, check_effect, check_lengths, check_suite
from nanonag.benchmark.tables import heading, markdown, report_text
from nanonag.benchmark.timing import WARMUP, peak_bytes, time_generation, time_training
from nanonag.benchmark.workloads import read_suite
from nanonag.cli import UserError, run, stay_single
from nanonag.configurator import FilePath, at_least, build, parse
from nanonag.decoder import Decoder
from nanonag.optim import configure_optimizer
from nanonag.report import check_json, result_facts, write_json
from nanonag.workers import worker_pool
from train import TrainConfig, train_step

SMALL = {'n_layer': 6, 'n_head': 6, 'n_embd': 192, 'block_size': 128}
STAGES = ('train', 'generate', 'memory')


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    # NAME or NAME:option=value:...; the others are compared with the first
    schemes: tuple[str, ...] = ('gd', 'lt_nag', 'ngpt')
    # hf: also transformers' GPT-2 of that size, float32, plain AdamW; hf_tuned: with our setting
    # of the C library's allocator
    peer: tuple[str, ...] = ()
    # instead of all of the above and sizes: the workloads of docs/performance.md
    suite: Literal['cpu', 'cuda'] | None = None
    # instead of measuring: print the table of docs/performance.md from the file of a suite
    table: FilePath | None = None
    what: tuple[str, ...] = ('train', 'generate')  # either or both, or memory alone
    rounds: int = 5  # measurements of each scheme, after two that do not count
    steps: int = 1  # training steps in a measurement
    batch_size: int = 4  # sequences of block_size tokens in a micro-batch
    # micro-batches in a training step; the optimizer's work is per step
    gradient_accumulation_steps: int = 1
    # muon's work is per step: with a single micro-batch its share looks too big
    optimizer: Literal['adamw', 'muon'] = 'adamw'
    gen_batch: int = 1  # sequences generated at once
    prompt_tokens: int = 32  # tokens in each prompt
    max_new_tokens: int = 64  # tokens generated after it, sampled, with the KV cache
    memory: bool = True  # also the peak in training, in a process of its own for each scheme
    profile: bool = False  # also the costliest operations of one training step of each scheme
    json: FilePath | None = None  # file for every raw number, the options and the machine
    seed: int = 1337  # of the weights and the random tokens
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    # of the matmuls; auto: bfloat16 where hardware has it
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'
    compile: Literal['auto', 'True', 'False'] = 'auto'  # auto: on CUDA

    def __post_init__(self):
        at_least(self, rounds=1, steps=1, batch_size=1, gradient_accumulation_steps=1, gen_batch=1)
        at_least(self, prompt_tokens=1, max_new_tokens=1, seed=0)
        for stage in self.what:
            if stage not in STAGES:
                raise UserError(
                    f'what={stage}: choose among {", ".join(STAGES)}: --what=train,generate'
                )
        for peer in self.peer:
            if peer not in peers.PEERS:
                raise UserError(f'peer={peer}: choose among {", ".join(peers.PEERS)}')
        if self.profile and 'train' not in self.what:
            raise UserError('profile=True looks at a training step; add train to --what')

    @property
    def trains(self):
        """Whether contenders take training steps."""
        return 'train' in self.what or 'memory' in self.what

    @property
    def measures_memory(self):
        """Whether the peak memory of training is measured."""
        return 'memory' in self.what or ('train' in self.what and self.memory)


# -----------------------------------------------------------------------------
# options


def scheme_config(text, shared):
    """Returns the GPTConfig of an entry of `schemes`, 'gd' or 'gd:pos=rope:mlp=swiglu'.

    `shared` are the model options of all schemes. Raises UserError for options that do not exist,
    that do not fit the scheme, or that must be the same for all.
    """
    name, *options = text.split(':')
    try:
        own = parse([f'--{option}' for option in options], GPTConfig)
        for key in ('block_size', 'update', 'vocab_size'):
            if key in own:
                raise UserError(
                    f'{key} cannot stand here: the scheme comes first, and all schemes get the '
                    'same tokens'
                )
        return GPTConfig(**{**shared, **own, 'update': name})
    except UserError as error:
        raise UserError(f'schemes: {text}: {error}') from None


def entries_of(given, cfg):
    """Returns what is compared, a list of (name, GPTConfig): the schemes, then the peers.

    A peer's GPTConfig stands for its sizes. Raises UserError for options that do not fit.
    """
    if 'update' in given:
        update = given['update']
        raise UserError(
            f'update={update}: bench.py compares several schemes; write --schemes {update} ...'
        )
    shared = {key: given[key] for key in given if key in GPTConfig.__dataclass_fields__}
    if not SMALL.keys() & shared.keys():
        shared = SMALL | shared
    entries = [(text, scheme_config(text, shared)) for text in cfg.schemes]
    peers.check_options(cfg.peer, shared)
    sizes = {key: shared[key] for key in peers.SIZES if key in shared}
    entries += [(peers.PEERS[peer], GPTConfig(update='gd', **sizes)) for peer in cfg.peer]
    check_lengths(entries, cfg)
    return entries


# -----------------------------------------------------------------------------
# contenders


class Scheme(Contender):
    """One of our schemes, trained as train.py does: forward, backward, clipping, optimizer."""

    def __init__(self, name, gpt_cfg, cfg, rt):
        super().__init__(name, gpt_cfg, cfg, rt)
        self.gpt_cfg = gpt_cfg
        torch.manual_seed(cfg.seed)
        self.model = GPT(gpt_cfg).to(rt.device)
        self.params = self.model.num_params()
        self.flops_per_token = flops_per_token(self.model)
        self.decoder = None
        if cfg.trains:
            runtime.compile_model(self.model, cfg.compile, rt)
            options = TrainConfig(optimizer=cfg.optimizer, batch_size=cfg.batch_size)
            options = options.resolve(gpt_cfg.normalized)
            self.grad_clip = options.grad_clip
            self.optimizer = configure_optimizer(self.model, options, rt.dtype)
            self.scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)

    def step(self):
        batches = itertools.repeat((self.tokens[:, :-1], self.tokens[:, 1:]))
        micro_steps = self.cfg.gradient_accumulation_steps
        model = self.model
        train_step(
            model, model, self.optimizer, self.scaler, batches, micro_steps, self.grad_clip, self.rt
        )

    def generate(self):
        """Contender.generate; the model cannot be trained any more afterwards."""
        if self.decoder is None:
            self.optimizer = None
            compiled = runtime.to_compile(self.cfg.compile, self.rt, decoding=True)
            self.decoder = Decoder(self.model, self.rt.dtype, self.cfg.gen_batch, compiled)
        with self.rt.autocast():
            return self.decoder.generate(self.prompt, self.cfg.max_new_tokens)


def contender(name, gpt_cfg, cfg, rt):
    """Returns the contender of an entry."""
    kind = peers.start if name in peers.PEERS.values() else Scheme
    return kind(name, gpt_cfg, cfg, rt)


def lone_contender(name, gpt_cfg, cfg):
    """Returns the contender of an entry as the only one in this process, which is a fresh one."""
    rt = runtime.start(cfg.device, cfg.dtype)
    kind = peers.start_alone if name in peers.PEERS.values() else Scheme
    return kind(name, gpt_cfg, cfg, rt)


# -----------------------------------------------------------------------------
# measurements


def measure(entries, cfg, rt):
    """Takes all measurements that cfg asks for of the entries (name, GPTConfig).

    Returns (records, profiles): a dict for JSON for each entry, and texts if cfg.profile.
    """
    measures_memory = cfg.measures_memory and rt.device.type != 'mps'  # Metal keeps no peak
    n_timed = len({'train', 'generate'} & set(cfg.what))
    turns = n_timed * (WARMUP + cfg.rounds) + int(measures_memory)
    peaks = [None] * len(entries)
    timed = {}
    profiles = []
    with tqdm(total=turns * len(entries), disable=None, leave=False) as bar:

        def on_turn(stage, name):
            bar.set_description(f'{stage} {name}')
            bar.update()

        if measures_memory:  # first, while no other model is loaded
            peaks = [measure_memory(name, gpt_cfg, cfg, on_turn) for name, gpt_cfg in entries]
        created = (contender(name, gpt_cfg, cfg, rt) for name, gpt_cfg in entries)
        with closing_all(created) as contenders:
            if 'train' in cfg.what:
                timed['train'] = time_training(contenders, cfg, rt, on_turn)
            if cfg.profile:
                profiles = [contender.profile() for contender in contenders]
            if 'generate' in cfg.what:
                timed['generate'] = time_generation(contenders, cfg, rt, on_turn)
            return records_of(contenders, peaks, timed), profiles


def measure_memory(name, gpt_cfg, cfg, on_turn):
    """Returns the peak memory of training an entry, in bytes, None if it cannot be measured."""
    on_turn('memory', name)
    return peak_bytes(name, functools.partial(lone_contender, name, gpt_cfg, cfg))


def compare(given):
    """Measures what the options ask for and prints the tables.

    Returns the facts and every number, a dict for JSON. Raises UserError for options that
    contradict each other, and if memory does not suffice.
    """
    cfg = build(BenchConfig, given)
    check_effect(given, cfg)
    entries = entries_of(given, cfg)
    rt = runtime.start(cfg.device, cfg.dtype)
    peers.check_device(cfg.peer, rt.device)
    torch._dynamo.config.recompile_limit = 1000  # all models run through the same code
    facts = result_facts(cfg, rt, ['transformers'] if cfg.peer else [])
    print(heading(rt))
    remedy = f'lower --batch_size, or compare fewer --schemes: all stay loaded on {rt.device}'
    with memory.memory_for(remedy):
        try:
            records, profiles = measure(entries, cfg, rt)
        except BrokenProcessPool:
            raise UserError(f"a peer's process was killed, perhaps for memory; {remedy}") from None
    print(report_text(records, profiles, cfg, rt))
    return facts | {'results': records}


def run_suite(workloads, given, path):
    """Measures the workloads (title, options) one after the other, each in a fresh process.

    Memory that one workload has fragmented would slow the next. `given` are the options for all;
    `path`, a JSON file or None, is written after each workload: an error in the next one leaves it.
    """
    suite = []
    common = {key: given[key] for key in FOR_WORKLOADS if key in given}
    for title, options in workloads:
        print(f'\n==== {title}: {options}', flush=True)
        workload = parse(options.split(), GPTConfig, BenchConfig) | common
        if workload.get('what') == ('memory',):
            workload.pop('rounds', None)  # there are none
        with worker_pool(1) as pool:
            numbers = pool.submit(compare, workload).result()
        suite.append({'title': title, **numbers})
        write_json(path, {'suite': suite})


def main(argv):
    stay_single('bench.py')
    given = parse(argv, GPTConfig, BenchConfig)
    cfg = build(BenchConfig, given)
    if cfg.table is not None:
        print(markdown(cfg.table))
        return
    check_json(cfg.json)
    if cfg.suite is None:
        write_json(cfg.json, compare(given))
    else:
        check_suite(given)
        run_suite(read_suite(cfg.suite), given, cfg.json)
    if cfg.json is not None:
        print(f'\nevery number: {cfg.json}')


if __name__ == '__main__':
    run(main)
