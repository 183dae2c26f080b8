"""Options without effect: refused where they were typed, dropped and reported elsewhere."""

import json
import os

import pytest
import torch
from conftest import ROOT, SMALL, arguments, call, fresh, records, train

import sample
import start
from nanonag.cli import UserError
from nanonag.configurator import parse
from train import TrainConfig
from train import main as train_main

RECIPES = sorted(
    path.name for path in (ROOT / 'config').glob('*.py') if not path.name.startswith('base_')
)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)


def config(tmp_path, text):
    path = tmp_path / 'config.py'
    path.write_text(text, encoding='utf-8')
    return path


def run(data_folder, tmp_path, *files, **options):
    """(exit code, message, the config recorded) of a SMALL run; files come before the options."""
    fixed = {**SMALL, 'dataset': data_folder, 'out_dir': tmp_path / 'out', 'max_iters': 1}
    code, message = call(train_main, [*files, *arguments({**fixed, **options})])
    recorded = [record['config'] for record in records(tmp_path / 'out') if 'config' in record]
    return code, message, recorded[-1] if recorded else None


def test_what_was_typed_is_known(tmp_path):
    path = config(tmp_path, 'seed = 3\nmax_iters = 5')
    assert parse([str(path), '--seed=4'], TrainConfig).typed == {'seed'}
    assert parse(['--seed=4', str(path)], TrainConfig).typed == set()  # the file's value holds


def test_adamw_over_a_recipe_of_muon(data_folder, tmp_path, capsys):
    """config/owt_lt_nag.py sets muon_lr."""
    recipe = ROOT / 'config' / 'owt_lt_nag.py'
    code, message, recorded = run(data_folder, tmp_path, recipe, optimizer='adamw')
    assert (code, message) == (0, '')
    assert recorded['optimizer'] == 'adamw' and recorded['muon_lr'] is None
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith('note: ')]
    assert len(notes) == 1 and 'muon_lr=0.004' in notes[0] and 'optimizer=adamw' in notes[0]


@pytest.mark.parametrize('recipe', RECIPES)
def test_a_constant_rate_over_any_recipe(recipe, capsys):
    argv = [str(ROOT / 'config' / recipe), '--decay_lr=False', '--dry_run=True']
    assert start.plan(argv, TrainConfig) is None
    assert 'parameters' in capsys.readouterr().out


def test_a_backend_on_one_process(data_folder, tmp_path, capsys):
    code, message, recorded = run(data_folder, tmp_path, backend='gloo')
    assert (code, message) == (0, '') and recorded['backend'] == 'auto'
    assert 'note: backend=gloo: not used with one process' in capsys.readouterr().err


@pytest.mark.parametrize(
    'text, options, dropped',
    [
        ('muon_qkv = "split"', {'optimizer': 'adamw'}, 'muon_qkv=split'),
        ('schedule = "wsd"\nwsd_decay = 0.1', {'schedule': 'cosine'}, 'wsd_decay=0.1'),
        ('scalar_lr_mult = 2.0', {'update': 'gd'}, 'scalar_lr_mult=2.0'),
        ('mu_init = 0.9\nbeta_init = 0.9', {'update': 'gd'}, 'beta_init=0.9, mu_init=0.9'),
        ('velocity_init = "zero"', {'update': 'gd'}, 'velocity_init=zero'),
        ('pos = "rope"\nrope_base = 500.0', {'pos': 'learned'}, 'rope_base=500.0'),
        ('zero = True', {}, 'zero=True'),
        ('parallel = "fsdp"\nsave_sharded = True', {}, 'parallel=fsdp, save_sharded=True'),
        ('save_sharded = True', {'parallel': 'ddp'}, 'save_sharded=True'),
        ('wandb_project = "mine"\nwandb_run_name = "a"', {}, 'wandb_project=mine'),
    ],
)
def test_what_a_file_sets_and_the_run_cannot_use_is_dropped(
    data_folder, tmp_path, capsys, text, options, dropped
):
    code, message, _ = run(data_folder, tmp_path, config(tmp_path, text), **options)
    assert (code, message) == (0, '')
    assert f'note: {dropped}' in capsys.readouterr().err
    # the same, typed
    typed = dict(line.replace('"', '').split(' = ') for line in text.splitlines())
    code, message, _ = run(data_folder, tmp_path / 'typed', **{**typed, **options})
    assert code == 2 and 'no effect' in message and not (tmp_path / 'typed').exists()


def test_overwrite_in_a_file_does_not_stop_a_resume(data_folder, tmp_path, capsys):
    path = config(tmp_path, 'overwrite = True')
    assert run(data_folder, tmp_path, path)[0] == 0
    assert run(data_folder, tmp_path, path, init_from='resume', max_iters=2)[0] == 0
    assert 'note: overwrite=True' in capsys.readouterr().err
    code, message, _ = run(data_folder, tmp_path, init_from='resume', overwrite=True, max_iters=3)
    assert code == 2 and 'overwrite=True has no effect with init_from=resume' in message


def test_a_sharded_run_is_continued_by_one_process(data_folder, tmp_path, capsys):
    """Its checkpoint says parallel=fsdp, which nobody typed."""
    assert train(data_folder, tmp_path / 'out', max_iters=1).code == 0
    path = tmp_path / 'out' / 'ckpt.pt'
    state = start.checkpoint.read(path)
    state['train_config'] |= {'parallel': 'fsdp', 'save_sharded': True}
    digest = start.checkpoint.digest(state)
    path.unlink()  # it is mapped into memory
    torch.save(state | {'digest': digest}, path)
    code, message, recorded = run(data_folder, tmp_path, init_from='resume', max_iters=2)
    assert (code, message) == (0, '') and recorded['parallel'] == 'ddp'
    assert 'note: parallel=fsdp, save_sharded=True' in capsys.readouterr().err


# ---- sample.py: nanoGPT's files hold no tokenizer


@pytest.fixture
def nanogpt_file(tmp_path):
    """A checkpoint of nanoGPT with as many entries as the data folder has characters."""
    model = fresh(update='gd', vocab_size=13, block_size=8)
    sizes = ('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size', 'dropout', 'bias')
    arguments_of_model = {name: getattr(model.cfg, name) for name in sizes}
    path = tmp_path / 'nanogpt.pt'
    torch.save({'model': model.state_dict(), 'model_args': arguments_of_model}, path)
    return path


def test_a_tokenizer_from_a_data_folder(nanogpt_file, data_folder, capsys):
    options = {'start': 'abc', 'num_samples': 1, 'max_new_tokens': 4, 'device': 'cpu'}
    options |= {'init_from': nanogpt_file}
    code, message = call(sample.main, arguments(options))
    assert code == 2 and '--dataset=FOLDER' in message and 'vocab_size=13' in message
    assert call(sample.main, arguments({**options, 'dataset': data_folder})) == (0, '')
    assert capsys.readouterr().out.startswith('abc')


def test_a_checkpoint_keeps_its_own_tokenizer(finished, data_folder, tmp_path):
    options = {'out_dir': finished, 'start': 'abc', 'num_samples': 1, 'max_new_tokens': 4}
    assert call(sample.main, arguments({**options, 'dataset': data_folder})) == (0, '')
    other = tmp_path / 'other'
    other.mkdir()
    meta = json.loads((data_folder / 'meta.json').read_text(encoding='utf-8'))
    meta['tokenizer']['chars'] = meta['tokenizer']['chars'][::-1]
    (other / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
    code, message = call(sample.main, arguments({**options, 'dataset': other}))
    assert code == 2 and 'another tokenizer' in message


def test_a_data_folder_that_is_missing(nanogpt_file, tmp_path):
    options = {'init_from': nanogpt_file, 'dataset': os.fspath(tmp_path / 'none')}
    with pytest.raises(UserError, match='none'):
        sample.main(arguments(options))
