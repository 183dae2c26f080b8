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
    from configurator import show_help

    # before torch is imported: instant
    show_help(__doc__, 'bench.py:BenchConfig', 'model.py:GPTConfig')

import contextlib
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import runtime
from configurator import UserError, at_least, build, parse, run
from generation import Decoder
from model import GPT, GPTConfig
from optim import configure_optimizer
from plot import table
from train import TrainConfig, update
from workers import worker_pool

SMALL = {'n_layer': 6, 'n_head': 6, 'n_embd': 192, 'block_size': 128}
PEERS = {'hf': 'hf_gpt2', 'hf_tuned': 'hf_gpt2_tuned'}
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
PEER_HAS = {'pos': 'learned', 'mlp': 'gelu', 'tie_weights': True}
ONLY_FOR = {  # options: the stages that they matter to
    ('steps', 'memory'): {'train'},
    ('batch_size', 'gradient_accumulation_steps', 'optimizer'): {'train', 'memory'},
    ('rounds',): {'train', 'generate'},
    ('gen_batch', 'prompt_tokens', 'max_new_tokens'): {'generate'},
}
SUITE_OPTIONS = {'suite', 'json', 'device', 'rounds', 'seed'}
# steps of the memory measurement, rounds of the others: from the second on, the optimizer's state
# lies beside the gradients
WARMUP = 2


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
        update(
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


class HuggingFace:
    """transformers' GPT-2 as its user would have it: float32, AdamW, its own cached generate."""

    def __init__(self, name, gpt_cfg, cfg, rt):
        import transformers

        transformers.logging.set_verbosity_error()
        self.name, self.cfg, self.rt, self.gpt_cfg, self.flops = name, cfg, rt, None, None
        torch.manual_seed(cfg.seed)
        sizes = {
            name: getattr(gpt_cfg, name) for name in ('vocab_size', 'n_embd', 'n_layer', 'n_head')
        }
        drop = dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), gpt_cfg.dropout)
        self.model = (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    **sizes,
                    **drop,
                    n_positions=gpt_cfg.block_size,
                    bos_token_id=None,
                    eos_token_id=None,
                )
            )
            .to(rt.device)
            .train()
        )
        self.params = sum(p.numel() for p in self.model.parameters())
        self.tokens, self.prompt = random_tokens(gpt_cfg, cfg, rt)
        if {'train', 'memory'} & set(cfg.what):
            runtime.compile_model(self.model, cfg.compile, rt)
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=TrainConfig().resolve(False).learning_rate
            )

    def step(self):
        x, micro_steps = self.tokens[:, :-1], self.cfg.gradient_accumulation_steps
        for _ in range(micro_steps):
            # it shifts the labels itself
            (self.model(x, labels=x, use_cache=False).loss / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), TrainConfig.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def generate(self):
        self.model.eval()
        with torch.compiler.set_stance('force_eager'):
            tokens = self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                pad_token_id=0,
                do_sample=True,
                top_k=0,
                max_new_tokens=self.cfg.max_new_tokens,
            )
        self.model.train()
        return tokens


def random_tokens(gpt_cfg, cfg, rt):
    """Ids to train on (batch_size, block_size + 1) and to start from (gen_batch, prompt_tokens),
    the same for all."""
    generator = torch.Generator().manual_seed(cfg.seed)
    shapes = (cfg.batch_size, gpt_cfg.block_size + 1), (cfg.gen_batch, cfg.prompt_tokens)
    return [
        torch.randint(gpt_cfg.vocab_used, shape, generator=generator).to(rt.device)
        for shape in shapes
    ]


class Apart:
    """A peer on the CPU in a process of its own, as its user would have it: without runtime.start's
    setting of the allocator, unless tuned."""

    def __init__(self, name, *args):
        self.name, self.gpt_cfg, self.flops, self.pool = name, None, None, worker_pool(1)
        try:
            self.params = self.pool.submit(Apart.begin, name, *args).result()
        except BaseException:
            self.pool.shutdown()
            raise

    @staticmethod
    def begin(name, *args):
        if name == PEERS['hf_tuned']:
            runtime.keep_freed_memory()
        Apart.one = HuggingFace(name, *args)
        return Apart.one.params

    def ask(self, act):
        return self.pool.submit(Apart.answer, act).result()

    @staticmethod
    def answer(act):
        return act(Apart.one)

    def step(self):
        self.ask(HuggingFace.step)

    def generate(self):
        return self.ask(HuggingFace.generate)


def contender(name, gpt_cfg, cfg, rt):
    kind = (
        Scheme if name not in PEERS.values() else Apart if rt.device.type == 'cpu' else HuggingFace
    )
    return kind(name, gpt_cfg, cfg, rt)


# -----------------------------------------------------------------------------------------------------------------
# measurements


def race(contenders, act, rounds, rt, tick=lambda name: None):
    """Seconds that `act` takes with each contender, a list per contender of one number per round.

    Round after round all take their turn, each time another one first. WARMUP more rounds before do
    not count."""
    seconds, n = [[] for _ in contenders], len(contenders)
    for i in range(WARMUP + rounds):
        for j in range(n):
            k = (i + j) % n
            tick(contenders[k].name)
            rt.synchronize()
            t0 = time.perf_counter()
            act(contenders[k])
            rt.synchronize()
            seconds[k].append(time.perf_counter() - t0)
    return [numbers[WARMUP:] for numbers in seconds]


def spread(numbers):
    """Median, extremes and quartiles of a list."""
    q1, median, q3 = (
        statistics.quantiles(numbers, n=4, method='inclusive') if len(numbers) > 1 else numbers * 3
    )
    return {'median': median, 'min': min(numbers), 'max': max(numbers), 'q1': q1, 'q3': q3}


def peak_bytes_here(name, gpt_cfg, cfg):
    """This process' peak memory after WARMUP training steps: on CUDA that of tensors there, else
    resident."""
    rt = runtime.start(cfg.device, cfg.dtype)
    if name == PEERS['hf'] and rt.device.type == 'cpu':
        runtime.keep_freed_memory(False)  # as its user would have it
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


def peak_bytes(*args):
    """peak_bytes_here in a fresh process, which holds nothing else; None where it can't be had."""
    try:
        with worker_pool(1) as pool:
            return pool.submit(peak_bytes_here, *args).result()
    except (BrokenProcessPool, ImportError) as error:
        runtime.warn(f'no peak memory of {args[0]}: {error}')


def operations(one):
    """A table of the costliest operations of one training step."""
    with torch.profiler.profile() as profiler:
        one.step()
        one.rt.synchronize()
    where = 'self_device_time_total' if one.rt.device.type == 'cuda' else 'self_cpu_time_total'
    return profiler.key_averages().table(sort_by=where, row_limit=15, max_name_column_width=40)


def results(seconds, count, tokens):
    """One record for each contender of a race; a measurement took it through `count` steps and
    `tokens` tokens."""
    for numbers in seconds:
        # round by round: both ran within the same moments
        ratios = [a / b for a, b in zip(numbers, seconds[0])]
        each = [number / count for number in numbers]
        yield {
            'seconds': each,
            'seconds_spread': spread(each),
            'tokens_per_s': tokens / count / spread(each)['median'],
            'relative': ratios,
            'relative_spread': spread(ratios),
        }


# -----------------------------------------------------------------------------------------------------------------
# output


def machine(rt):
    gpu = rt.device_name() if rt.device.type == 'cuda' else None
    return {
        'cpu': replace(rt, device=torch.device('cpu')).device_name(),
        'cores': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'gpu': gpu,
        'system': platform.platform(),
    }


def facts(cfg, rt, *packages):
    """What a file of results says about the run that made it; `packages` are named with their
    versions, beside torch."""
    versions = {'python': platform.python_version(), 'torch': torch.__version__} | {
        name: version(name) for name in packages
    }
    return {
        'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        'command': shlex.join(['python', *sys.argv]),
        'commit': runtime.code_version(),
        'machine': machine(rt),
        'device': rt.device.type,
        'dtype': str(rt.dtype)[6:],
        'versions': versions,
        'config': asdict(cfg),
    }


def speed_table(records, stage, on_gpu):
    """The records' results of one stage, 'train' or 'generate', as text; columns that nothing is
    known for are left out."""
    columns, first = {}, records[0]['scheme']
    for record in records:
        result, peak = record[stage], record['peak_memory_bytes'] if stage == 'train' else None
        ms, ratio = (
            {key: 1e3 * value for key, value in result['seconds_spread'].items()},
            result['relative_spread'],
        )
        # three figures: machines are no better
        digits = max(0, 2 - math.floor(math.log10(ms['median'])))
        row = {
            'scheme': record['scheme'],
            'parameters': f'{record["parameters"]:,}',
            'ms/step' if stage == 'train' else 'ms/token': f'{ms["median"]:,.{digits}f}',
            'middle half': f'{ms["q1"]:,.{digits}f} to {ms["q3"]:,.{digits}f}',
            'range': f'{ms["min"]:,.{digits}f} to {ms["max"]:,.{digits}f}',
            'tokens/s': f'{result["tokens_per_s"]:,.0f}',
            f'time / {first}': f'{ratio["median"]:.3f}',
            '(middle half)': f'{ratio["q1"]:.3f} to {ratio["q3"]:.3f}',
            'GPU peak' if on_gpu else 'process peak': f'{peak / 2**30:.2f} GiB' if peak else '-',
            'MFU': f'{result["mfu"]:.1%}' if result.get('mfu') else '-',
        }
        for title, text in row.items():
            columns.setdefault(title, [title]).append(text)
    return table(list(zip(*(texts for texts in columns.values() if set(texts[1:]) != {'-'}))))


def check_json(path):
    """UserError now rather than after the measurements."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise OSError('it cannot be written there')
    except OSError as error:
        raise UserError(f'json={path}: {error.strerror or error}; choose another file') from None


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


def markdown(path):
    """A suite's file as a table for README."""
    try:
        suite = json.loads(Path(path).read_text(encoding='utf-8'))['suite']
        rows = [
            '| workload | scheme | milliseconds (middle half) | tokens/s | time / first (middle half) | peak memory |',
            '|---|---|---|---|---|---|',
        ]
        for one in suite:
            for record in one['results']:
                timed = next(
                    (record[stage] for stage in ('train', 'generate') if stage in record), None
                )
                cells = ['', '', '']
                if timed:
                    ms, ratio = (
                        {key: value * scale for key, value in timed[name].items()}
                        for name, scale in (('seconds_spread', 1e3), ('relative_spread', 1))
                    )
                    cells = [
                        f'{ms["median"]:,.1f} ({ms["q1"]:,.1f} to {ms["q3"]:,.1f})',
                        f'{timed["tokens_per_s"]:,.0f}',
                        f'{ratio["median"]:.3f} ({ratio["q1"]:.3f} to {ratio["q3"]:.3f})',
                    ]
                peak = record['peak_memory_bytes']
                cells = [
                    one['title'],
                    f'`{record["scheme"]}`',
                    *cells,
                    f'{peak / 2**30:.2f} GiB' if peak else '',
                ]
                rows.append(f'| {" | ".join(cells)} |')
        return '\n'.join(rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'table={path}: not the file of a suite ({error}); make one with --suite=cpu --json={path}'
        ) from None


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
    with runtime.memory_for(less):
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
            peaks[i] = peak_bytes(*entry, cfg)
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
