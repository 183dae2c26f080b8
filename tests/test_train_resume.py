"""Resuming: a run that goes on is the run that was never interrupted, bit for bit."""

import os
import shutil

import pytest
import torch
from conftest import call, essence, goes_on, is_training, metrics, records, train
from torch.amp import GradScaler

import train as script
from model import SCHEMES
from nanonag import checkpoint
from nanonag.checkpoint import read


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


def test_a_run_started_with_overwrite_can_be_resumed(data_folder, tmp_path):
    """The option was the start's, not the run's."""
    assert train(data_folder, tmp_path / 'run', max_iters=2, overwrite=True).code == 0
    assert train(data_folder, tmp_path / 'run', init_from='resume', max_iters=3).code == 0


def test_auto_starts_afresh_where_a_run_died_before_its_first_checkpoint(data_folder, tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')
    assert train(data_folder, tmp_path, init_from='auto', max_iters=2).code == 0


# every entry of a checkpoint


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
