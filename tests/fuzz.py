"""
Feeds broken, hostile and random files and command lines to the scripts and watches what they do.

    python tests/fuzz.py --seed=1 --cases=10000                     minutes on one core
    python tests/fuzz.py --seed=1 --first=4711 --cases=1 --verbose  one case, with all it printed

The exit code is 1 if anything was found.

Case n of a seed is always the same. It may end with exit code 0 or 2 (or 1 where training itself
failed, as from a rate of 1e308), within its time and memory, without an exception that nobody
caught, and without touching a file outside its out_dir. Cases run in forked workers, so that a hang
or a crash is a finding and not the end."""

import collections
import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import typing
import warnings
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import torch
from conftest import ALPHABET, SMALL, arguments, write_data

import bench
import plot
import sample
import train
from model import GPT, GPTConfig
from nanonag import checkpoint, memory, report
from nanonag.cli import run
from nanonag.configurator import alternatives, at_least, build, parse
from nanonag.data import tokenizer
from nanonag.data.writer import PrepareConfig

BATCH = 200  # cases of a worker: what they leak ends with it
MEMORY = 3 * 2**30  # that a worker may allocate beyond what it starts with
GROWTH = 2**29  # resident bytes that a case may add by files of at most INPUT bytes
INPUT = 2**20


@dataclasses.dataclass(frozen=True)
class FuzzConfig:
    seed: int = 1
    cases: int = 1000
    first: int = 0  # number of the first case
    limit: float = 20.0  # seconds of a case
    only: str | None = None  # a kind of case
    verbose: bool = False  # print what each case printed

    def __post_init__(self):
        at_least(self, seed=0, cases=1, first=0, limit=0.1)


# --------------------------------------------------------------------------------------------------
# what cases are made from


class Evil:
    """Unpickles as a call that leaves a file."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def prepare_script(name):
    spec = importlib.util.spec_from_file_location(
        f'prepare_{name}', ROOT / 'data' / name / 'prepare.py'
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {
    'train': (train.main, (GPTConfig, train.TrainConfig)),
    'sample': (sample.main, (sample.SampleConfig,)),
    'bench': (bench.main, (bench.BenchConfig, GPTConfig)),
    'plot': (plot.main, (plot.PlotConfig,)),
}
SCRIPTS |= {
    f'prepare {name}': (prepare_script(name).main, (PrepareConfig,))
    for name in ('pystdlib_char', 'shakespeare_char', 'shakespeare', 'tinystories')
}
GENTLE = {'n_layer': 1, 'n_head': 2, 'n_embd': 16, 'block_size': 16, 'device': 'cpu'}
TRAIN = {**SMALL, 'max_iters': 1, 'eval_iters': 1, 'batch_size': 2}
SAMPLE = {'num_samples': 1, 'max_new_tokens': 2, 'start': 'a', 'device': 'cpu'}
BENCH = {
    **GENTLE,
    'vocab_size': 13,
    'schemes': 'gd,lt_nag',
    'rounds': 1,
    'max_new_tokens': 2,
    'prompt_tokens': 1,
    'memory': False,
}
# What a user may rightly wait for, that would fork a process for each case, or that writes where it
# is told.
COSTLY = {
    'max_iters',
    'eval_iters',
    'eval_batch_size',
    'max_new_tokens',
    'rounds',
    'steps',
    'memory',
    'profile',
    'compile',
    'peer',
    'out_dir',
    'out',
    'json',
    'wandb_log',
    'parallel',
    'input',
    'val_input',
    'revision',
    'num_proc',
    'n_layer',
    'full_eval',
    'gradient_accumulation_steps',
}


def deep(depth, leaf=0):
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def laughs(levels=60):
    """A small object that is exponentially large to who walks it."""
    value = ['ha']
    for _ in range(levels):
        value = [value, value]
    return value


def plain_values():
    """What JSON can hold."""
    return [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        2**31,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64,
        10**400,
        -(10**30),
        0.5,
        -0.0,
        1e-320,
        1e308,
        -1e308,
        math.nan,
        math.inf,
        -math.inf,
        '',
        'x',
        '0',
        'None',
        'nan',
        '\x00',
        '\ud800',
        'é' * 3,
        '\u202e\n\x1b[31m',
        '$\\frac{$',
        '{0}%s',
        'a' * 5000,
        '../' * 40 + 'etc/passwd',
        '/',
        '.',
        [],
        {},
        [0],
        [[]],
        {'a': 1},
        {'': {}},
        list(range(300)),
        ['a'] * 300,
        deep(50),
        deep(300),
    ]


def torch_values():
    """What a checkpoint can hold beside these."""
    return [
        b'bytes',
        (),
        (1, 2),
        {1, 2},
        1j,
        10**5000,
        -(10**5000),
        {1: 2, 'a': 3},
        {None: 0},
        laughs(),
        torch.Size([1]),
        torch.float64,
        torch.device('meta'),
        collections.OrderedDict(a=1),
        torch.zeros(0),
        torch.zeros(()),
        torch.zeros(16, 16),
        torch.zeros(1, 1, 1),
        torch.full((13, 16), math.nan),
        torch.full((13, 16), 1e38),
        torch.zeros(1).expand(2**40),
        torch.zeros(1).expand(13, 16),
        torch.zeros(13, 16, dtype=torch.float64),
        torch.zeros(13, 16, dtype=torch.complex64),
        torch.zeros(13, 16, dtype=torch.int8),
        torch.zeros(13, 16, dtype=torch.bool),
        torch.zeros(13, 16, dtype=torch.bfloat16),
        torch.zeros(13, 16).to_sparse(),
        torch.zeros(13, 16, device='meta'),
        torch.nn.Parameter(torch.zeros(13, 16)),
        torch.zeros(13, 16)[:, ::2],
        torch.quantize_per_tensor(torch.zeros(13, 16), 0.1, 0, torch.qint8),
        torch.zeros(5056, dtype=torch.uint8),
    ]


with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # quantized tensors are deprecated
    PLAIN, ALL = plain_values(), plain_values() + torch_values()


def make_materials(folder):
    """A prepared data folder, a finished run, a nanoGPT checkpoint and a text, for the cases to
    break."""
    write_data(folder / 'data')
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(
            arguments(
                {
                    **TRAIN,
                    'dataset': folder / 'data',
                    'out_dir': folder / 'run',
                    'max_iters': 2,
                    'dropout': 0.1,
                }
            )
        )
    model = GPT(
        GPTConfig(update='gd', n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=50257)
    )
    arguments_ = dict(
        n_layer=1, n_head=2, n_embd=16, block_size=16, bias=False, vocab_size=50257, dropout=0.0
    )
    torch.save(
        {
            'model': {f'_orig_mod.{name}': w for name, w in model.state_dict().items()},
            'optimizer': {},
            'iter_num': 5,
            'model_args': arguments_,
            'best_val_loss': torch.tensor(3.0),
            'config': {},
        },
        folder / 'nanogpt.pt',
    )
    with zipfile.ZipFile(folder / 'bomb.pt', 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        with file.open('bomb/data.pkl', 'w', force_zip64=True) as data:
            data.write(b'\x80\x02')
            for _ in range(2 * GROWTH // 2**20):
                data.write(b'N0' * 2**19)  # None, and away with it: nothing but long
            data.write(b'N.')
        file.writestr('bomb/version', '3\n')
    (folder / 'text.txt').write_text(
        'To be, or not to be, that is the question: é ü \U0001f600\n' * 30, encoding='utf-8'
    )
    (folder / 'rows.jsonl').write_text(
        ''.join(json.dumps({'text': f'story {i} of many. ' * 5}) + '\n' for i in range(30)),
        encoding='utf-8',
    )


# --------------------------------------------------------------------------------------------------
# mutations


def mutate_bytes(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 2, 8, 100, 4096])
        match rng.randrange(6):
            case 0:
                data[at : at + length] = bytes(rng.randrange(256) for _ in data[at : at + length])
            case 1:
                data[at:] = b''
            case 2:
                data[at:at] = data[rng.randrange(len(data) + 1) :][:length]
            case 3:
                data[at : at + length] = b''
            case 4:
                data[at : at + length] = bytes(len(data[at : at + length]))
            case 5:
                data[at:at] = rng.choice(
                    [
                        b'\xff',
                        b'\xff\xfe',
                        b'\xef\xbb\xbf',
                        b'\0',
                        b'"',
                        b'{',
                        b'[' * 3000,
                        b'9' * 5000,
                        b'e999',
                        b'\r',
                    ]
                )
    return bytes(data)


def mutate(value, rng, values, times=None):
    """A copy of nested dicts and lists with entries replaced, removed, added, renamed or swapped at
    random places."""
    value = copy.deepcopy(value)
    for _ in range(times or rng.choice([1, 1, 1, 2, 3])):
        node = value
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            inner = [
                key
                for key in keys
                if isinstance(node[key], (dict, list)) and node[key] and len(node[key]) < 500
            ]
            if not inner or rng.random() < 0.35:
                break
            node = node[rng.choice(inner)]
        key, other, new = rng.choice(keys), rng.choice(keys), copy.deepcopy(rng.choice(values))
        match rng.choice(['replace'] * 6 + ['remove', 'add', 'rename', 'swap', 'nudge']):
            case 'replace':
                node[key] = new
            case 'remove':
                del node[key]
            case 'add' if isinstance(node, dict):
                node[rng.choice(['', 'x', 'n_layers', 7])] = new
            case 'add':
                node.insert(key, new)
            case 'rename' if isinstance(node, dict):
                node[f'{key}x'] = node.pop(key)
            case 'swap':
                node[key], node[other] = node[other], node[key]
            case _ if type(node[key]) in (int, float):
                node[key] = node[key] * rng.choice([-1, 0, 2, 1000]) + rng.choice([0, 1, -1, 0.5])
            case _:
                node[key] = [node[key]]
        if not value:
            break
    return value


def mutate_zip(path, rng, canary):
    """Rewrites a checkpoint's archive: other names, links, doubled and packed entries, another
    pickle."""
    with zipfile.ZipFile(path) as file:
        entries = [(info, file.read(info)) for info in file.infolist()]
    rng.shuffle(entries)
    how = rng.choice(['names', 'links', 'packed', 'doubled', 'pickle', 'records', 'missing'])
    with warnings.catch_warnings(), zipfile.ZipFile(path, 'w') as file:
        warnings.simplefilter('ignore')  # of doubled names
        for info, data in entries:
            new = zipfile.ZipInfo(info.filename)
            if how == 'names' and rng.random() < 0.4:
                new.filename = rng.choice(
                    ['../../evil', '/tmp/evil', 'a/../../data.pkl', 'x' * 3000, 'é', '']
                )
            if how == 'links' and rng.random() < 0.5:
                new.external_attr, data = (stat.S_IFLNK | 0o777) << 16, b'../../evil'
            if how == 'pickle' and info.filename.endswith('data.pkl'):
                data = evil_pickle(rng, canary) if rng.random() < 0.5 else mutate_bytes(data, rng)
            if how == 'records' and '/data/' in info.filename and rng.random() < 0.3:
                data = rng.choice([b'', data[: len(data) // 2], data * 2])
            if how == 'missing' and rng.random() < 0.2:
                continue
            new.compress_type = zipfile.ZIP_DEFLATED if how == 'packed' else zipfile.ZIP_STORED
            for _ in range(2 if how == 'doubled' else 1):
                file.writestr(new, data)


def evil_pickle(rng, canary):
    """A pickle that runs code in a reader that lets it, or that makes it count to infinity."""
    command = f'touch {canary}'
    thing = rng.choice(
        [
            Evil(os.system, (command,)),
            Evil(eval, (f'open({str(canary)!r}, "w")',)),
            Evil(open, (str(canary), 'w')),
            Evil(__import__, ('os',)),
            Evil(torch.zeros, (2**40,)),
            Evil(torch.load, (str(canary),)),
            Evil(Path, (str(canary),)),
        ]
    )
    torch_calls = [
        b'ctorch\nload\n',
        b'ctorch._utils\n_rebuild_tensor_v2\n',
        b'ccollections\nOrderedDict\n',
        b'c__builtin__\nbytearray\n',
        b'ctorch\nFloatStorage\n',
        b'ctorch.nn.modules.linear\nLinear\n',
        b'cos\nsystem\n',
    ]
    return rng.choice(
        [
            pickle.dumps({'version': 1, 'model': thing}, 2),
            pickle.dumps(thing, rng.choice([0, 2, 4])),
            b'\x80\x02' + rng.choice(torch_calls) + b'(K\x01K\x02tR.',
            b'\x80\x02(' + b'(' * 10**5 + b'.',
            b'\x80\x02' + b']' * 10**5 + b'.',
            b'\x80\x02\x8a\xff' + b'\xff' * 255 + b'.',
            b'\x80\x02\x8b\xff\xff\xff\x7f.',
            b'\x80\x02T\xff\xff\xff\x7fa.',
            b'\x80\x02X\xff\xff\xff\xffa.',
            b'\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.',
            b'\x80\x02]q\x00h\x00a.',
            b'\x80\x02r\xff\xff\xff\x7f.',
            b'\x80\x05\x95' + b'\xff' * 8,
        ]
    )


# --------------------------------------------------------------------------------------------------
# the kinds of cases: each writes files into the folder of the case and returns (script, arguments)


def options(values):
    return arguments(values)


def reader(rng, case, run_dir, name='ckpt.pt'):
    """Whoever may read the checkpoint in `run_dir`."""
    data = {**TRAIN, 'dataset': case.base / 'data'}
    resume = {key: data[key] for key in ('dataset', 'device', 'compile')}
    return rng.choice(
        [
            ('sample', options({**SAMPLE, 'out_dir': run_dir})),
            ('sample', options({**SAMPLE, 'init_from': run_dir / name})),
            (
                'train',
                options({**resume, 'out_dir': case.out, 'init_from': 'resume', 'max_iters': 3}),
            ),
            (
                'train',
                options({**resume, 'out_dir': case.out, 'init_from': 'auto', 'max_iters': 3}),
            ),
            (
                'train',
                options(
                    {
                        **resume,
                        'max_iters': 1,
                        'eval_iters': 1,
                        'gradient_accumulation_steps': 1,
                        'out_dir': case.out / 'new',
                        'init_from': run_dir / name,
                        'batch_size': 2,
                    }
                ),
            ),
            (
                'train',
                options(
                    {
                        **resume,
                        'eval_only': True,
                        'eval_iters': 1,
                        'out_dir': case.out / 'new',
                        'init_from': run_dir / name,
                    }
                ),
            ),
        ]
    )


def checkpoint_values(rng, case):
    name = rng.choice(['ckpt.pt', 'ckpt.pt', 'ckpt.pt', 'best.pt', 'nanogpt.pt'])
    case.out.mkdir()
    state = case.state(name)
    state = mutate(state, rng, ALL)
    if isinstance(state, dict) and 'digest' in state and rng.random() < 0.95:
        with contextlib.suppress(Exception):  # what has none keeps the old one
            with time_limit(1):
                state['digest'] = checkpoint.digest(state)
    with contextlib.suppress(Exception):  # what torch cannot write is no case: an empty file then
        torch.save(state, case.out / ('ckpt.pt' if name == 'nanogpt.pt' else name))
    return reader(rng, case, case.out, 'ckpt.pt' if name == 'nanogpt.pt' else name)


def checkpoint_bytes(rng, case):
    name = rng.choice(['ckpt.pt', 'best.pt', 'nanogpt.pt'])
    case.out.mkdir()
    data = case.bytes(case.base / ('run' if name != 'nanogpt.pt' else '') / name)
    target = 'ckpt.pt' if name == 'nanogpt.pt' else name
    (case.out / target).write_bytes(mutate_bytes(data, rng))
    if rng.random() < 0.3:
        shutil.copy(case.base / 'run/ckpt.pt', case.out / 'ckpt-00000001.pt')
    return reader(rng, case, case.out, target)


def checkpoint_archive(rng, case):
    case.out.mkdir()
    path = case.out / rng.choice(['ckpt.pt', 'best.pt'])
    match rng.randrange(8):
        case 0:
            path.write_bytes(evil_pickle(rng, case.canary))
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(rng.choice(['missing', path.name, '/dev/zero', '/']))
        case 3 if rng.random() < 0.1:
            shutil.copy(case.base / 'bomb.pt', path)
        case 4:
            torch.save(
                {'model_args': Evil(os.system, (f'touch {case.canary}',)), 'model': {}},
                path,
                _use_new_zipfile_serialization=rng.random() < 0.5,
            )
        case _:
            shutil.copy(case.base / rng.choice(['run/ckpt.pt', 'nanogpt.pt']), path)
            mutate_zip(path, rng, case.canary)
    return reader(rng, case, case.out, path.name)


def data_folder(rng, case):
    folder = case.folder / 'data'
    shutil.copytree(case.base / 'data', folder)
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    match rng.randrange(4):
        case 0:
            (folder / 'meta.json').write_bytes(
                mutate_bytes((folder / 'meta.json').read_bytes(), rng)
            )
        case 1 | 2:
            (folder / 'meta.json').write_text(
                json.dumps(mutate(meta, rng, PLAIN)), encoding='utf-8'
            )
        case 3:
            split = folder / rng.choice(['train.bin', 'val.bin'])
            data = mutate_bytes(split.read_bytes(), rng)
            split.write_bytes(data)
            if rng.random() < 0.7:  # lies that fit together
                meta['tokens'][split.stem], meta['sha256'][split.stem] = (
                    len(data) // 2,
                    tokenizer.sha256_of(split),
                )
                (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
            if rng.random() < 0.1:
                split.unlink()
                split.symlink_to(rng.choice(['missing', '.', '/dev/zero', '/dev/null']))
    extra = rng.choice(
        [{}, {'eval_only': True}, {'full_eval': True}, {'batch_size': 1000}, {'vocab_size': 13}]
    )
    return 'train', options({**TRAIN, 'dataset': folder, 'out_dir': case.out, **extra})


def some_value(rng):
    """What someone might write after an equals sign."""
    value = rng.choice(
        PLAIN
        + [
            'float32',
            'rope',
            'cpu',
            'cuda',
            'ngpt',
            'gpt2',
            'resume',
            'FILE:',
            'FILE:/',
            'FILE:missing',
            'utf-16',
            'zip',
            'gd:',
            'gd:pos=rope',
        ]
    )
    text = str(value) if type(value) is not int or abs(value) < 10**1000 else '9' * 1000
    return text.replace('\0', '') if rng.random() < 0.7 else text


FITTING = {
    int: [0, 1, 2, 3, 5, 100, 2**31, 2**62],
    float: [0, 1e-30, 1e-9, 0.1, 0.5, 0.9, 1, 3, 1e3, 1e29],
    bool: [True, False],
    str: ['x', 'cpu', 'auto', 'scratch', 'a=b'],
}


def some_options(rng, script, count):
    """Pairs of names and values that the script may or may not know."""
    fields = {
        name: alternatives(hint)
        for cls in SCRIPTS[script][1]
        for name, hint in typing.get_type_hints(cls).items()
    }
    chosen = []
    for _ in range(count):
        name = rng.choice([*fields, *fields, 'unknown', '', '\ud800', 'base'])
        own = [
            value
            for kind in fields.get(name, ())
            for value in (FITTING.get(kind, []) if isinstance(kind, type) else [kind])
        ]
        if name not in COSTLY or rng.random() < 0.3:
            chosen.append(
                (name, rng.choice(own) if own and rng.random() < 0.6 else some_value(rng))
            )
    return chosen


def bounds(script, case):
    """What stands last on the command line, so that the case stays small and in its folder."""
    if script == 'train':
        return {key: TRAIN[key] for key in ('max_iters', 'eval_iters')} | {
            'out_dir': case.out,
            'n_layer': 1,
            'compile': 'False',
            'eval_batch_size': 2,
            'full_eval': False,
            'wandb_log': False,
            'gradient_accumulation_steps': 1,
            'parallel': 'ddp',
        }
    if script == 'sample':
        return {'max_new_tokens': 2, 'compile': 'False'}
    if script == 'bench':
        return {
            'rounds': 1,
            'steps': 1,
            'n_layer': 1,
            'memory': False,
            'compile': 'False',
            'json': case.out / 'b.json',
            'peer': 'none',
        }
    if script == 'plot':
        return {'out': case.out / 'c.png', 'json': case.out / 'c.json'}
    return {'input': case.base / 'text.txt', 'out_dir': case.out, 'num_proc': 2}


def starting_point(script, case):
    if script == 'train':
        return {**TRAIN, 'dataset': case.base / 'data', 'out_dir': case.out}
    if script == 'sample':
        return {**SAMPLE, 'out_dir': case.base / 'run'}
    if script == 'bench':
        return BENCH
    return {'runs': case.base / 'run'} if script == 'plot' else {}


def command_line(rng, case):
    script = rng.choice([*SCRIPTS, 'train', 'train', 'train', 'sample'])
    chosen = [
        f'--{key}={value}' if rng.random() < 0.9 else str(value)
        for key, value in some_options(rng, script, rng.choice([1, 1, 2, 3, 6]))
    ]
    start = options(starting_point(script, case))
    if script != 'bench' and rng.random() < 0.05:  # whose defaults take a minute
        start = []
    last = bounds(script, case)
    if script == 'bench' and any('what' in text for text in chosen):
        last = {key: last[key] for key in ('rounds', 'n_layer', 'json')}
    if script == 'plot' and rng.random() < 0.7:
        last = {**last, 'out': 'None'}
    return script, [*start, *chosen, *options(last)]


def config_file(rng, case):
    script = rng.choice(['train', 'train', 'train', 'sample', 'plot', 'bench'])
    tokens = [
        'n_layer',
        'dropout',
        'base',
        'learning_rate',
        ' = ',
        ' = ',
        '\n',
        '\n',
        '(',
        ')',
        '[',
        '**',
        '-',
        '/',
        '//',
        '%',
        ',',
        '9',
        '0',
        '1e308',
        '"x.py"',
        '"c.py"',
        'True',
        'None',
        '1j',
        '\0',
        '...',
        'é',
        'lambda: 0',
        '__import__("os").system("touch canary")',
        'import os',
        'f"{1}"',
        '9' * 5000,
        '(' * 300,
        '-' * 3000,
        '"' + 'a' * 70000 + '"',
        '\ufeff',
        '\t',
        '{}',
        'x' * 300,
        '1 if 1 else 2',
        '[i for i in range(9)]',
    ]
    path = case.folder / 'c.py'
    if rng.random() < 0.4:
        source = ''.join(rng.choice(tokens) for _ in range(rng.randrange(1, 30)))
        path.write_bytes(source.encode('utf-8', 'surrogatepass'))
    elif rng.random() < 0.5:
        lines = [
            f'{key or "x"} = {rng.choice([repr, str])(value)}'
            for key, value in some_options(rng, script, 4)
        ]
        path.write_text('\n'.join(lines), encoding='utf-8', errors='surrogatepass')
    else:
        source = rng.choice(sorted((ROOT / 'config').glob('*.py'))).read_bytes()
        path.write_bytes(mutate_bytes(source, rng))
        shutil.copy(ROOT / 'config/base_owt_small.py', case.folder)
    return script, [
        *options(starting_point(script, case)),
        str(path),
        *options(bounds(script, case) | ({'out': 'None'} if script == 'plot' else {})),
        *(options({**GENTLE, 'batch_size': 2, 'block_size': 16}) if script == 'train' else []),
    ]


def metrics_file(rng, case):
    lines = case.bytes(case.base / 'run/metrics.jsonl').decode().splitlines()
    folder = case.folder / rng.choice(['run', 'a$\\frac$', 'é\n', 'x' * 200])
    folder.mkdir()
    if rng.random() < 0.6:
        records = mutate([json.loads(line) for line in lines], rng, PLAIN, rng.choice([1, 1, 2, 5]))
        data = ''.join(json.dumps(record) + '\n' for record in records).encode(
            'utf-8', 'surrogatepass'
        )
    else:
        data = mutate_bytes('\n'.join([*lines, '']).encode(), rng)
    (folder / 'metrics.jsonl').write_bytes(data)
    if rng.random() < 0.2:  # a resume reads it, too
        shutil.copytree(case.base / 'run', case.out)
        (case.out / 'metrics.jsonl').write_bytes(data)
        return 'train', options(
            {
                'init_from': 'resume',
                'out_dir': case.out,
                'dataset': case.base / 'data',
                'max_iters': 3,
            }
        )
    out = case.out / 'c.png' if rng.random() < 0.25 else rng.choice(['None', 'None', ''])
    return 'plot', [
        str(folder),
        str(case.base / 'run'),
        *options(
            {
                'out': out,
                'json': case.out / 'c.json',
                'x': rng.choice(['step', 'tokens', 'time']),
                'smooth': rng.choice([0, 0.02, 1]),
            }
        ),
    ]


def text_files(rng, case):
    script = rng.choice([name for name in SCRIPTS if name.startswith('prepare')])
    name = rng.choice(['text.txt', 'rows.jsonl'])
    data = case.bytes(case.base / name)
    match rng.randrange(5):
        case 0:
            data = mutate_bytes(data, rng)
        case 1:
            data = data.decode().encode(
                rng.choice(
                    ['utf-16', 'utf-16-le', 'utf-32', 'utf-8-sig', 'utf-7', 'cp037', 'shift_jis']
                ),
                'replace',
            )
        case 2:
            data = '\n'.join(
                json.dumps(rng.choice([{'text': value}, value])) for value in rng.sample(PLAIN, 3)
            ).encode('utf-8', 'surrogatepass')
        case 3:
            data = data[: rng.choice([0, 1, 2, 3, 30])]
    inputs = case.folder / 'in'
    inputs.mkdir()
    (inputs / rng.choice([name, name, name, 'x.parquet', 'x.docx', 'é.txt'])).write_bytes(data)
    if rng.random() < 0.1:
        (inputs / 'link.txt').symlink_to(
            rng.choice(['missing', 'link.txt', '.', str(case.base / 'text.txt')])
        )
    case.out.mkdir()
    if rng.random() < 0.1:
        for left in ('progress.json.part', 'train.bin.part', 'val.bin.part'):
            (case.out / left).write_text(json.dumps(rng.choice(PLAIN)), encoding='utf-8')
    extra = rng.choice(
        [
            {},
            {},
            {'val_fraction': rng.choice([1e-320, 1e-9, 0.5, 0.3])},
            {'max_docs': rng.choice([1, 2, 2**62])},
            {
                'encoding': rng.choice(
                    [
                        'utf-16',
                        'latin-1',
                        'zip',
                        'idna',
                        'undefined',
                        'utf-8-sig',
                        'unicode_escape',
                        'é',
                        '../x',
                        'punycode',
                        'utf-7',
                    ]
                )
            },
            {'val_input': inputs},
            {'val_input': case.base / 'text.txt'},
        ]
    )
    return script, options({**extra, 'num_proc': 2, 'input': inputs, 'out_dir': case.out})


def prompt(rng, case):
    (case.folder / 'p.txt').write_bytes(
        mutate_bytes(
            rng.choice([ALPHABET.encode(), b'', os.urandom(0), b'\xff\xfea\0', 'é'.encode()]), rng
        )
    )
    start = rng.choice(
        [
            f'FILE:{case.folder}/p.txt',
            'FILE:',
            f'FILE:{case.folder}',
            ''.join(rng.choices(ALPHABET + 'é\ud800\U0001f600', k=9)),
            'a' * 5000,
        ]
    )
    extra = {
        rng.choice(['temperature', 'top_k', 'num_samples', 'seed', 'dtype']): rng.choice(
            [0, 1, 1e-320, 1e308, 2**40, 2**62, 2**63 - 1, -1, 'bfloat16']
        )
    }
    return 'sample', options({**SAMPLE, 'out_dir': case.base / 'run', **extra, 'start': start})


KINDS = {
    checkpoint_values: 6,
    checkpoint_bytes: 2,
    checkpoint_archive: 2,
    data_folder: 2,
    command_line: 5,
    config_file: 2,
    metrics_file: 3,
    text_files: 2,
    prompt: 1,
}


# --------------------------------------------------------------------------------------------------
# running and watching a case


class Overtime(BaseException):
    pass


@contextlib.contextmanager
def time_limit(seconds):
    """Raises Overtime in what takes longer, as long as it comes back to Python."""

    def over(*_):
        raise Overtime

    handler = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Overtime:
        raise TimeoutError from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


class Case:
    """The folder of a case and what the kinds build from; `base` holds the materials, not to be
    written to."""

    def __init__(self, base, folder):
        self.base, self.folder, self.out, self.canary = (
            base,
            folder,
            folder / 'out',
            folder / 'canary',
        )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def state(self, name):
        path = self.base / (name if name == 'nanogpt.pt' else f'run/{name}')
        return torch.load(path, weights_only=True)

    def bytes(self, path):
        return path.read_bytes()


def snapshot(*folders):
    """{path: what tells whether it was touched} of everything below, but the out_dir of cases and
    Python's caches."""
    found = {}
    for folder in folders:
        for place, names, files in os.walk(folder):
            names[:] = [
                name
                for name in names
                if name not in ('.git', '__pycache__', '.pytest_cache', '.hypothesis', '.venv')
                and (name != 'out' or Path(place) == folder and folder == ROOT)
            ]
            for path in (os.path.join(place, name) for name in names + files):
                facts = os.lstat(path)
                found[path] = (
                    facts.st_mode,
                    (facts.st_mtime_ns, facts.st_size) if not stat.S_ISDIR(facts.st_mode) else None,
                )
    return found


def peak_memory():
    """Most bytes that this process held in memory since the last call, and starts anew (Linux)."""
    status = Path('/proc/self/status').read_text(encoding='utf-8')
    Path('/proc/self/clear_refs').write_text('5', encoding='utf-8')
    return int(status.split('VmHWM:')[1].split()[0]) * 1024


def watched(main, argv, folder, watch=()):
    """(exit code, what it printed, findings) of a script called with these arguments in
    `folder`."""
    memory.keep_freed_memory(False)  # what earlier cases freed would hide what this one takes
    before, _, resident = snapshot(folder, *watch), peak_memory(), peak_memory()
    small = (
        sum(
            path.stat().st_size
            for path in folder.rglob('*')
            if path.is_file() and not path.is_symlink()
        )
        <= INPUT
    )
    printed, findings, old_argv, handlers = (
        io.StringIO(),
        [],
        sys.argv,
        {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)},
    )
    sys.argv, code = ['script.py', *argv], 0
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            run(main)
    except SystemExit as stop:
        code = stop.code or 0
        if isinstance(code, str):
            printed.write(code)
            code = 1
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)]
        ours = [
            frame for frame in frames if str(ROOT) in frame.filename and frame.name != 'watched'
        ] or frames
        place = f'{Path(ours[-1].filename).name}:{ours[-1].lineno}'
        findings.append(f'{type(error).__name__} at {place}: {str(error)[:150]}')
        printed.write(traceback.format_exc())
        code = 1
    finally:
        sys.argv = old_argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    text = printed.getvalue()
    training_failed = any(
        words in text
        for words in ('with a non-finite gradient', 'final checkpoint could not be written')
    )
    if not findings and code not in (0, 2) and not (code == 1 and training_failed):
        findings.append(f'exit code {code}: {text[-200:]}')
    if code == 2 and not findings and text.count('error: ') != 1 and 'error: ' not in text:
        findings.append('exit code 2 without a message')
    changed = {
        path for path, facts in snapshot(folder, *watch).items() if before.get(path) != facts
    } | (before.keys() - snapshot(folder, *watch).keys())
    if changed:
        findings.append(f'touched {sorted(changed)[:3]}')
    growth = peak_memory() - resident
    if small and growth > GROWTH:
        findings.append(f'memory: {growth / 2**30:.1f} GiB')
    return code, text, findings


def make_case(cfg, number, base, folder):
    """(kind, script, arguments, folder) of a case, its files written."""
    rng, case = random.Random(f'{cfg.seed}:{number}'), Case(base, folder)
    (kind,) = rng.choices(list(KINDS), KINDS.values())
    if cfg.only is not None and kind.__name__ != cfg.only:
        return kind.__name__, None, ()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        script, argv = kind(rng, case)
    return (
        kind.__name__,
        script,
        [
            argument.encode('utf-8', 'replace').decode() if rng.random() < 0.5 else argument
            for argument in map(str, argv)
        ],
    )


def work(cfg, numbers, base, folder, pipe):
    """A worker: sends (number, kind, script, arguments) before and (code, text, findings, seconds)
    after each case."""
    os.environ |= {
        'HOME': str(folder),
        'TMPDIR': str(folder),
        'HF_HUB_OFFLINE': '1',
        'WANDB_MODE': 'disabled',
    }
    warnings.simplefilter('ignore')
    size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for number in numbers:
        try:
            kind, script, argv = make_case(cfg, number, base, folder)
        except Exception:
            raise SystemExit(
                f'case {number} could not be made:\n{traceback.format_exc()[-2000:]}'
            ) from None
        if script is None:
            continue
        pipe.send((number, kind, script, argv))
        t0 = time.perf_counter()
        pipe.send(
            (*watched(SCRIPTS[script][0], argv, folder, (ROOT, base)), time.perf_counter() - t0)
        )
    pipe.send(None)


def outcomes(cfg, base, scratch):
    """Yields (number, kind, script, arguments, code, text, findings, seconds) of every case."""
    context, numbers, finished = (
        multiprocessing.get_context('fork'),
        list(range(cfg.first, cfg.first + cfg.cases)),
        set(),
    )
    while numbers:
        here, there = context.Pipe()
        worker = context.Process(target=work, args=(cfg, numbers[:BATCH], base, scratch, there))
        worker.start()
        there.close()
        done, started = numbers[:BATCH], None
        try:
            while (started := here.recv()) is not None:
                if here.poll(cfg.limit):
                    yield *started, *here.recv()
                    finished.add(started[0])
                else:
                    done = numbers[: numbers.index(started[0]) + 1]
                    yield *started, 'hang', '', [f'no end within {cfg.limit:g} s'], cfg.limit
                    break
        except EOFError:
            worker.join()
            if started is None or started[0] in finished:
                raise SystemExit('a worker of the fuzzer failed') from None
            done = numbers[: numbers.index(started[0]) + 1]
            yield *started, 'died', '', [f'the process died, exit code {worker.exitcode}'], 0.0
        worker.kill()
        worker.join()
        numbers = numbers[len(done) :]


def main(argv):
    cfg = build(FuzzConfig, parse(argv, FuzzConfig))
    torch.set_num_threads(1)
    # git is no part of this, and two processes for each run
    report.code_version = train.code_version = lambda: None
    tokenizer.gpt2_encoding()  # once, before the workers are forked
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    counts, found, t0 = collections.Counter(), {}, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / 'base'
        base.mkdir()
        # no thread of training is here when workers fork
        maker = multiprocessing.get_context('fork').Process(target=make_materials, args=(base,))
        maker.start()
        maker.join()
        for number, kind, script, arguments_, code, text, findings, seconds in outcomes(
            cfg, base, Path(scratch) / 'case'
        ):
            counts[kind, script.split()[0], code] += 1
            if cfg.verbose:
                print(f'case {number}: {kind}, {script} {arguments_}')
                print(f'{seconds:.2f} s, exit code {code}\n{text}')
            for finding in findings:
                found.setdefault(finding.split(': ')[0], []).append(
                    f'--seed={cfg.seed} --first={number} --cases=1: {kind}, {script}: {finding}'
                )
                print(f'FOUND: {found[finding.split(": ")[0]][-1]}', flush=True)
    for (kind, script, code), count in sorted(counts.items(), key=str):
        print(f'{kind:20} {script:8} exit code {code}: {count:6,}')
    seconds = time.perf_counter() - t0
    print(f'{sum(counts.values()):,} cases in {seconds:.0f} s, {len(found)} kinds of findings')
    for examples in found.values():
        print(f'{len(examples):5} x {examples[0]}')
    sys.exit(1 if found else 0)


if __name__ == '__main__':
    run(main)
