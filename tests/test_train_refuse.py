"""What train.py refuses: contradictions and mistakes, before anything is written."""

import json
import re
import shutil

import pytest
import torch
from conftest import arguments, call, contents, fresh, run_train, train, write_data

import start
import train as script
from nanonag import checkpoint

# the resume of another run


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


@pytest.mark.parametrize('init_from', ['resume', 'auto'])
def test_other_data_is_refused_on_resume(init_from, finished, tmp_path):
    other, before = write_data(tmp_path / 'other', seed=9), contents(finished)
    outcome = train(other, finished, init_from=init_from, max_iters=9)
    assert (
        outcome.code == 2
        and 'not the data of the run' in outcome.message
        and contents(finished) == before
    )


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


def test_max_iters_below_the_checkpoints_step(data_folder, tmp_path):
    assert train(data_folder, tmp_path / 'run', max_iters=3).code == 0
    assert train(data_folder, tmp_path / 'run', init_from='resume', max_iters=2).code == 2


# the loss of an old run


@pytest.mark.parametrize('name', ['ckpt.pt', 'best.pt', 'metrics.jsonl'])
def test_a_new_run_does_not_delete_an_old_one(name, data_folder, tmp_path):
    (tmp_path / name).write_text('{}')
    outcome = train(data_folder, tmp_path)
    assert outcome.code == 2 and name in outcome.message and '--overwrite' in outcome.message
    assert [path.name for path in tmp_path.iterdir()] == [name] and (
        tmp_path / name
    ).read_text() == '{}'


def test_a_fresh_start_spares_older_checkpoints(data_folder, tmp_path):
    (tmp_path / 'ckpt-00000003.pt').write_bytes(b'all that is left of a run')
    assert train(data_folder, tmp_path, max_iters=2).code == 2
    assert (tmp_path / 'ckpt-00000003.pt').exists()


def test_two_starts_in_one_folder(data_folder, tmp_path):
    """The second is told so before it can touch the first one's files."""
    assert train(data_folder, tmp_path, max_iters=2).code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert train(data_folder, tmp_path, max_iters=2).code == 2
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_an_out_dir_that_cannot_be_written(data_folder, tmp_path):
    (tmp_path / 'file').write_text('')
    outcome = train(data_folder, tmp_path / 'file' / 'run', max_iters=2)
    assert outcome.code == 2 and 'cannot be written' in outcome.message


# mistakes


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
        (dict(update='gd', scalar_lr_mult=2), 'scalar_lr_mult=2.0 has no effect with update=gd'),
        (dict(update='ngpt', scalar_lr_mult=2), 'scalar_lr_mult'),
        (dict(wandb_project='x'), 'wandb_project=x'),
        (dict(wandb_run_name='x'), 'wandb_run_name=x'),
        (dict(decay_lr=False, schedule='wsd'), 'schedule=wsd has no effect with decay_lr=False'),
        (dict(warmup_iters=3, lr_decay_iters=2), 'warmup_iters=3, lr_decay_iters=2'),
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
    'accumulation, processes, nearest', [(2, 4, 4), (5, 2, 4), (40, 16, 32), (41, 8, 40)]
)
def test_accumulation_must_divide_among_the_processes(
    accumulation, processes, nearest, data_folder, tmp_path, monkeypatch
):
    variables = {'RANK': '0', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': '29500'}
    for name, value in {**variables, 'WORLD_SIZE': str(processes)}.items():
        monkeypatch.setenv(name, value)
    outcome = train(data_folder, tmp_path / 'out', gradient_accumulation_steps=accumulation)
    assert outcome.code == 2 and not (tmp_path / 'out').exists()
    assert f'={accumulation} ' in outcome.message and f' {processes} ' in outcome.message
    assert outcome.message.endswith(f': {nearest}')


def test_the_data_decide_which_ids_are_used(data_folder, tmp_path):
    outcome = train(data_folder, tmp_path / 'run', vocab_used=5, max_iters=2)
    assert (
        outcome.code == 2 and 'vocab_used=5' in outcome.message and not (tmp_path / 'run').exists()
    )


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
    gpt2 = fresh(update='gd', vocab_size=50257)
    sizes = {key: getattr(gpt2.cfg, key) for key in ('n_layer', 'n_head', 'n_embd', 'vocab_size')}
    checkpoint = {
        'model': gpt2.state_dict(),
        'gpt_config': {'update': 'gd', 'block_size': gpt2.cfg.block_size, **sizes},
        'tokenizer': {'kind': 'gpt2'},
    }
    monkeypatch.setattr(start, 'pretrained', lambda name: checkpoint)
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


def test_without_wandb_it_says_what_to_install(data_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(script.importlib.util, 'find_spec', lambda name: None)
    outcome = train(data_folder, tmp_path / 'out', wandb_log=True)
    assert (
        outcome.code == 2
        and 'pip install wandb' in outcome.message
        and not (tmp_path / 'out').exists()
    )


def test_a_users_mistake_is_one_line_of_the_program(data_folder, tmp_path):
    code, stdout, stderr, _ = run_train(data_folder, tmp_path / 'out', n_embd=17)
    assert (
        code == 2
        and stdout == ''
        and stderr.startswith('error: n_embd=17')
        and stderr.count('\n') == 1
    )
