"""How a run ends early: signals, memory, a full disk, gradients that are not finite."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    ROOT,
    SMALL,
    arguments,
    essence,
    is_training,
    metrics,
    records,
    start_train,
    train,
)

import start
import train as script
from nanonag.checkpoint import read

# signals


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_a_resume_is_bitwise(number, data_folder, tmp_path, at_step, capsys):
    options = dict(max_iters=6, eval_interval=4, dropout=0.1, gradient_accumulation_steps=2)
    whole = train(data_folder, tmp_path / 'whole', **options)
    at_step(lambda step: step == 2 and os.kill(os.getpid(), number))
    stopped = train(data_folder, tmp_path / 'out', **options)
    assert stopped.code == script.STOPPED == 75
    assert 'resume' in capsys.readouterr().out
    assert read(tmp_path / 'out' / 'ckpt.pt')['step'] == 3  # the step was finished
    resumed = train(data_folder, tmp_path / 'out', init_from='auto', **options)
    assert resumed.code == 0 and metrics(resumed) == metrics(whole)
    assert essence(tmp_path / 'out' / 'ckpt.pt') == essence(tmp_path / 'whole' / 'ckpt.pt')


def test_a_second_interrupt_stops_at_once(data_folder, tmp_path, at_step):
    def interrupt_twice(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        pytest.fail('went on')

    at_step(interrupt_twice)
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


# memory and disks that are full


@pytest.mark.parametrize(
    'where, options, advice',
    [
        (
            'train_step',
            dict(batch_size=4, gradient_accumulation_steps=2),
            '--batch_size=2 --gradient_accumulation_steps=4 ',
        ),
        (
            'train_step',
            dict(batch_size=9, gradient_accumulation_steps=2),
            '--batch_size=3 --gradient_accumulation_steps=6 ',
        ),
        (
            'train_step',
            dict(batch_size=7, gradient_accumulation_steps=1),
            '--batch_size=1 --gradient_accumulation_steps=7 ',
        ),
        ('train_step', dict(batch_size=1), 'try --activation_checkpointing=True'),
        ('train_step', dict(batch_size=1, activation_checkpointing=True), 'try --parallel=fsdp'),
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
        ('GPT', {}, 'choose a smaller model'),
    ],
)
@pytest.mark.parametrize(
    'error',
    [
        torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB\nmore'),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=['cuda', 'cpu'],
)
def test_out_of_memory_ends_with_options_for_the_same_run(
    where, options, advice, error, data_folder, tmp_path, monkeypatch
):
    def fail(*args):
        raise error

    monkeypatch.setattr(start if where == 'GPT' else script, where, fail)
    outcome = train(data_folder, tmp_path / 'out', **options)
    assert outcome.code == (2 if where == 'GPT' else 1)
    assert outcome.message.startswith('out of memory (') and '\n' not in outcome.message
    assert advice in outcome.message


def test_other_errors_are_not_taken_for_memory(data_folder, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError('an illegal memory access')

    monkeypatch.setattr(script, 'train_step', fail)
    with pytest.raises(RuntimeError, match='illegal'):
        train(data_folder, tmp_path)


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


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full here')
def test_a_full_device_costs_the_messages_and_not_the_run(data_folder, tmp_path):
    """/dev/full is standard output and standard error (test_config.py: of a mistake, too)."""
    options = {**SMALL, 'dataset': data_folder, 'out_dir': tmp_path / 'out'}
    with open('/dev/full', 'w') as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / 'train.py'), *arguments(options)],
            stdout=full,
            stderr=full,
            env=os.environ | {'OMP_NUM_THREADS': '1'},
            timeout=100,
        )
    assert done.returncode == 0 and (tmp_path / 'out/ckpt.pt').exists()
    assert records(tmp_path / 'out')[-1]['step'] == SMALL['max_iters']


# gradients that are not finite


@pytest.fixture
def bad_gradients(monkeypatch, at_step):
    """Makes one entry of one weight's gradient `value` in the given steps (from 0)."""

    def set_bad(steps, value):
        make, begun = script.configure_optimizer, []

        def configure(model, *args):
            def spoil(grad):
                return grad.index_fill(0, torch.tensor([0]), value) if begun[-1] in steps else grad

            model.transformer.h[0].mlp.c_fc.weight.register_hook(spoil)
            return make(model, *args)

        monkeypatch.setattr(script, 'configure_optimizer', configure)
        at_step(begun.append)

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
    assert outcome.code == 0 and 'weights unchanged (1 in a row)' in capsys.readouterr().out
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
        outcome.code == 1 and 'step 6' in outcome.message and '3 steps in a row' in outcome.message
    )
    assert all(w.isfinite().all() for w in read(tmp_path / 'ckpt.pt')['model'].values())


def test_the_count_of_skipped_updates_survives_a_resume(bad_gradients, data_folder, tmp_path):
    bad_gradients(set(range(1, 99)), math.nan)
    train(data_folder, tmp_path, max_iters=3, max_skipped=4, learning_rate=1e-2)
    outcome = train(data_folder, tmp_path, init_from='resume', max_iters=9, max_skipped=4)
    assert outcome.code == 1 and 'step 5' in outcome.message
