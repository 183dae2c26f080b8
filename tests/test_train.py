"""The training loop: that it learns, counts, resumes bitwise, refuses contradictions and survives
being stopped."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import (
    ALPHABET,
    ROOT,
    SMALL,
    arguments,
    call,
    records,
    run_train,
    start_train,
    train,
    write_data,
)
from torch.amp import GradScaler

import train as script
from model import GPT, SCHEMES
from nanonag import checkpoint
from nanonag.checkpoint import read

NOT_COMPARED = ('tokens_per_s',)


def is_training(record):
    return 'loss' in record


def is_evaluation(record):
    return 'val_loss' in record


def metrics(outcome_or_records, after=0):
    """Training and evaluation records past a step, without what no two runs share."""
    found = (
        outcome_or_records if isinstance(outcome_or_records, list) else outcome_or_records.records
    )
    return [
        {key: value for key, value in record.items() if key not in NOT_COMPARED}
        for record in found
        if 'config' not in record and record['step'] > after
    ]


def essence(path):
    """What a run is, of its checkpoint: everything that goes on mattering."""
    state = read(path)
    return {
        key: checkpoint.digest(state[key])
        for key in (
            'model',
            'optimizer',
            'scaler',
            'step',
            'best_val_loss',
            'skipped',
            'rng',
            'data',
        )
    }


def contents(folder):
    return (
        {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.iterdir())
        }
        if folder.exists()
        else None
    )


def goes_on(folder, source, name='ckpt-00000004.pt'):
    """A folder as it was when its run was killed after the checkpoint `name` of `source`, some
    records later."""
    folder.mkdir()
    shutil.copy(source / name, folder / 'ckpt.pt')
    shutil.copy(source / 'metrics.jsonl', folder)
    return folder


# that it trains


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_thirty_steps_lower_the_loss(update, optimizer, data_folder, tmp_path):
    outcome = train(
        data_folder, tmp_path, update=update, optimizer=optimizer, max_iters=30, eval_interval=30
    )
    start, end = [record for record in outcome.records if is_evaluation(record)]
    assert outcome.code == 0 and (start['step'], end['step']) == (0, 30)
    assert abs(start['val_loss'] - math.log(len(ALPHABET))) < 0.2  # a fresh model knows nothing
    assert (
        end['val_loss'] < start['val_loss'] - 0.1 and end['train_loss'] < start['train_loss'] - 0.1
    )


@pytest.mark.parametrize('max_iters', [0, 1, 7])
def test_max_iters_is_the_number_of_updates(max_iters, data_folder, tmp_path, monkeypatch):
    steps = []
    multiplier = script.lr_multiplier
    monkeypatch.setattr(
        script, 'lr_multiplier', lambda step, cfg: steps.append(step) or multiplier(step, cfg)
    )
    outcome = train(data_folder, tmp_path, max_iters=max_iters, eval_interval=5)
    assert steps == list(range(max_iters))
    assert [record['step'] for record in outcome.records if is_training(record)] == list(
        range(1, max_iters + 1)
    )
    assert [record['step'] for record in outcome.records if is_evaluation(record)] == sorted(
        {0, max_iters} | {5} & set(range(max_iters))
    )
    # also where no evaluation falls on the end
    assert read(tmp_path / 'ckpt.pt')['step'] == max_iters


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_the_first_update_changes_every_weight(optimizer, data_folder, tmp_path):
    train(data_folder, tmp_path / 'a', optimizer=optimizer, max_iters=0)
    train(data_folder, tmp_path / 'b', optimizer=optimizer, max_iters=1)
    before, after = (read(tmp_path / name / 'ckpt.pt')['model'] for name in 'ab')
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_records(data_folder, tmp_path):
    outcome = train(
        data_folder,
        tmp_path,
        max_iters=5,
        log_interval=2,
        eval_interval=3,
        seed=5,
        optimizer='muon',
    )
    first, *rest = outcome.records
    assert [first['config'][key] for key in ('seed', 'update', 'muon_lr')] == [5, 'lt_nag', 0.004]
    assert first['params'] == sum(
        w.numel()
        for name, w in read(tmp_path / 'ckpt.pt')['model'].items()
        if name != 'lm_head.weight'
    )
    assert first['torch'] == torch.__version__ and 'commit' in first
    assert [(record['step'], is_evaluation(record)) for record in rest] == [
        (0, True),
        (2, False),
        (3, True),
        (4, False),
        (5, True),
    ]
    for record in rest:
        assert record['tokens'] == record['step'] * 4 * 2 * 16
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
        if is_training(record):
            assert {
                'step',
                'tokens',
                'loss',
                'lr',
                'grad_norm',
                'tokens_per_s',
            } <= record.keys() and record['lr'] > 0
        else:
            assert {'step', 'tokens', 'train_loss', 'val_loss'} <= record.keys()


def test_accumulation_is_one_larger_batch(data_folder, tmp_path):
    """Losses and gradient norms of 4 x 2 and of 8 x 1 sequences agree: the loss is a mean, whatever
    the split."""
    a, b = (
        train(
            data_folder,
            tmp_path / str(accum),
            batch_size=8 // accum,
            gradient_accumulation_steps=accum,
            optimizer='adamw',
            max_iters=5,
        )
        for accum in (1, 4)
    )
    for one, other in zip(metrics(a), metrics(b)):
        for key in one.keys() & {'loss', 'grad_norm'}:
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


def test_the_gradient_is_clipped(data_folder, tmp_path, monkeypatch):
    seen = []

    def watched(model, cfg, *args):
        optimizer = make(model, cfg, *args)
        step = optimizer.step
        optimizer.step = lambda: (
            seen.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()),
            step(),
        )
        return optimizer

    make = script.configure_optimizer
    monkeypatch.setattr(script, 'configure_optimizer', watched)
    outcome = train(data_folder, tmp_path / 'a', grad_clip=1e-3, max_iters=3)
    assert seen == pytest.approx([1e-3] * 3, rel=1e-2)
    # as it was before
    assert all(record['grad_norm'] > 0.01 for record in outcome.records if is_training(record))
    seen.clear()
    outcome = train(data_folder, tmp_path / 'b', grad_clip=0.0, max_iters=3)
    assert seen == pytest.approx(
        [record['grad_norm'] for record in outcome.records if is_training(record)], rel=1e-4
    )


def test_activation_checkpointing_changes_nothing(data_folder, tmp_path):
    """Dropout included: the second pass draws the masks of the first."""
    a, b = (
        train(
            data_folder, tmp_path / str(flag), activation_checkpointing=flag, n_layer=2, dropout=0.2
        )
        for flag in (False, True)
    )
    assert a.code == 0 and metrics(a) == metrics(b)
    assert essence(tmp_path / 'False' / 'ckpt.pt') == essence(tmp_path / 'True' / 'ckpt.pt')


@pytest.mark.parametrize(
    'options', [{}, dict(n_layer=64, n_embd=2**17, n_head=64)], ids=['small', 'huge']
)
def test_a_dry_run_needs_and_writes_nothing(options, tmp_path, capsys):
    outcome = train('no-such-set', tmp_path / 'out', dry_run=True, **options)
    assert (
        outcome.code == 0
        and not (tmp_path / 'out').exists()
        and 'parameters' in capsys.readouterr().out
    )


def test_the_rate_in_the_records_is_the_schedules(data_folder, tmp_path):
    outcome = train(
        data_folder,
        tmp_path,
        max_iters=4,
        warmup_iters=1,
        learning_rate=1.0,
        min_lr=0.0,
        decay_lr=True,
        optimizer='adamw',
    )
    rates = [record['lr'] for record in outcome.records if is_training(record)]
    assert rates == pytest.approx([0.5, 1.0, 0.75, 0.25])


def test_the_start_tells_what_will_run(data_folder, tmp_path, capsys):
    """Whatever changes the meaning of the numbers: the size of an update, the data and its digest,
    the resolved options."""
    train(
        data_folder,
        tmp_path,
        batch_size=3,
        gradient_accumulation_steps=5,
        max_iters=0,
        seed=12,
        optimizer='muon',
    )
    told, meta = capsys.readouterr().out, json.loads((data_folder / 'meta.json').read_text())
    assert 'an update: 3 sequences x 5 micro-steps x 1 processes x 16 tokens = 240 tokens' in told
    assert '4,000 train and 700 val tokens, 249 windows an epoch' in told
    assert f'sha256 of val {meta["sha256"]["val"][:12]}' in told
    assert ' seed=12 ' in told and ' muon_lr=0.004 ' in told and ' update=lt_nag ' in told
    assert re.search(r'[\d,]+ parameters; memory on each device about \d+\.\d GiB', told)
    assert 'cpu' in told.lower() and 'float32, not compiled' in told
    assert re.search(r'c_attn.weight +\(48, 16\) +Muon', told) and re.search(
        r'wte.weight +\(13, 16\) +AdamW', told
    )


def test_defaults_follow_the_scheme_wherever_it_was_chosen(update, data_folder, tmp_path):
    """Not the scheme that a config file, or the default, names before the command line changes it:
    else a baseline trains with another scheme's decay and warmup."""
    before = 'gd' if SCHEMES[update][0].normalized else 'ngpt'
    (tmp_path / 'config.py').write_text(f'update = {before!r}\n')
    argv = arguments(
        {
            **SMALL,
            'dataset': data_folder,
            'out_dir': tmp_path,
            'max_iters': 0,
            'lr_decay_iters': 50,
            'learning_rate': None,
            'update': update,
        }
    )
    assert call(script.main, [str(tmp_path / 'config.py'), *argv]) == (0, '')
    config = records(tmp_path)[0]['config']
    expected = (
        ('adamw', 15e-4, 0.0, 0.0) if SCHEMES[update][0].normalized else ('muon', 6e-4, 0.1, 6e-5)
    )
    assert (
        tuple(config[key] for key in ('optimizer', 'learning_rate', 'weight_decay')) == expected[:3]
    )
    assert config['min_lr'] == pytest.approx(expected[3])


def test_an_interval_of_zero_switches_off(data_folder, tmp_path):
    outcome = train(
        data_folder,
        tmp_path,
        log_interval=0,
        eval_interval=0,
        save_interval=0,
        max_iters=3,
        keep_last=5,
    )
    assert (
        outcome.code == 0
        and [record['step'] for record in outcome.records if is_training(record)] == []
    )
    assert [record['step'] for record in outcome.records if is_evaluation(record)] == [3]
    assert checkpoint.history(tmp_path) == [] and read(tmp_path / 'ckpt.pt')['step'] == 3


def test_evaluations_tell_perplexity_and_tokens_too(data_folder, tmp_path):
    last = train(data_folder, tmp_path, max_iters=2).records[-1]
    assert (
        last['val_perplexity'] == pytest.approx(math.exp(last['val_loss']))
        and last['tokens'] == 2 * 4 * 2 * 16
    )


def test_weights_and_optimizer_state_stay_float32(update, data_folder, tmp_path):
    """Whatever the matmuls' precision: else a scheme is compared with a baseline that rounding
    holds back."""
    assert train(data_folder, tmp_path, update=update, dtype='bfloat16', max_iters=1).code == 0
    state = read(tmp_path / 'ckpt.pt')
    tensors = [
        *state['model'].values(),
        *(value for values in state['optimizer'].values() for value in values.values()),
    ]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


@pytest.mark.parametrize(
    'where, options, advice',
    [
        (
            'update',
            dict(batch_size=4, gradient_accumulation_steps=2),
            '--batch_size=2 --gradient_accumulation_steps=4 ',
        ),
        (
            'update',
            dict(batch_size=9, gradient_accumulation_steps=2),
            '--batch_size=3 --gradient_accumulation_steps=6 ',
        ),
        (
            'update',
            dict(batch_size=7, gradient_accumulation_steps=1),
            '--batch_size=1 --gradient_accumulation_steps=7 ',
        ),
        ('update', dict(batch_size=1), 'try --activation_checkpointing=True'),
        ('update', dict(batch_size=1, activation_checkpointing=True), 'try --parallel=fsdp'),
        (
            'evaluate',
            dict(eval_batch_size=12, eval_iters=5),
            '--eval_batch_size=6 --eval_iters=10 ',
        ),
        (
            'evaluate',
            dict(eval_only=True, eval_batch_size=1, activation_checkpointing=True),
            'try --parallel=fsdp',
        ),
        ('starting_model', {}, 'choose a smaller model'),
    ],
)
@pytest.mark.parametrize(
    'error',
    [
        torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB\nmore'),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=['cuda', 'cpu'],
)
def test_out_of_memory_ends_with_options_for_the_same_run(
    where, options, advice, error, data_folder, tmp_path, monkeypatch
):
    def fail(*args):
        raise error

    monkeypatch.setattr(script, where, fail)
    outcome = train(data_folder, tmp_path / 'out', **options)
    assert outcome.code == (2 if where == 'starting_model' else 1)
    assert outcome.message.startswith('out of memory (') and '\n' not in outcome.message
    assert advice in outcome.message


def test_other_errors_are_not_taken_for_memory(data_folder, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError('an illegal memory access')

    monkeypatch.setattr(script, 'train_step', fail)
    with pytest.raises(RuntimeError, match='illegal'):
        train(data_folder, tmp_path)


@pytest.mark.parametrize('dataset', ['mine', '../mine', 'data/mine'])
def test_a_dataset_is_a_name_under_data_or_the_path_given(dataset, tmp_path, monkeypatch):
    """No look-up in parent folders: a folder of the same name further up is another set."""
    write_data(tmp_path / 'data' / 'mine')
    (tmp_path / 'deep' / 'deeper').mkdir(parents=True)
    monkeypatch.chdir(tmp_path / 'deep' / 'deeper')
    outcome = train(dataset, 'out')
    assert outcome.code == 2 and dataset in outcome.message and not os.path.exists('out')
    assert train('../../data/mine', 'out', max_iters=0).code == 0
    # and the run's folder is exactly the one given
    assert read('out/ckpt.pt')['step'] == 0 and os.listdir() == ['out']


def test_a_run_needs_no_utf8_locale(tmp_path):
    """Text and output beyond ASCII, in the C locale with UTF-8 mode off, as on some servers and in
    Windows' pipes."""
    (tmp_path / 'in.txt').write_text('na\u00efve \u4f60\u597d\n' * 99, encoding='utf-8')
    code = f"""if True:
        import sys
        from nanonag.cli import run
        from data.shakespeare_char import prepare
        import train, sample
        for script, argv in ((prepare, ['--input=in.txt', '--out_dir=data']),
                             (train, {arguments({**SMALL, 'max_iters': 1, 'dataset': './data'})}),
                             (sample, ['--start=na', '--temperature=9', '--max_new_tokens=40', '--device=cpu'])):
            run(lambda _: script.main(argv))"""
    env = os.environ | {'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, '-X', 'utf8=0', '-c', code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert '\\u4f60' in done.stdout and read(tmp_path / 'out' / 'ckpt.pt')['step'] == 1


# the same data for all


@pytest.fixture
def seen(monkeypatch):
    """Whatever batches the training mode of any model sees, as lists."""
    found = []
    forward = GPT.forward

    def watched(self, idx, targets=None, **kwargs):
        if self.training:
            found.append((idx.tolist(), targets.tolist()))
        return forward(self, idx, targets, **kwargs)

    monkeypatch.setattr(GPT, 'forward', watched)
    return found


def test_every_scheme_and_cadence_reads_the_same_batches(seen, data_folder, tmp_path):
    runs = [dict(update=update) for update in SCHEMES] + [
        dict(eval_interval=1),
        dict(eval_interval=2, eval_iters=5),
        dict(save_interval=1, log_interval=3),
        dict(optimizer='adamw'),
        dict(dropout=0.2),
        dict(n_layer=2, n_embd=32),
        dict(eval_only=False, full_eval=True, eval_interval=2),
    ]
    orders = []
    for i, options in enumerate(runs):
        train(data_folder, tmp_path / str(i), **options)
        orders.append(list(seen))
        seen.clear()
    assert len(orders[0]) == 4 * 2
    assert [i for i, order in enumerate(orders) if order != orders[0]] == []


def test_seeds_read_other_batches_and_start_elsewhere(seen, data_folder, tmp_path):
    train(data_folder, tmp_path / 'a', seed=1, max_iters=1)
    one = list(seen)
    seen.clear()
    train(data_folder, tmp_path / 'b', seed=2, max_iters=1)
    assert one != seen
    a, b = (
        read(tmp_path / name / 'ckpt.pt')['model']['transformer.h.0.attn.c_attn.weight']
        for name in 'ab'
    )
    assert (a - b).abs().max() > 0.01


def test_evaluation_leaves_the_run_as_it_was(data_folder, tmp_path):
    """Dropout included: no draw of it happens in an evaluation, and the windows are always the same
    ones."""
    a = train(data_folder, tmp_path / 'a', eval_interval=1, dropout=0.3)
    b = train(data_folder, tmp_path / 'b', eval_interval=0, dropout=0.3)
    c = train(
        data_folder, tmp_path / 'c', eval_interval=2, dropout=0.3, eval_iters=4, full_eval=True
    )
    by_step = [
        {
            record['step']: (record['loss'], record['grad_norm'])
            for record in run.records
            if is_training(record)
        }
        for run in (a, b, c)
    ]
    assert by_step[0] == by_step[1] == by_step[2]
    assert (
        essence(tmp_path / 'a' / 'ckpt.pt')['model'] == essence(tmp_path / 'b' / 'ckpt.pt')['model']
    )


def test_the_split_of_an_update_changes_no_evaluation(data_folder, tmp_path):
    a, b = (
        train(
            data_folder,
            tmp_path / str(size),
            batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_iters=0,
        )
        for size in (1, 8)
    )
    assert metrics(a) == metrics(b)


def test_full_eval_counts_every_window_once(data_folder, tmp_path):
    """Whatever batch size cuts them up, a short last batch included, the mean over all windows of
    val is the same."""
    losses = [
        train(
            data_folder,
            tmp_path / str(size),
            eval_batch_size=size,
            full_eval=True,
            eval_interval=0,
            max_iters=0,
        ).records[-1]['val_loss']
        for size in (1, 5, 43)
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)


# resuming


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(
    update, optimizer, data_folder, tmp_path
):
    options = dict(
        update=update,
        optimizer=optimizer,
        max_iters=7,
        save_interval=4,
        eval_interval=3,
        log_interval=2,
        seed=3,
    )
    if not SCHEMES[update][0].normalized:
        options['dropout'] = 0.2
    whole = train(data_folder, tmp_path / 'whole', keep_last=2, **options)
    assert whole.code == 0
    folder = goes_on(tmp_path / 'resumed', tmp_path / 'whole')
    resumed = train(data_folder, folder, init_from='resume', keep_last=2, **options)
    assert resumed.code == 0
    assert essence(folder / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt')
    assert metrics(resumed) == metrics(whole)  # each record once, none lost


@pytest.mark.parametrize(
    'options',
    [
        dict(muon_qkv='split'),
        dict(schedule='wsd', decay_lr=True),
        dict(dtype='bfloat16', dropout=0.1),
    ],
    ids=str,
)
def test_resume_is_bitwise_with_other_options(options, data_folder, tmp_path):
    options = dict(max_iters=7, save_interval=4, **options)
    whole = train(data_folder, tmp_path / 'whole', **options)
    folder = goes_on(tmp_path / 'resumed', tmp_path / 'whole')
    resumed = train(data_folder, folder, init_from='resume', **options)
    assert essence(folder / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt') and metrics(
        resumed
    ) == metrics(whole)


def test_the_scaler_goes_on_where_it_was(data_folder, tmp_path, monkeypatch):
    """float16's scaler, which needs CUDA, put to work on the CPU: its scale doubles every two
    updates here."""
    monkeypatch.setattr(
        torch.amp,
        'GradScaler',
        lambda device, enabled: GradScaler(device, init_scale=8.0, growth_interval=2),
    )
    options = dict(max_iters=7, save_interval=4)
    whole = train(data_folder, tmp_path / 'whole', **options)
    assert read(tmp_path / 'whole' / 'ckpt-00000004.pt')['scaler']['scale'] == 32.0
    assert read(tmp_path / 'whole' / 'ckpt.pt')['scaler']['scale'] == 64.0
    folder = goes_on(tmp_path / 'resumed', tmp_path / 'whole')
    assert metrics(train(data_folder, folder, init_from='resume', **options)) == metrics(whole)
    assert essence(folder / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt')


def test_a_run_goes_on_in_another_precision(data_folder, finished, tmp_path, monkeypatch, capsys):
    """Into float16, whose scaler then starts afresh, and out of it."""
    shutil.copytree(finished, tmp_path / 'out')
    assert (
        train(data_folder, tmp_path / 'out', init_from='resume', dtype='bfloat16', max_iters=7).code
        == 0
    )
    assert 'dtype: float32 -> bfloat16' in capsys.readouterr().out
    with monkeypatch.context() as patch:  # float16 itself needs CUDA
        patch.setattr(
            torch.amp,
            'GradScaler',
            lambda device, enabled: GradScaler(device, init_scale=8.0, growth_interval=2),
        )
        assert train(data_folder, tmp_path / 'out', init_from='resume', max_iters=9).code == 0
    assert read(tmp_path / 'out' / 'ckpt.pt')['scaler']['scale'] == 16.0
    assert train(data_folder, tmp_path / 'out', init_from='resume', max_iters=10).code == 0
    assert read(tmp_path / 'out' / 'ckpt.pt')['scaler'] == {}


REFUSED = {  # what a resume makes sure of: (entry, another value, the message)
    'version': (2, 'version 2'),
    'digest': ('0' * 64, 'digest'),
    'tokenizer': ({'kind': 'gpt2'}, 'tokenizer'),
    'data': ({'train': '0' * 64, 'val': '0' * 64}, 'not the data of the run'),
}
GOES_ON = {  # what it goes on from: how to change it
    'model': lambda weights: {name: w + 0.01 for name, w in weights.items()},
    'gpt_config': lambda config: config | {'n_head': 4},
    'train_config': lambda config: config | {'learning_rate': 0.5},
    'step': lambda step: step - 1,
    'best_val_loss': lambda loss: 0.5,
    'rng': lambda ranks: [[torch.Generator().manual_seed(9).get_state()] for _ in ranks],
    'optimizer': lambda state: {
        name: {key: value + 1 for key, value in of.items()} for name, of in state.items()
    },
}
ELSEWHERE = {'scaler', 'skipped', 'wandb_id'}  # with tests of their own


def changed(state, key, value):
    state = state | {key: value}
    return state if key == 'digest' else state | {'digest': checkpoint.digest(state)}


@pytest.fixture(scope='module')
def stopped(data_folder, tmp_path_factory):
    """A run of 6 steps with dropout, at step 4."""
    folder = tmp_path_factory.mktemp('stopped')
    assert train(data_folder, folder / 'whole', max_iters=6, save_interval=4, dropout=0.2).code == 0
    return goes_on(folder / 'at 4', folder / 'whole')


def resumed(data_folder, folder, source, key=None, value=None):
    """Goes on from a copy of `source`, one entry of its checkpoint changed, with no option but the
    folders given."""
    folder.mkdir()
    shutil.copy(source / 'metrics.jsonl', folder)
    state = read(source / 'ckpt.pt')
    torch.save(changed(state, key, value) if key else state, folder / 'ckpt.pt')
    return call(
        script.main, ['--init_from=resume', f'--out_dir={folder}', f'--dataset={data_folder}']
    )


def test_every_entry_of_a_checkpoint_is_used_on_resume(data_folder, stopped, tmp_path):
    """Saved but never read back is false confidence: change any entry, and the run is refused or
    goes on otherwise."""
    state = read(stopped / 'ckpt.pt')
    assert state.keys() == REFUSED.keys() | GOES_ON.keys() | ELSEWHERE
    for key, (value, message) in REFUSED.items():
        code, told = resumed(data_folder, tmp_path / key, stopped, key, value)
        assert code == 2 and message in told, (key, told)
    ends = set()
    for key, change in {None: None, **GOES_ON}.items():
        assert resumed(
            data_folder, tmp_path / str(key), stopped, key, key and change(state[key])
        ) == (0, ''), key
        ends.add(str(essence(tmp_path / str(key) / 'ckpt.pt')))
    assert len(ends) == len(GOES_ON) + 1  # no two alike


def test_processes_that_read_different_checkpoints_are_refused(
    data_folder, finished, tmp_path, monkeypatch
):
    """Nodes with folders of their own, one of them stale: with the loss averaged, nobody would
    notice."""
    shutil.copytree(finished, tmp_path / 'out')
    monkeypatch.setattr(script.runtime.Runtime, 'gather', lambda self, value: [value, '0' * 64])
    outcome = train(data_folder, tmp_path / 'out', init_from='resume', max_iters=7)
    assert outcome.code == 2 and 'different checkpoints' in outcome.message
    assert contents(tmp_path / 'out')['ckpt.pt'] == contents(finished)['ckpt.pt']


def test_auto_starts_and_resumes(data_folder, tmp_path, capsys):
    options = dict(init_from='auto', max_iters=7, save_interval=4)
    whole = train(data_folder, tmp_path / 'whole', **options)
    folder = goes_on(tmp_path / 'resumed', tmp_path / 'whole')
    capsys.readouterr()
    assert metrics(train(data_folder, folder, **options)) == metrics(whole)
    assert 'resumed' in capsys.readouterr().out
    assert essence(folder / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt')


def test_a_longer_run_from_a_finished_one(data_folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'out')
    outcome = train(data_folder, tmp_path / 'out', init_from='resume', max_iters=9)
    assert outcome.code == 0
    assert [record['step'] for record in outcome.records if is_training(record)] == list(
        range(1, 10)
    )
    assert read(tmp_path / 'out' / 'ckpt.pt')['step'] == 9


def test_a_resume_of_a_finished_run_changes_no_weight(data_folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'out')
    assert train(data_folder, tmp_path / 'out', init_from='resume', max_iters=6).code == 0
    assert essence(tmp_path / 'out' / 'ckpt.pt') == essence(finished / 'ckpt.pt')
    assert metrics(
        train(data_folder, tmp_path / 'out', init_from='resume', max_iters=6)
    ) == metrics(records(finished))


def test_resume_keeps_the_options_that_are_not_given(data_folder, tmp_path):
    train(data_folder, tmp_path, max_iters=2, learning_rate=0.003, beta2=0.9, seed=8)
    argv = [
        '--init_from=resume',
        f'--out_dir={tmp_path}',
        f'--dataset={data_folder}',
        '--max_iters=3',
    ]
    assert call(script.main, argv) == (0, '')
    config = [record for record in records(tmp_path) if 'config' in record][-1]['config']
    assert (
        config['learning_rate'],
        config['beta2'],
        config['seed'],
        config['max_iters'],
        config['n_embd'],
    ) == (0.003, 0.9, 8, 3, 16)


def test_a_run_that_moved_goes_on_in_its_new_place(data_folder, tmp_path, monkeypatch):
    """The folder is where the checkpoint was read, also if that is the default one: never where the
    run was before."""
    train(data_folder, tmp_path / 'old', max_iters=2)
    (tmp_path / 'old').rename(tmp_path / 'out')
    monkeypatch.chdir(tmp_path)
    assert call(script.main, ['--init_from=resume', '--max_iters=3']) == (0, '')
    assert not (tmp_path / 'old').exists()
    assert read(tmp_path / 'out' / 'ckpt.pt')['step'] == 3


def test_a_damaged_checkpoint_resumes_from_the_one_before(data_folder, tmp_path, capsys):
    options = dict(max_iters=6, save_interval=2, keep_last=2)
    whole = train(data_folder, tmp_path / 'whole', **options)
    shutil.copytree(tmp_path / 'whole', tmp_path / 'out')
    os.truncate(tmp_path / 'out' / 'ckpt.pt', 1000)
    resumed = train(data_folder, tmp_path / 'out', init_from='resume', **options)
    assert resumed.code == 0 and 'falling back' in capsys.readouterr().err
    assert essence(tmp_path / 'out' / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt')
    assert metrics(resumed) == metrics(whole)


@pytest.mark.parametrize(
    'tail',
    [
        '{"step": 6, "lo',
        '{"step": 6, "lrs": {"norms": 0.1}',
        '{"step": 6, "to{"step": 6, "loss": 2.0}',
        '7}',
        '\0\0\0',
        '[]',
    ],
)
def test_a_damaged_line_of_metrics_does_not_stop_a_resume(data_folder, tmp_path, finished, tail):
    """A kill or a full disk can cut a line anywhere; the checkpoint is what counts."""
    shutil.copytree(finished, tmp_path / 'out')
    with open(tmp_path / 'out' / 'metrics.jsonl', 'a', encoding='utf-8') as file:
        file.write(tail)
    outcome = train(data_folder, tmp_path / 'out', init_from='resume', max_iters=7)
    assert outcome.code == 0
    assert [record['step'] for record in outcome.records if is_training(record)] == list(
        range(1, 8)
    )


# what contradicts is refused, and nothing is touched


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(n_layer=2), 'n_layer=2.* 1'),
        (dict(n_embd=32), 'n_embd=32.* 16'),
        (dict(block_size=8), 'block_size=8.* 16'),
        (dict(update='gd'), 'update=gd.*lt_nag'),
        (dict(dropout=0.5), 'dropout=0.5'),
        (dict(bias=True), 'bias=True'),
        (dict(vocab_size=20), 'vocab_size=20'),
        (dict(seed=1), 'seed=1.*1337'),
        (dict(optimizer='adamw'), 'optimizer=adamw.*muon'),
        (dict(muon_qkv='split'), 'muon_qkv=split'),
        (dict(batch_size=8), 'sequences=16.*8'),
        (dict(gradient_accumulation_steps=1), 'sequences=4.*8'),
    ],
    ids=str,
)
def test_a_resume_that_would_continue_another_run_is_refused(
    options, message, data_folder, finished
):
    before = contents(finished)
    outcome = train(data_folder, finished, init_from='resume', **{'max_iters': 9, **options})
    assert outcome.code == 2 and contents(finished) == before
    assert re.search(message, outcome.message), outcome.message


def test_the_same_sequences_an_update_in_other_pieces_may_resume(data_folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'out')
    assert (
        train(
            data_folder,
            tmp_path / 'out',
            init_from='resume',
            max_iters=7,
            batch_size=2,
            gradient_accumulation_steps=4,
        ).code
        == 0
    )


@pytest.mark.parametrize('init_from', ['resume', 'auto'])
def test_other_data_is_refused_on_resume(init_from, finished, tmp_path):
    other, before = write_data(tmp_path / 'other', seed=9), contents(finished)
    outcome = train(other, finished, init_from=init_from, max_iters=9)
    assert (
        outcome.code == 2
        and 'not the data of the run' in outcome.message
        and contents(finished) == before
    )


@pytest.mark.parametrize('name', ['ckpt.pt', 'best.pt', 'metrics.jsonl'])
def test_a_new_run_does_not_delete_an_old_one(name, data_folder, tmp_path):
    (tmp_path / name).write_text('{}')
    outcome = train(data_folder, tmp_path)
    assert outcome.code == 2 and name in outcome.message and '--overwrite' in outcome.message
    assert [path.name for path in tmp_path.iterdir()] == [name] and (
        tmp_path / name
    ).read_text() == '{}'


def test_overwrite_leaves_nothing_of_the_old_run(data_folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'out')
    (tmp_path / 'out' / 'notes.txt').write_text('mine')
    outcome = train(data_folder, tmp_path / 'out', overwrite=True, max_iters=1, keep_last=0)
    assert outcome.code == 0 and [
        record['step'] for record in outcome.records if 'config' not in record
    ] == [1, 1]
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
        'best.pt',
        'ckpt.pt',
        'lock',
        'metrics.jsonl',
        'notes.txt',
    ]


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(init_from='resume'), 'no ckpt.pt in'),
        (dict(init_from='gpt3'), 'neither a checkpoint'),
        (dict(init_from='missing.pt'), 'neither a checkpoint'),
        (dict(dataset='no-such-set'), 'no-such-set'),
        (dict(vocab_size=5), 'vocab_size=5.*13'),
        (dict(block_size=5000), 'val.bin|train.bin'),
        (dict(device='warp'), 'device=warp'),
        (dict(device='cuda:99'), 'device=cuda:99'),
        (dict(dtype='float16'), 'float16'),
        (dict(n_embd=17), 'not divisible'),
        (dict(update='adam'), 'adam'),
        (dict(learning_rate=0), 'learning_rate'),
        (dict(batch_size=0), 'batch_size'),
        (dict(eval_iters=0), 'eval_iters'),
        (dict(max_iters=-1), 'max_iters'),
        (dict(log_interval=-1), 'log_interval'),
        (dict(min_lr=1.0), 'min_lr'),
        (dict(beta2=1.0), 'beta2'),
        (dict(n_layers=2), "did you mean 'n_layer'"),
        (dict(optimizer='adamw', muon_lr=0.1), 'no effect.*muon_lr|muon_lr.*no effect'),
        (dict(optimizer='adamw', muon_momentum=0.9), 'muon_momentum'),
        (dict(optimizer='adamw', muon_weight_decay=0.1), 'muon_weight_decay'),
        (dict(optimizer='adamw', muon_qkv='split'), 'muon_qkv'),
        (dict(decay_lr=False, min_lr=0.0), 'no effect.*min_lr|min_lr.*no effect'),
        (dict(decay_lr=False, lr_decay_iters=9), 'lr_decay_iters'),
        (dict(wsd_decay=0.1), 'wsd_decay'),
        (dict(decay_lr=False, schedule='wsd', wsd_decay=0.1), 'wsd_decay'),
        (dict(update='gd', scalar_lr_mult=2), 'no effect.*scalar_lr_mult=2.*--scalar_lr_mult=5.0'),
        (dict(update='ngpt', scalar_lr_mult=2), 'scalar_lr_mult'),
        (dict(backend='gloo'), 'backend=gloo.*torchrun'),
        (dict(wandb_project='x'), 'wandb_project=x'),
        (dict(wandb_run_name='x'), 'wandb_run_name=x'),
        (dict(decay_lr=False, schedule='wsd'), 'schedule=wsd.*--schedule=cosine'),
        (dict(warmup_iters=3, lr_decay_iters=2), 'warmup_iters=3 .*lr_decay_iters=2'),
        (dict(learning_rate=1e308), 'learning_rate.*1e.06'),
        (dict(weight_decay=1e300), 'weight_decay.*1e.30'),
        (dict(n_layer=10**9), 'n_layer'),
        (dict(n_embd=2**24), 'main memory'),
        (dict(n_embd=2**62), 'main memory'),
        (dict(batch_size=2**30, gradient_accumulation_steps=1), 'main memory'),
        (dict(dataset='x' * 5000), 'File name too long'),
        (dict(dry_run=True, init_from='gpt2'), 'init_from=gpt2 has no effect.*dry_run'),
        (dict(dry_run=True, eval_only=True), 'eval_only'),
        (dict(dry_run=True, overwrite=True), 'overwrite'),
        (dict(update='gd', mu_init=0.3), 'mu_init'),
        (dict(update='ngpt', dropout=0.1), 'dropout'),
        (dict(zero=True), 'zero'),
        (dict(parallel='fsdp'), 'fsdp'),
        (dict(parallel='fsdp', zero=True), 'fsdp'),
    ],
    ids=str,
)
def test_mistakes_are_told_before_anything_is_written(options, message, data_folder, tmp_path):
    options = {'dataset': data_folder, **options}
    outcome = train(options.pop('dataset'), tmp_path / 'out', **options)
    assert outcome.code == 2 and re.search(message, outcome.message), outcome
    assert not (tmp_path / 'out').exists()


def test_memory_that_the_model_does_not_get_is_a_users_mistake(data_folder, tmp_path, monkeypatch):
    """Below what the machine has in all, but not to be had."""
    monkeypatch.setattr('nanonag.memory.main_memory', lambda: 2.0**70)
    outcome = train(data_folder, tmp_path / 'out', n_embd=2**24)
    assert (
        outcome.code == 2
        and re.search('out of memory.*smaller model', outcome.message)
        and not (tmp_path / 'out').exists()
    )


@pytest.mark.parametrize(
    'where, told',
    [
        ('update', '--batch_size=2 --gradient_accumulation_steps=4'),
        ('evaluate', '--eval_batch_size=6'),
    ],
)
def test_memory_that_runs_out_in_training_ends_it_in_one_message(
    where, told, data_folder, tmp_path, monkeypatch
):
    def fail(*args):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
        )

    monkeypatch.setattr(f'train.{where}', fail)
    outcome = train(data_folder, tmp_path / 'out')
    assert outcome.code == 1 and 'out of memory' in outcome.message and told in outcome.message


def test_a_full_device_costs_the_messages_and_not_the_run(data_folder, tmp_path):
    """/dev/full is standard output and standard error: the run ends well, a mistake still has its
    code."""
    if not os.path.exists('/dev/full'):
        pytest.skip('no /dev/full here')
    with open('/dev/full', 'w') as full:
        for options, code in ((dict(), 0), (dict(batch_size=0), 2)):
            command = [
                sys.executable,
                str(ROOT / 'train.py'),
                *arguments(
                    {**SMALL, 'dataset': data_folder, 'out_dir': tmp_path / 'out', **options}
                ),
            ]
            assert (
                subprocess.run(
                    command,
                    stdout=full,
                    stderr=full,
                    env=os.environ | {'OMP_NUM_THREADS': '1'},
                    timeout=100,
                ).returncode
                == code
            )
    assert (tmp_path / 'out/ckpt.pt').exists() and records(tmp_path / 'out')[-1]['step'] == SMALL[
        'max_iters'
    ]


def test_hostile_parts_of_a_full_state_are_told(data_folder, finished, tmp_path):
    state = checkpoint.read(finished / 'ckpt.pt')
    name = next(iter(state['optimizer']))
    for part, value in [
        ('optimizer', {**state['optimizer'], name: {'momentum_buffer': 7}}),
        ('optimizer', {**state['optimizer'], name: {}}),
        ('rng', [[torch.zeros(5, dtype=torch.uint8)]]),
        ('rng', [[torch.zeros(5056)]]),
        ('gpt_config', {'update': 'x'}),
        ('train_config', {'batch_size': [1]}),
        ('train_config', {'learning_rate': 1e308}),
    ]:
        (tmp_path / 'out').mkdir(exist_ok=True)
        content = state | {part: value}
        torch.save(content | {'digest': checkpoint.digest(content)}, tmp_path / 'out/ckpt.pt')
        outcome = train(data_folder, tmp_path / 'out', init_from='resume', max_iters=7)
        assert outcome.code == 2 and outcome.message, (part, value)


@pytest.mark.parametrize(
    'accumulation, processes, nearest', [(2, 4, 4), (5, 2, 4), (40, 16, 32), (41, 8, 40)]
)
def test_accumulation_must_divide_among_the_processes(
    accumulation, processes, nearest, data_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv('WORLD_SIZE', str(processes))
    monkeypatch.setenv('RANK', '0')
    outcome = train(data_folder, tmp_path / 'out', gradient_accumulation_steps=accumulation)
    assert outcome.code == 2 and not (tmp_path / 'out').exists()
    assert f'={accumulation} ' in outcome.message and f' {processes} ' in outcome.message
    assert outcome.message.endswith(f': {nearest}')


def test_a_world_size_without_a_rank_is_one_process(data_folder, tmp_path, monkeypatch):
    """Only torchrun's RANK makes a process one of several; a stray WORLD_SIZE must not divide the
    batch or the loss."""
    expected = train(data_folder, tmp_path / 'a')
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert metrics(train(data_folder, tmp_path / 'b')) == metrics(expected)


# what is saved, and when


def test_eval_only_writes_nothing(data_folder, finished, tmp_path, capsys, monkeypatch):
    """Whatever the step that it starts from; it has no optimizer with which it could go on
    training."""
    monkeypatch.delattr(script, 'configure_optimizer')
    before = contents(finished)
    for init_from in ('resume', 'auto', str(finished / 'best.pt'), 'scratch'):
        assert train(data_folder, finished, init_from=init_from, eval_only=True).code == 0
        assert 'val loss' in capsys.readouterr().out
    assert contents(finished) == before
    assert train(data_folder, tmp_path / 'out', eval_only=True).code == 0
    assert not (tmp_path / 'out').exists()


def test_eval_only_gives_the_losses_of_the_run(data_folder, finished, capsys):
    last = records(finished)[-1]
    capsys.readouterr()
    train(data_folder, finished, init_from='resume', eval_only=True)
    assert (
        'train loss {train_loss:.4f}, val loss {val_loss:.4f}'.format(**last)
        in capsys.readouterr().out
    )


@pytest.fixture
def saves(monkeypatch):
    """(step, whether best) of each checkpoint."""
    found = []
    save = checkpoint.Saver.save
    monkeypatch.setattr(
        checkpoint.Saver,
        'save',
        lambda self, state, best=False: (
            found.append((state['step'], best)) or save(self, state, best)
        ),
    )
    return found


@pytest.fixture
def val_losses(monkeypatch):
    """Makes evaluations return these losses in turn (train and val the same)."""

    def set_losses(*losses):
        queue = [loss for loss in losses for _ in range(2)]
        monkeypatch.setattr(script, 'evaluate', lambda *args: queue.pop(0))

    return set_losses


def test_saves_only_improvements_if_asked(saves, val_losses, data_folder, tmp_path):
    val_losses(9.0, 3.0, 4.0, 2.0, 5.0)
    train(data_folder, tmp_path, max_iters=4, eval_interval=1, always_save_checkpoint=False)
    assert saves == [(1, True), (3, True), (4, False)]  # the final one always
    assert (
        read(tmp_path / 'best.pt')['step'] == 3
        and read(tmp_path / 'best.pt')['best_val_loss'] == 2.0
    )
    # not overwritten by a later, worse one
    assert read(tmp_path / 'ckpt.pt')['best_val_loss'] == 2.0


def test_saves_at_every_evaluation_by_default(saves, val_losses, data_folder, tmp_path):
    val_losses(9.0, 3.0, 4.0, 2.0, 5.0)
    train(data_folder, tmp_path, max_iters=4, eval_interval=1)
    assert saves == [(1, True), (2, False), (3, True), (4, False)]
    assert read(tmp_path / 'best.pt')['step'] == 3 and read(tmp_path / 'ckpt.pt')['step'] == 4


def test_save_interval_apart_from_evaluation(saves, data_folder, tmp_path):
    train(data_folder, tmp_path, max_iters=7, save_interval=3)
    assert [step for step, _ in saves if step] == [3, 6, 7]


def test_a_failing_save_does_not_end_the_run(data_folder, tmp_path, monkeypatch, capsys):
    save, calls = torch.save, []

    def failing(state, file):
        calls.append(state['step'])
        if state['step'] == 2:
            raise OSError(28, 'No space left on device')
        save(state, file)

    monkeypatch.setattr(torch, 'save', failing)
    outcome = train(data_folder, tmp_path / 'a', save_interval=2, max_iters=5)
    assert outcome.code == 0 and 'No space left' in capsys.readouterr().err
    assert read(tmp_path / 'a' / 'ckpt.pt')['step'] == 5
    monkeypatch.setattr(torch, 'save', lambda *args: failing({'step': 2}, None))
    outcome = train(data_folder, tmp_path / 'b')
    # not a silent loss
    assert outcome.code == 1 and 'final checkpoint could not be written' in outcome.message


# stopping


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_a_resume_is_bitwise(number, data_folder, tmp_path, monkeypatch, capsys):
    options = dict(max_iters=6, eval_interval=4, dropout=0.1, gradient_accumulation_steps=2)
    whole = train(data_folder, tmp_path / 'whole', **options)
    multiplier = script.lr_multiplier

    def signalling(step, cfg):
        if step == 2:
            os.kill(os.getpid(), number)
        return multiplier(step, cfg)

    with monkeypatch.context() as patch:
        patch.setattr(script, 'lr_multiplier', signalling)
        stopped = train(data_folder, tmp_path / 'out', **options)
    assert stopped.code == script.STOPPED == 75
    assert 'resume' in capsys.readouterr().out
    assert read(tmp_path / 'out' / 'ckpt.pt')['step'] == 3  # the step was finished
    resumed = train(data_folder, tmp_path / 'out', init_from='auto', **options)
    assert resumed.code == 0 and metrics(resumed) == metrics(whole)
    assert essence(tmp_path / 'out' / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt')


def test_a_second_interrupt_stops_at_once(data_folder, tmp_path, monkeypatch):
    def signalling(step, cfg):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        pytest.fail('went on')

    monkeypatch.setattr(script, 'lr_multiplier', signalling)
    with pytest.raises(KeyboardInterrupt):
        train(data_folder, tmp_path)


def test_a_signal_to_the_program(data_folder, tmp_path):
    process = start_train(data_folder, tmp_path, max_iters=10**6)
    try:
        deadline = time.time() + 60
        while time.time() < deadline and not (
            (tmp_path / 'metrics.jsonl').exists()
            and '"loss"' in (tmp_path / 'metrics.jsonl').read_text()
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (
        process.returncode == 75 and 'SIGTERM: saved step' in stdout and 'Traceback' not in stderr
    )
    assert read(tmp_path / 'ckpt.pt')['step'] > 0


def test_a_users_mistake_is_one_line_of_the_program(data_folder, tmp_path):
    code, stdout, stderr, _ = run_train(data_folder, tmp_path / 'out', n_embd=17)
    assert (
        code == 2
        and stdout == ''
        and stderr.startswith('error: n_embd=17')
        and stderr.count('\n') == 1
    )


# gradients that are not finite


@pytest.fixture
def bad_gradients(monkeypatch):
    """Makes one entry of one weight's gradient `value` in the given updates (from 0)."""

    def set_bad(steps, value):
        multiplier, make, now = script.lr_multiplier, script.configure_optimizer, []

        def configure(model, *args):
            def spoil(grad):
                return grad.index_fill(0, torch.tensor([0]), value) if now[-1] in steps else grad

            model.transformer.h[0].mlp.c_fc.weight.register_hook(spoil)
            return make(model, *args)

        monkeypatch.setattr(script, 'configure_optimizer', configure)
        monkeypatch.setattr(
            script, 'lr_multiplier', lambda step, cfg: now.append(step) or multiplier(step, cfg)
        )

    return set_bad


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    value, optimizer, bad_gradients, data_folder, tmp_path, capsys
):
    bad_gradients({2}, value)
    outcome = train(
        data_folder, tmp_path, optimizer=optimizer, max_iters=5, save_interval=1, keep_last=5
    )
    assert outcome.code == 0 and 'update skipped (1 in a row)' in capsys.readouterr().out
    weights = [essence(tmp_path / f'ckpt-{step:08d}.pt') for step in (1, 2, 3, 4)]
    assert (weights[1]['model'], weights[1]['optimizer']) == (
        weights[2]['model'],
        weights[2]['optimizer'],
    )
    assert len({one['model'] for one in weights}) == 3
    assert all(w.isfinite().all() for w in read(tmp_path / 'ckpt.pt')['model'].values())
    assert [record['skipped'] for record in outcome.records if is_training(record)] == [
        0,
        0,
        1,
        0,
        0,
    ]


def test_too_many_in_a_row_end_the_run(bad_gradients, data_folder, tmp_path):
    bad_gradients({1, 3, 4, 5, 6, 7}, math.nan)
    outcome = train(data_folder, tmp_path, max_iters=9, max_skipped=3, save_interval=1)
    assert (
        outcome.code == 1
        and 'step 6' in outcome.message
        and '3 updates in a row' in outcome.message
    )
    assert all(w.isfinite().all() for w in read(tmp_path / 'ckpt.pt')['model'].values())


def test_the_count_of_skipped_updates_survives_a_resume(bad_gradients, data_folder, tmp_path):
    bad_gradients(set(range(1, 99)), math.nan)
    train(data_folder, tmp_path, max_iters=3, max_skipped=4, learning_rate=1e-2)
    outcome = train(data_folder, tmp_path, init_from='resume', max_iters=9, max_skipped=4)
    assert outcome.code == 1 and 'step 5' in outcome.message


# starting from weights


def test_finetuning_from_best(data_folder, finished, tmp_path):
    outcome = train(
        data_folder, tmp_path / 'out', init_from=finished / 'best.pt', max_iters=0, dropout=0.1
    )
    assert outcome.code == 0 and outcome.records[0]['config']['dropout'] == 0.1
    start = read(finished / 'best.pt')
    assert checkpoint.digest(read(tmp_path / 'out' / 'ckpt.pt')['model']) == checkpoint.digest(
        start['model']
    )
    assert outcome.records[-1]['val_loss'] == pytest.approx(start['best_val_loss'])
    train(data_folder, tmp_path / 'more', init_from=finished / 'best.pt', max_iters=2)
    assert [
        record['step']
        for record in train(data_folder, tmp_path / 'more', init_from='resume').records
        if is_training(record)
    ] == [1, 2, 3, 4]


def test_finetuning_with_another_tokenizer_is_refused(data_folder, finished, tmp_path):
    other = write_data(tmp_path / 'other')
    meta = json.loads((other / 'meta.json').read_text())
    meta['tokenizer']['chars'] = meta['tokenizer']['chars'][::-1]
    (other / 'meta.json').write_text(json.dumps(meta))
    outcome = train(other, tmp_path / 'out', init_from=finished / 'best.pt')
    assert outcome.code == 2 and 'tokenizer' in outcome.message and not (tmp_path / 'out').exists()


def test_gpt2_with_characters_is_refused(data_folder, tmp_path, monkeypatch):
    """GPT-2's weights know GPT-2's tokens; the ids of characters are in range and would train on
    nonsense."""
    monkeypatch.setattr(
        GPT,
        'from_pretrained',
        classmethod(
            lambda cls, name, **overrides: script.GPT(
                script.GPTConfig(
                    update='gd',
                    n_layer=1,
                    n_head=2,
                    n_embd=16,
                    block_size=16,
                    vocab_size=50257,
                    **overrides,
                )
            )
        ),
    )
    options = dict(
        init_from='gpt2',
        dataset=data_folder,
        out_dir=tmp_path / 'out',
        max_iters=1,
        device='cpu',
        batch_size=1,
        gradient_accumulation_steps=1,
        eval_iters=1,
    )
    code, message = call(script.main, arguments(options))
    assert code == 2 and 'tokenizer' in message and not (tmp_path / 'out').exists()


# other programs


def test_wandb_offline(data_folder, tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    assert train(data_folder, tmp_path, wandb_log=True, max_iters=2).code == 0
    assert read(tmp_path / 'ckpt.pt')['wandb_id']


def test_wandb_gets_the_records_and_goes_on_in_the_same_run(data_folder, tmp_path, monkeypatch):
    """A stand-in of the three calls that are made; the package itself is optional."""
    starts, logged = [], []

    def init(**options):
        starts.append(options)
        return SimpleNamespace(
            id=options['id'] or 'new', log=lambda record, step: logged.append((step, record))
        )

    wandb = ModuleType('wandb')
    wandb.init, wandb.__spec__ = init, ModuleSpec('wandb', None)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    train(data_folder, tmp_path / 'run', wandb_log=True, wandb_project='streams', max_iters=2)
    outcome = train(data_folder, tmp_path / 'run', wandb_log=True, init_from='resume', max_iters=4)
    assert [
        (start['project'], start['name'], start['id'], start['resume']) for start in starts
    ] == [('streams', 'run', None, 'allow'), ('streams', 'run', 'new', 'allow')]
    assert starts[0]['config']['config']['n_embd'] == 16
    assert [record for _, record in logged] == [
        record for record in outcome.records if 'config' not in record
    ]
    assert all(step == record['step'] for step, record in logged)


def test_without_wandb_it_says_what_to_install(data_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(script.importlib.util, 'find_spec', lambda name: None)
    outcome = train(data_folder, tmp_path / 'out', wandb_log=True)
    assert (
        outcome.code == 2
        and 'pip install wandb' in outcome.message
        and not (tmp_path / 'out').exists()
    )


def test_a_compiled_run_saves_plain_names(data_folder, tmp_path, monkeypatch):
    """Compiled or not, a checkpoint has the same keys and continues the other."""
    monkeypatch.setattr(
        script.runtime,
        'compile_model',
        lambda model, mode, rt: model.compile(backend='aot_eager') or True,
    )
    torch._dynamo.reset()
    assert train(data_folder, tmp_path / 'a', max_iters=2, n_layer=1).code == 0
    torch._dynamo.reset()
    monkeypatch.undo()
    assert train(data_folder, tmp_path / 'b', max_iters=2).code == 0
    assert (
        read(tmp_path / 'a' / 'ckpt.pt')['model'].keys()
        == read(tmp_path / 'b' / 'ckpt.pt')['model'].keys()
    )
    assert train(data_folder, tmp_path / 'a', init_from='resume', max_iters=3).code == 0


def test_a_run_started_with_overwrite_can_be_resumed(data_folder, tmp_path):
    """The option was the start's, not the run's."""
    assert train(data_folder, tmp_path / 'run', max_iters=2, overwrite=True).code == 0
    assert train(data_folder, tmp_path / 'run', init_from='resume', max_iters=3).code == 0


def test_auto_starts_afresh_where_a_run_died_before_its_first_checkpoint(data_folder, tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')
    assert train(data_folder, tmp_path, init_from='auto', max_iters=2).code == 0


def test_a_fresh_start_spares_older_checkpoints(data_folder, tmp_path):
    (tmp_path / 'ckpt-00000003.pt').write_bytes(b'all that is left of a run')
    assert train(data_folder, tmp_path, max_iters=2).code == 2
    assert (tmp_path / 'ckpt-00000003.pt').exists()


def test_an_out_dir_that_cannot_be_written(data_folder, tmp_path):
    (tmp_path / 'file').write_text('')
    outcome = train(data_folder, tmp_path / 'file' / 'run', max_iters=2)
    assert outcome.code == 2 and 'cannot be written' in outcome.message


def test_max_iters_below_the_checkpoints_step(data_folder, tmp_path):
    assert train(data_folder, tmp_path / 'run', max_iters=3).code == 0
    assert train(data_folder, tmp_path / 'run', init_from='resume', max_iters=2).code == 2


def test_two_starts_in_one_folder(data_folder, tmp_path):
    """The second is told so before it can touch the first one's files."""
    assert train(data_folder, tmp_path, max_iters=2).code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert train(data_folder, tmp_path, max_iters=2).code == 2
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_the_data_decide_which_ids_are_used(data_folder, tmp_path):
    outcome = train(data_folder, tmp_path / 'run', vocab_used=5, max_iters=2)
    assert (
        outcome.code == 2 and 'vocab_used=5' in outcome.message and not (tmp_path / 'run').exists()
    )


@pytest.mark.skipif(
    not os.path.exists('/proc/self/status'), reason="reads Linux's own count of resident memory"
)
def test_a_bin_larger_than_memory_trains_in_little(tmp_path):
    """30 GB, sparse: zeros that take no room."""
    folder, tokens = write_data(tmp_path / 'data'), 15_000_000_000
    os.truncate(folder / 'train.bin', 2 * tokens)
    meta = json.loads((folder / 'meta.json').read_text())
    meta['tokens']['train'] = tokens
    (folder / 'meta.json').write_text(json.dumps(meta))
    # not ru_maxrss: a child's begins with its parent's
    program = (
        'import sys, train; train.main(sys.argv[1:]); '
        'print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])'
    )
    options = {
        **SMALL,
        'dataset': folder,
        'out_dir': tmp_path / 'out',
        'batch_size': 16,
        'max_iters': 20,
        'eval_iters': 20,
    }
    result = subprocess.run(
        [sys.executable, '-c', program, *arguments(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) * 1024 < 2e9
