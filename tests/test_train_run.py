"""A run of train.py: what it learns, records and saves, and that all runs read the same data."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
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
    contents,
    essence,
    is_evaluation,
    is_training,
    metrics,
    records,
    train,
    write_data,
)

import train as script
from model import GPT, SCHEMES
from nanonag import checkpoint
from nanonag.checkpoint import read

# what it learns and records


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
def test_max_iters_is_the_number_of_updates(max_iters, data_folder, tmp_path, at_step):
    steps = []
    at_step(steps.append)
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
    assert 'a step: 3 sequences x 5 micro-steps x 1 processes x 16 tokens = 240 tokens' in told
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
                             (sample, ['--start=na', '--temperature=9', '--max_new_tokens=40',
                                       '--device=cpu'])):
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


def test_a_world_size_without_a_rank_is_one_process(data_folder, tmp_path, monkeypatch):
    """Only torchrun's RANK makes a process one of several; a stray WORLD_SIZE must not divide the
    batch or the loss."""
    expected = train(data_folder, tmp_path / 'a')
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert metrics(train(data_folder, tmp_path / 'b')) == metrics(expected)


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
    assert read(tmp_path / 'run' / 'ckpt.pt')['wandb_id'] == 'new'
    outcome = train(data_folder, tmp_path / 'run', wandb_log=True, init_from='resume', max_iters=4)
    assert [
        (start['project'], start['name'], start['id'], start['resume']) for start in starts
    ] == [('streams', 'run', None, 'allow'), ('streams', 'run', 'new', 'allow')]
    assert starts[0]['config']['config']['n_embd'] == 16
    assert [record for _, record in logged] == [
        record for record in outcome.records if 'config' not in record
    ]
    assert all(step == record['step'] for step, record in logged)
    assert read(tmp_path / 'run' / 'ckpt.pt')['wandb_id'] == 'new'


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
