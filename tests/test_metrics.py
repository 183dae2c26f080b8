"""metrics.jsonl: every record once, whatever the disk does; spikes and units in it."""

import builtins
import errno
import importlib.machinery
import json
import math
import os
import random
import sys
import types

import numpy as np
import pytest
from conftest import records, train

from nanonag import metrics
from nanonag.checkpoint import read
from nanonag.cli import UserError
from nanonag.data import writer
from nanonag.data.folder import read_meta
from nanonag.data.tokenizer import CharTokenizer, GPT2Tokenizer
from nanonag.metrics import Metrics, other_units


def record_of_run(folder, step=0, **facts):
    """The Metrics of a run, made as train.py makes it."""
    cfg = types.SimpleNamespace(out_dir=folder, wandb_log=False)
    return Metrics(cfg, {'config': {}, **facts}, step)


class HalfAFile:
    """A file on a full disk: writes half of what it is given, then raises an error."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize('fails', [{2}, {1, 2, 3}, {2, 4, 6}, set(range(1, 8))], ids=str)
@pytest.mark.parametrize('half', [False, True])
def test_records_wait_for_room(tmp_path, monkeypatch, capsys, fails, half):
    run, now = record_of_run(tmp_path), [0]

    def full(*args):
        if now[0] not in fails:
            return builtins.open(*args)
        if half:
            return HalfAFile(builtins.open(*args))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics, 'open', full, raising=False)
    for now[0] in range(1, 9):
        run.write({'step': now[0]})
    assert [record['step'] for record in records(tmp_path)] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert capsys.readouterr().err.count('waits in memory') == len(fails)


def test_a_record_that_vanished_begins_again_with_the_configuration(tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    run = record_of_run(tmp_path / 'run')
    run.write({'step': 1})
    (tmp_path / 'run').rename(tmp_path / 'moved')
    run.write({'step': 2})
    assert 'waits in memory' in capsys.readouterr().err
    (tmp_path / 'run').mkdir()  # as the next checkpoint does
    run.write({'step': 3})
    assert 'VANISHED' in capsys.readouterr().err
    assert [(record['step'], 'config' in record) for record in records(tmp_path / 'run')] == [
        (0, True),
        (2, False),
        (3, False),
    ]
    assert [record['step'] for record in records(tmp_path / 'moved')] == [0, 1]


def test_a_resume_drops_what_the_checkpoint_does_not_know(tmp_path):
    run = record_of_run(tmp_path)
    for step in range(1, 6):
        run.write({'step': step})
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
        file.write('{"step": 2, "lo')  # killed in the middle of a line
    record_of_run(tmp_path, 3).write({'step': 4})
    assert [record['step'] for record in records(tmp_path)] == [0, 1, 2, 3, 3, 4]


def test_a_record_that_cannot_be_written_at_the_start_is_a_users_mistake(tmp_path):
    (tmp_path / 'metrics.tmp').mkdir()
    with pytest.raises(UserError, match='metrics.jsonl: cannot be written'):
        record_of_run(tmp_path)


# spikes


def losses(count=200, spikes=(), seed=3):
    """A falling, noisy curve with a jump of 0.5 at each index in `spikes`."""
    draw = random.Random(seed)
    return [2 + math.exp(-i / 20) + draw.gauss(0, 0.02) + 0.5 * (i in spikes) for i in range(count)]


def spikes_of(folder):
    return [record['step'] for record in records(folder) if record.get('spike')]


def test_spikes_are_marked(tmp_path):
    run = record_of_run(tmp_path)
    for step, loss in enumerate(losses(spikes={90, 150})):
        run.write({'step': step, 'loss': loss})
    run.write({'step': 200, 'loss': math.nan})
    assert spikes_of(tmp_path) == [90, 150, 200]
    assert records(tmp_path)[-1]['loss'] is None  # JSON has no NaN
    assert all('spike' in record for record in records(tmp_path)[1:])


@pytest.mark.parametrize('seed', range(5))
def test_noise_and_a_falling_loss_are_no_spikes(tmp_path, seed):
    run = record_of_run(tmp_path)
    for step, loss in enumerate(losses(1000, seed=seed)):
        run.write({'step': step, 'loss': loss})
    assert spikes_of(tmp_path) == []


def test_a_new_plateau_soon_is_none_either(tmp_path):
    run = record_of_run(tmp_path)
    for step, loss in enumerate([*losses(100), *(loss + 1 for loss in losses(100, seed=4))]):
        run.write({'step': step, 'loss': loss})
    assert 100 in spikes_of(tmp_path) and max(spikes_of(tmp_path)) < 110


@pytest.mark.parametrize(
    'stops',
    [[3], [9, 10], [95], [120, 149, 151], list(range(1, 199))],
    ids=lambda stops: f'{len(stops)} stops from {stops[0]}',
)
def test_a_resumed_run_marks_the_same_spikes(tmp_path, stops):
    """A spike depends on the losses before it only, which are read from the file."""
    curve = losses(spikes={12, 90, 100, 150})
    for name, resumes in (('whole', []), ('resumed', stops)):
        (tmp_path / name).mkdir()
        run = record_of_run(tmp_path / name)
        for step, loss in enumerate(curve, start=1):
            run.write({'step': step, 'loss': loss})
            if step in resumes:
                run.write({'step': step + 1, 'loss': 99.0})  # of a step that no checkpoint holds
                run = record_of_run(tmp_path / name, step)
    whole, resumed = (
        [record for record in records(tmp_path / name) if 'loss' in record]
        for name in ('whole', 'resumed')
    )
    assert whole == resumed and len(spikes_of(tmp_path / 'whole')) >= 3


# units


def test_units_of_a_validation_loss():
    meta = {'tokenizer': {'kind': 'gpt2'}, 'tokens': {'train': 1, 'val': 100}}
    assert other_units(math.log(8), meta) == {'val_perplexity': pytest.approx(8)}
    assert other_units(math.log(8), meta | {'bytes': {'train': 1, 'val': 400}}) == {
        'val_perplexity': pytest.approx(8),
        'val_bits_per_byte': pytest.approx(0.75),
    }
    assert other_units(math.log(8), meta | {'tokenizer': {'kind': 'char', 'chars': ['a']}}) == {
        'val_perplexity': pytest.approx(8),
        'val_bits_per_char': pytest.approx(3),
    }
    assert other_units(math.log(8), meta | {'bytes': {'train': 1, 'val': 0}}).keys() == {
        'val_perplexity'
    }
    assert other_units(1e9, meta)['val_perplexity'] < math.inf and math.isnan(
        other_units(math.nan, meta)['val_perplexity']
    )


TEXT = 'naïve 漢字 and <|endoftext|> 🙂 in plain text,\n   twice \u200b  over. '


@pytest.mark.parametrize(
    'tokens', [CharTokenizer(sorted(set(TEXT))), GPT2Tokenizer()], ids=['char', 'gpt2']
)
def test_meta_counts_the_bytes_of_the_text(tmp_path, tokens):
    pieces = [('train', TEXT * 3, True), ('val', TEXT, True), ('train', TEXT, True)]
    assert writer.write(tmp_path, tokens, pieces, {})['bytes'] == {
        'train': 4 * len(TEXT.encode()),
        'val': len(TEXT.encode()),
    }
    assert read_meta(tmp_path)['bytes']['val'] == len(TEXT.encode())
    assert len(tokens.byte_lengths) == tokens.vocab_size


@pytest.mark.parametrize(
    'value',
    [
        3,
        None,
        {},
        {'train': 1},
        {'train': 1, 'val': -1},
        {'train': 1, 'val': 1.5},
        {'train': 1, 'val': True},
        {'train': 1, 'val': 2**60},
    ],
    ids=str,
)
def test_a_wrong_count_of_bytes_is_refused(data_folder, tmp_path, value):
    meta = json.loads((data_folder / 'meta.json').read_text()) | {'bytes': value}
    (tmp_path / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(UserError, match='bytes'):
        read_meta(tmp_path)


def test_evaluation_records_carry_them(finished):
    for record in records(finished):
        if 'val_loss' in record:
            assert record['val_bits_per_char'] == pytest.approx(record['val_loss'] / np.log(2))
            assert record['val_perplexity'] == pytest.approx(np.exp(record['val_loss']))


# Weights & Biases


def test_a_resumed_run_goes_on_under_its_name_at_wandb(data_folder, tmp_path, monkeypatch):
    started, logged, fake = [], [], types.ModuleType('wandb')
    fake.__spec__ = importlib.machinery.ModuleSpec('wandb', None)

    def init(**options):
        started.append(options)
        return types.SimpleNamespace(
            id=options['id'] or 'abc', log=lambda record, step: logged.append(step)
        )

    fake.init = init
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    assert (
        train(data_folder, tmp_path, max_iters=2, wandb_log=True).code == 0
        and read(tmp_path / 'ckpt.pt')['wandb_id'] == 'abc'
    )
    assert train(data_folder, tmp_path, max_iters=4, wandb_log=True, init_from='resume').code == 0
    assert [(options['id'], options['resume']) for options in started] == [
        (None, 'allow'),
        ('abc', 'allow'),
    ]
    assert read(tmp_path / 'ckpt.pt')['wandb_id'] == 'abc' and sorted(set(logged)) == [1, 2, 3, 4]
