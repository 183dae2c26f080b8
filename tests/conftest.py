"""Fixtures shared by the model's tests: tiny models of every scheme, with no parameter left at a
special value.

Whatever asks for `update` runs once for each scheme of model.SCHEMES, and whatever asks for
`variant` once for each architecture a scheme allows; a scheme becomes tested by being registered
there."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from model import GPT, SCHEMES, GPTConfig
from nanonag import checkpoint
from nanonag.cli import UserError

torch.set_num_threads(1)  # tiny models: threads would only wait for each other

TINY = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=13, block_size=8)


CHOICES = dict(  # of a scheme that is not normalized; the defaults come first
    pos=['learned', 'rope'],
    mlp=['gelu', 'swiglu'],
    tie_weights=[True, False],
    bias=[False, True],
    velocity_init=['learned', 'zero'],
)


def variants(update):
    """Every GPTConfig choice that applies to the scheme, as keyword arguments."""
    rule, _ = SCHEMES[update]
    if rule.normalized:  # one architecture: RoPE, SwiGLU, untied, no biases
        return [dict(update=update)]
    names = [name for name in CHOICES if name != 'velocity_init' or rule.uses_velocity]
    return [
        dict(update=update, **dict(zip(names, values)))
        for values in itertools.product(*(CHOICES[name] for name in names))
    ]


def describe(kwargs):
    return '-'.join(
        f'{key}={value}' if isinstance(value, bool) else str(value) for key, value in kwargs.items()
    )


@pytest.fixture(params=SCHEMES)
def update(request):
    return request.param


@pytest.fixture(params=[kwargs for update in SCHEMES for kwargs in variants(update)], ids=describe)
def variant(request):
    return request.param


# Tiers: `-m quick` is the equations, gradients and options, a training run and its resume.

QUICK_FILES = {
    'test_cache.py',
    'test_config.py',
    'test_dataloader.py',
    'test_loss.py',
    'test_metrics.py',
    'test_model.py',
    'test_optim.py',
    'test_repository.py',
    'test_sphere.py',
    'test_tokenizer.py',
    'test_train_refuse.py',
    'test_updates.py',
}
QUICK_TESTS = {  # of other files
    'test_records',
    'test_the_rate_in_the_records_is_the_schedules',
    'test_accumulation_is_one_larger_batch',
    'test_thirty_steps_lower_the_loss[lt_nag-muon]',
    'test_thirty_steps_lower_the_loss[ngpt-adamw]',
    'test_a_resumed_run_equals_the_uninterrupted_one_bitwise[lt_nag-muon]',
    'test_a_resumed_run_equals_the_uninterrupted_one_bitwise[ngpt-adamw]',
    'test_resume_keeps_the_options_that_are_not_given',
}
SLOW_TESTS = {  # of those files: compilers, processes, statistics over many draws
    'test_a_compiled_step_gives_the_eager_logits',
    'test_compiled',
    'test_compiled_training_step',
    'test_compiles_without_a_graph_break',
    'test_every_place_of_an_epoch_is_equally_likely',
    'test_from_pretrained',
    'test_nothing_but_a_user_error',
    'test_parameter_count_on_the_sphere',
    'test_a_users_mistake_is_one_line_of_the_program',
}
LONG_FILES = ['test_distributed.py', 'test_bench.py', 'test_chaos.py', 'test_cache.py']


def is_quick(item):
    """Whether a test belongs to the tier `quick`; of the variants those that differ from a
    scheme's default in one choice at most."""
    variant = item.callspec.params.get('variant', {}) if hasattr(item, 'callspec') else {}
    if sum(variant[name] != CHOICES[name][0] for name in CHOICES.keys() & variant) > 1:
        return False
    if item.path.name in QUICK_FILES:
        return getattr(item, 'originalname', item.name) not in SLOW_TESTS
    return bool(QUICK_TESTS & {item.name, getattr(item, 'originalname', None)})


def pytest_collection_modifyitems(items):
    """Marks the quick tests; the longest files come first, so that no worker ends with one."""
    for item in items:
        if is_quick(item):
            item.add_marker('quick')
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def fresh(**kwargs):
    """A tiny model as constructed, the same for the same arguments."""
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **kwargs})).eval()


def perturb(model, seed=0, std=0.3):
    """Add noise to every parameter (no gain stays 1, no scalar at its start, some alphas turn
    negative), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    model.normalize_weights()
    return model


def nontrivial(dtype=torch.float64, std=0.3, **kwargs):
    """A tiny model whose every parameter matters."""
    return perturb(fresh(**kwargs).to(dtype), std=std)


def rules(model):
    """The update rules of all layers, in order: two a layer for Lie-Trotter, one for Euler."""
    names = ('update_attn', 'update_mlp', 'update')
    return [
        getattr(block, name)
        for block in model.transformer.h
        for name in names
        if hasattr(block, name)
    ]


def tokens(B=2, T=7, vocab_size=TINY['vocab_size'], seed=1):
    """Random ids (B, T)."""
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def relative_error(a, b):
    """max |a - b| / max |b|, and 0 where both are all zeros."""
    error = (a - b).abs().max().item()
    return error / b.abs().max().item() if error else 0.0


# Training: a generated data folder, and train.py called in this process or in one of its own.

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(
    n_layer=1,
    n_head=2,
    n_embd=16,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=2,
    max_iters=4,
    eval_interval=0,
    eval_iters=2,
    log_interval=1,
    learning_rate=1e-2,
    device='cpu',
    dtype='float32',
    compile='False',
)
ALPHABET = '\nabcdefghijkl'


def write_data(folder, n_train=4000, n_val=700, seed=0):
    """A prepared data folder: letters of ALPHABET, each mostly followed by the next one."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    meta = {
        'version': 1,
        'tokenizer': {'kind': 'char', 'chars': list(ALPHABET)},
        'vocab_size': len(ALPHABET),
        'dtype': 'uint16',
        'tokens': {},
        'max_id': {},
        'sha256': {},
        'source': {},
    }
    for split, count in (('train', n_train), ('val', n_val)):
        ids = [0]
        while len(ids) < count:
            ids.append((ids[-1] + 1 if draw.random() < 0.8 else draw.randrange(99)) % len(ALPHABET))
        data = b''.join(i.to_bytes(2, 'little') for i in ids)
        (folder / f'{split}.bin').write_bytes(data)
        facts = {'tokens': count, 'max_id': max(ids), 'sha256': hashlib.sha256(data).hexdigest()}
        for key, value in facts.items():
            meta[key][split] = value
    (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
    return folder


@pytest.fixture(scope='session')
def data_folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp('data'))


class Outcome(NamedTuple):
    code: int  # as a shell would see it
    message: str  # what the run ended with
    records: list  # of metrics.jsonl


def arguments(options):
    return [f'--{key}={value}' for key, value in options.items()]


def records(folder):
    """The records of a run's metrics.jsonl, [] if there is none."""
    path = Path(folder) / 'metrics.jsonl'
    return (
        [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]
        if path.exists()
        else []
    )


def call(main, argv):
    """(exit code, last message) of a script's main in this process; signal handlers are put
    back."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        main([str(argument) for argument in argv])
    except UserError as error:
        return 2, str(error)
    except SystemExit as error:
        return (error.code, '') if isinstance(error.code, int) else (1, error.code)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0, ''


def train(data_folder, out_dir, **options):
    """Trains the SMALL model in this process -> Outcome; options override SMALL's."""
    import train as script

    code, message = call(
        script.main, arguments({**SMALL, 'dataset': data_folder, 'out_dir': out_dir, **options})
    )
    return Outcome(code, message, records(out_dir))


def start_train(data_folder, out_dir, launcher=(), **options):
    """train.py of the SMALL model in a process of its own, under `launcher` if given -> Popen with
    text pipes."""
    command = [sys.executable, *launcher, str(ROOT / 'train.py')]
    command += arguments({**SMALL, 'dataset': data_folder, 'out_dir': out_dir, **options})
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_train(*args, **options):
    """start_train to its end -> (exit code, stdout, stderr, records)."""
    process = start_train(*args, **options)
    stdout, stderr = process.communicate(timeout=100)
    return process.returncode, stdout, stderr, records(args[1])


def is_training(record):
    return 'loss' in record


def is_evaluation(record):
    return 'val_loss' in record


def metrics(run, after=0):
    """Training and evaluation records past a step, of an Outcome or a list, without what no two
    runs share."""
    found = run if isinstance(run, list) else run.records
    return [
        {key: value for key, value in record.items() if key != 'tokens_per_s'}
        for record in found
        if 'config' not in record and record['step'] > after
    ]


ESSENCE = ('model', 'optimizer', 'scaler', 'step', 'best_val_loss', 'skipped', 'rng', 'data')


def essence(path):
    """Digests of all that goes on mattering in a checkpoint."""
    state = checkpoint.read(path)
    return {key: checkpoint.digest(state[key]) for key in ESSENCE}


def contents(folder):
    """{file name: digest of its bytes}, None if there is no such folder."""
    if not folder.exists():
        return None
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def goes_on(folder, source, name='ckpt-00000004.pt'):
    """A folder as it was when its run was killed after the checkpoint `name` of `source`, some
    records later."""
    folder.mkdir()
    shutil.copy(source / name, folder / 'ckpt.pt')
    shutil.copy(source / 'metrics.jsonl', folder)
    return folder


def on_steps(action, patch=setattr):
    """Makes train.py call action(step) as each step begins, from 0 on; `patch` sets an
    attribute."""
    import train as script

    multiplier = script.lr_multiplier

    def watched(step, cfg):
        action(step)
        return multiplier(step, cfg)

    patch(script, 'lr_multiplier', watched)


@pytest.fixture
def at_step(monkeypatch):
    """at_step(action): runs of this test call action(step) as each step begins, from 0 on."""
    return lambda action: on_steps(action, monkeypatch.setattr)


@pytest.fixture(scope='session')
def finished(data_folder, tmp_path_factory):
    """The folder of a finished run of 6 steps; to be read only."""
    folder = tmp_path_factory.mktemp('runs') / 'finished'
    assert train(data_folder, folder, max_iters=6, save_interval=3).code == 0
    return folder
