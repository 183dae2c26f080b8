"""Two gloo processes on the CPU under torchrun: the same run as one process, whatever shares the work.

All runs happen in one launch of a driver, which takes turns in calling train.main; a launch costs seconds.
"""
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import checkpoint
import train as script
from checkpoint import read
from conftest import ROOT, SMALL, arguments, call, records, run_train, train

TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2')
STEPS = dict(max_iters=20, eval_interval=10, save_interval=10, n_layer=2, gradient_accumulation_steps=4, batch_size=2,
             learning_rate=3e-3)
FAMILIES = {'gd': dict(update='gd', optimizer='adamw'), 'lt_nag': dict(update='lt_nag', optimizer='adamw'),
            'ngpt': dict(update='ngpt', optimizer='adamw'), 'muon': dict(update='lt_nag', optimizer='muon'),
            'muon split': dict(update='gd', optimizer='muon', muon_qkv='split')}
SHARED = {'zero': dict(update='lt_nag', optimizer='adamw', zero=True),
          'zero muon': dict(update='lt_nag', optimizer='muon', zero=True),
          'fsdp': dict(update='lt_nag', optimizer='adamw', parallel='fsdp'),
          'fsdp muon': dict(update='lt_nag', optimizer='muon', parallel='fsdp'),
          'fsdp ngpt': dict(update='ngpt', optimizer='adamw', parallel='fsdp')}
ALONE = {name: f'one {name}' for name in FAMILIES} | {
    'zero': 'one lt_nag', 'zero muon': 'one muon', 'fsdp': 'one lt_nag', 'fsdp muon': 'one muon',
    'fsdp ngpt': 'one ngpt'}
DROPOUT = dict(update='gd', dropout=0.2, max_iters=6, eval_interval=3, save_interval=3)


def drive():
    """What each process of the launch does: the runs of a JSON list, one after the other in one process group."""
    rank, now = os.environ['RANK'], {}
    with open(sys.argv[1]) as file:
        runs = json.load(file)
    torch.distributed.init_process_group('gloo')
    stop, multiplier, make = script.runtime.stop, script.lr_multiplier, script.configure_optimizer

    def signalling(step, cfg):
        if step == now['stop_at'] and rank == '1':
            os.kill(os.getpid(), signal.SIGTERM)  # one process only; the other has to learn of it
        return multiplier(step, cfg)

    def watched(model, *args):
        now['model'] = model
        return make(model, *args)
    script.lr_multiplier, script.configure_optimizer = signalling, watched
    for i, (argv, now['stop_at']) in enumerate(runs):
        torch.distributed.barrier()  # rank 0 is done with its files
        script.runtime.stop = stop if i == len(runs) - 1 else lambda: None
        code, message = call(script.main, argv)
        out_dir = next(argument for argument in argv if argument.startswith('--out_dir=')).partition('=')[2]
        weights = '' if '--parallel=fsdp' in argv else checkpoint.digest(now['model'].state_dict())  # a shard otherwise
        with open(f'{out_dir}/rank{rank}.json', 'w') as file:
            json.dump({'code': code, 'message': message, 'weights': weights}, file)
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope='module')
def runs(data_folder, tmp_path_factory):
    """{name: folder} of all runs, of one process ('one NAME') and of two ('two NAME')."""
    folder = tmp_path_factory.mktemp('distributed')
    folders = {}

    def options(name, **chosen):
        folders[name] = folder / name
        return {**SMALL, **STEPS, 'dataset': data_folder, 'out_dir': folders[name], **chosen}
    for name, chosen in FAMILIES.items():
        assert call(script.main, arguments(options(f'one {name}', **chosen)))[0] == 0
    shutil.copytree(folders['one lt_nag'], folder / 'two from one')
    shutil.move(folder / 'two from one' / 'ckpt-00000010.pt', folder / 'two from one' / 'ckpt.pt')
    launch = [(options(f'two {name}', **chosen), None) for name, chosen in (FAMILIES | SHARED).items()]
    launch += [(options('two from one', init_from='resume', batch_size=4, gradient_accumulation_steps=2), None),
               (options('two dropout', **DROPOUT), None), (options('two stopped', **DROPOUT), 3),
               (options('two stopped', **DROPOUT, init_from='resume'), None)]
    (folder / 'runs.json').write_text(json.dumps([(arguments(chosen), stop) for chosen, stop in launch]))
    process = subprocess.Popen([sys.executable, *TORCHRUN, __file__, folder / 'runs.json'], cwd=ROOT, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)})
    try:
        _, stderr = process.communicate(timeout=110)
    finally:
        if process.returncode is None:  # it hangs; torchrun ends the ranks, after half a minute by force
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, stderr[:3000]
    return folders


def numbers(folder, *keys):
    return [record[key] for record in records(folder) for key in keys if key in record]


def ranks(folder):
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in (0, 1)]


@pytest.mark.parametrize('name', [*FAMILIES, *SHARED])
def test_two_processes_train_as_one(runs, name):
    """20 steps with 2 x 2 micro-batches: losses, gradient norms and evaluations of the run with 4 micro-batches.

    A loss divided by the global count of micro-batches, or a rank reading the other's data, shows at the first step.
    """
    one, two = runs[ALONE[name]], runs[f'two {name}']
    assert [result['code'] for result in ranks(two)] == [0, 0]
    tolerance = 1e-3 if 'muon' in name else 1e-5  # five Newton-Schulz steps enlarge the last bits' differences
    for keys in (('loss',), ('grad_norm',), ('train_loss', 'val_loss')):
        expected = numbers(one, *keys)
        assert len(expected) >= 6 and numbers(two, *keys) == pytest.approx(expected, rel=tolerance), keys
    assert numbers(two, 'loss')[0] == pytest.approx(numbers(one, 'loss')[0], rel=1e-6)
    a, b = (read(folder / 'ckpt.pt')['model'] for folder in (one, two))
    assert all((a[key] - b[key]).norm() <= 100 * tolerance * a[key].norm() for key in a)


def test_all_processes_end_with_the_same_weights(runs):
    for name, folder in runs.items():
        if name.startswith('two') and 'fsdp' not in name:
            weights = [result['weights'] for result in ranks(folder)]
            assert weights[0] == weights[1] == checkpoint.digest(read(folder / 'ckpt.pt')['model']), name


def test_one_process_writes(runs):
    """Each record once, and files of rank 0 only."""
    for name in (*FAMILIES, *SHARED):
        steps = [record['step'] for record in records(runs[f'two {name}']) if 'loss' in record]
        assert steps == list(range(1, 21))
        assert sorted(path.name for path in runs[f'two {name}'].iterdir()) == [
            'best.pt', 'ckpt-00000010.pt', 'ckpt.pt', 'lock', 'metrics.jsonl', 'rank0.json', 'rank1.json']


def test_another_number_of_processes_reads_on_in_the_same_order(runs):
    """One process to step 10, then two, and other micro-batches: the losses of the run that went on as one."""
    expected = numbers(runs['one lt_nag'], 'loss', 'val_loss')
    assert numbers(runs['two from one'], 'loss', 'val_loss') == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize('name', ['lt_nag', *SHARED])
def test_one_process_goes_on_from_two(runs, name, data_folder, tmp_path):
    """A checkpoint is whole, whoever held the optimizer's state."""
    source = runs[f'two {name}']
    shutil.copy(source / 'ckpt-00000010.pt', tmp_path / 'ckpt.pt')
    shutil.copy(source / 'metrics.jsonl', tmp_path)
    options = STEPS | (SHARED | FAMILIES)[name] | {'init_from': 'resume', 'zero': False, 'parallel': 'ddp'}
    outcome = train(data_folder, tmp_path, **options)
    assert outcome.code == 0
    assert numbers(tmp_path, 'loss', 'val_loss') == pytest.approx(numbers(source, 'loss', 'val_loss'),
                                                                  rel=1e-3 if 'muon' in name else 1e-5)


def test_a_signal_to_one_process_stops_all_and_resumes_bitwise(runs):
    """Rank 1 got a SIGTERM at its step 3; both saved it; going on gives the uninterrupted run, dropout included."""
    whole, stopped = (read(runs[name] / 'ckpt.pt') for name in ('two dropout', 'two stopped'))
    for key in ('model', 'optimizer', 'rng', 'step'):
        assert checkpoint.digest(whole[key]) == checkpoint.digest(stopped[key]), key
    assert [record['step'] for record in records(runs['two stopped']) if 'config' in record] == [0, 4]
    assert numbers(runs['two stopped'], 'loss') == numbers(runs['two dropout'], 'loss')


def test_each_process_draws_its_own_dropout(runs):
    rng = read(runs['two dropout'] / 'ckpt.pt')['rng']
    assert len(rng) == 2 and not torch.equal(rng[0][0], rng[1][0])


def test_a_mistake_is_told_once(data_folder, tmp_path):
    code, stdout, stderr, _ = run_train(data_folder, tmp_path / 'out', TORCHRUN, gradient_accumulation_steps=5)
    assert code != 0 and not (tmp_path / 'out').exists()
    lines = [line for line in (stdout + stderr).splitlines() if line.startswith('error:')]
    assert len(lines) == 1 and 'gradient_accumulation_steps=5' in lines[0] and '2 processes' in lines[0]


if __name__ == '__main__':
    drive()
