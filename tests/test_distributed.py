"""Gloo processes on the CPU under torchrun: the same run as one process, whatever shares the work.

All runs of a world size happen in one launch of a driver, which takes turns in calling train.main;
a launch costs seconds."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, arguments, call, records, run_train, start_train, train

import train as script
from nanonag import checkpoint
from nanonag.checkpoint import read

TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2')
STEPS = dict(
    max_iters=30, eval_interval=10, save_interval=10, keep_last=2, n_layer=2, learning_rate=3e-3
)
SPLIT = {
    1: dict(batch_size=4, gradient_accumulation_steps=2),
    2: dict(batch_size=2, gradient_accumulation_steps=4),
    # of the same 8 sequences, by the number of processes
    4: dict(batch_size=1, gradient_accumulation_steps=8),
}
FAMILIES = {
    f'{update} {optimizer}': dict(update=update, optimizer=optimizer)
    for update, optimizer in itertools.product(
        ('gd', 'lt_nag', 'lt_tmm', 'ngpt'), ('adamw', 'muon')
    )
}
SPLIT_QKV = 'lt_nag split'
FAMILIES[SPLIT_QKV] = dict(update='lt_nag', optimizer='muon', muon_qkv='split')
WAYS = {
    'ddp': {},
    'zero': dict(zero=True),
    'fsdp': dict(parallel='fsdp'),
    'sharded': dict(parallel='fsdp', save_sharded=True, activation_checkpointing=True),
}
CELLS = [
    (family, way, processes)
    for family in FAMILIES
    for way in WAYS
    for processes in (2, 4)
    if way != 'sharded' or family in ('lt_nag muon', 'ngpt adamw')
]
SHARDED = ('lt_nag muon', 'sharded', 2)
DROPOUT = dict(update='gd', dropout=0.2, max_iters=6, eval_interval=3, save_interval=3, **SPLIT[2])


def drive():
    """What each process of the launch does: the runs of a JSON list, one after the other in one
    process group."""
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
        out_dir = next(
            argument for argument in argv if argument.startswith('--out_dir=')
        ).partition('=')[2]
        # a shard otherwise
        weights = '' if '--parallel=fsdp' in argv else checkpoint.digest(now['model'].state_dict())
        with open(f'{out_dir}/rank{rank}.json', 'w') as file:
            json.dump({'code': code, 'message': message, 'weights': weights}, file)
    assert not torch.distributed.is_initialized()


def launch(folder, processes, runs):
    """Drives the runs, a list of (options, step at which rank 1 is sent a signal or None), in that
    many processes."""
    path = folder / f'runs{processes}.json'
    path.write_text(
        json.dumps([(arguments({**SMALL, **STEPS, **options}), stop) for options, stop in runs])
    )
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        f'--nproc_per_node={processes}',
        __file__,
        path,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)},
    )
    try:
        _, stderr = process.communicate(timeout=400)
    finally:
        # it hangs; torchrun ends the ranks, after half a minute by force
        if process.returncode is None:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, stderr[:3000]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('distributed')


@pytest.fixture(scope='module')
def alone(folder, data_folder):
    """{family: folder} of one process's runs."""
    for family, chosen in FAMILIES.items():
        assert train(data_folder, folder / family, **STEPS, **SPLIT[1], **chosen).code == 0
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope='module')
def shared(folder, data_folder, alone):
    """{(family, way, processes): folder}, and some more runs of two processes by a name."""
    folders = {cell: folder / ' '.join(map(str, cell)) for cell in CELLS}
    for processes in (2, 4):
        runs = [
            (
                {
                    'dataset': data_folder,
                    'out_dir': folders[cell],
                    **SPLIT[processes],
                    **FAMILIES[cell[0]],
                    **WAYS[cell[1]],
                },
                None,
            )
            for cell in CELLS
            if cell[2] == processes
        ]
        if processes == 2:
            for name in ('from one', 'dropout', 'stopped'):
                folders[name] = folder / f'two {name}'
            shutil.copytree(alone['lt_nag adamw'], folders['from one'])
            shutil.move(folders['from one'] / 'ckpt-00000010.pt', folders['from one'] / 'ckpt.pt')
            base = {'dataset': data_folder, **SPLIT[2]}
            runs += [
                (
                    {
                        **base,
                        'out_dir': folders['from one'],
                        'update': 'lt_nag',
                        'optimizer': 'adamw',
                        'init_from': 'resume',
                    },
                    None,
                ),
                ({**base, 'out_dir': folders['dropout'], **DROPOUT}, None),
                ({**base, 'out_dir': folders['stopped'], **DROPOUT}, 3),
                ({**base, 'out_dir': folders['stopped'], **DROPOUT, 'init_from': 'resume'}, None),
            ]
        else:  # after the two processes' launch
            folders['two to four'] = folder / 'two to four'
            shutil.copytree(folders[SHARDED], folders['two to four'])
            shutil.move(
                folders['two to four'] / 'ckpt-00000010.pt', folders['two to four'] / 'ckpt.pt'
            )
            runs += [
                (
                    {
                        **runs[0][0],
                        **FAMILIES[SHARDED[0]],
                        **WAYS['sharded'],
                        'out_dir': folders['two to four'],
                        'init_from': 'resume',
                    },
                    None,
                )
            ]
        launch(folder, processes, runs)
    return folders


def numbers(folder, *keys):
    return [record[key] for record in records(folder) for key in keys if key in record]


def ranks(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob('rank*.json'))]


@pytest.mark.parametrize('cell', CELLS, ids=lambda cell: ' '.join(map(str, cell)))
def test_many_processes_train_as_one(shared, alone, cell):
    """30 steps in other micro-batches: losses and evaluations of one process's run, to 1e-5.

    A loss divided by the global count of micro-batches, or a rank reading the other's data, shows
    at the first step."""
    one, many = alone[cell[0]], shared[cell]
    assert [result['code'] for result in ranks(many)] == [0] * cell[2]
    for keys, tolerance in (
        (('loss',), 1e-5),
        (('train_loss', 'val_loss'), 1e-5),
        (('grad_norm',), 1e-3),
    ):
        expected = numbers(one, *keys)
        assert len(expected) >= 6 and numbers(many, *keys) == pytest.approx(
            expected, rel=tolerance
        ), keys
    assert numbers(many, 'loss')[0] == pytest.approx(numbers(one, 'loss')[0], rel=1e-6)
    a, b = (read(folder / 'ckpt.pt')['model'] for folder in (one, many))
    assert all((a[key] - b[key]).norm() <= 1e-3 * a[key].norm() for key in a)


def test_all_processes_end_with_the_same_weights(shared):
    for name, folder in shared.items():
        if not {'fsdp', 'sharded'} & set(name) and name != 'two to four':
            weights = {result['weights'] for result in ranks(folder)}
            assert weights == {checkpoint.digest(read(folder / 'ckpt.pt')['model'])}, name


@pytest.mark.parametrize('cell', CELLS, ids=lambda cell: ' '.join(map(str, cell)))
def test_one_process_writes(shared, cell):
    """Each record once, and files of rank 0 only, but for shards."""
    assert [record['step'] for record in records(shared[cell]) if 'loss' in record] == list(
        range(1, 31)
    )
    held = {path.name for path in shared[cell].iterdir() if not path.name.startswith('rank')}
    assert held == {
        'best.pt',
        'ckpt-00000010.pt',
        'ckpt-00000020.pt',
        'ckpt.pt',
        'lock',
        'metrics.jsonl',
    } | ({f'shards-000000{step}' for step in (10, 20, 30)} if cell[1] == 'sharded' else set())


def test_another_number_of_processes_reads_on_in_the_same_order(shared, alone):
    """One process to step 10, then two, and other micro-batches: the losses of the run that went on
    as one."""
    expected = numbers(alone['lt_nag adamw'], 'loss', 'val_loss')
    assert numbers(shared['from one'], 'loss', 'val_loss') == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    'cell',
    [cell for cell in CELLS if cell[1] != 'ddp' or cell[0] == 'lt_nag adamw'],
    ids=lambda cell: ' '.join(map(str, cell)),
)
def test_one_process_goes_on_from_many(shared, cell, data_folder, tmp_path):
    """A checkpoint is whole, whoever held the weights and the optimizer's state."""
    shutil.copy(shared[cell] / 'ckpt-00000020.pt', tmp_path / 'ckpt.pt')
    shutil.copy(shared[cell] / 'metrics.jsonl', tmp_path)
    if cell[1] == 'sharded':
        shutil.copytree(shared[cell] / 'shards-00000020', tmp_path / 'shards-00000020')
    options = {
        **STEPS,
        **SPLIT[1],
        **FAMILIES[cell[0]],
        'init_from': 'resume',
        'zero': False,
        'parallel': 'ddp',
        'save_sharded': False,
    }
    assert train(data_folder, tmp_path, **options).code == 0
    assert numbers(tmp_path, 'loss', 'val_loss') == pytest.approx(
        numbers(shared[cell], 'loss', 'val_loss'), rel=1e-5
    )


def test_shards_of_two_processes_are_resumed_by_four(shared):
    assert [
        record['world_size'] for record in records(shared['two to four']) if 'config' in record
    ] == [2, 4]
    assert numbers(shared['two to four'], 'loss', 'val_loss') == pytest.approx(
        numbers(shared[SHARDED], 'loss', 'val_loss'), rel=1e-5
    )


def test_a_sharded_runs_best_weights_are_read_like_any(shared):
    state = read(shared[SHARDED] / 'best.pt')
    assert 'optimizer' not in state and state['step'] == 30
    whole = read(shared['lt_nag muon', 'fsdp', 2] / 'best.pt')['model']
    assert state['model'].keys() == whole.keys() and all(
        torch.allclose(w, whole[name], atol=1e-5) for name, w in state['model'].items()
    )


def test_two_torchrun_nodes_train_as_one(alone, data_folder, tmp_path):
    with socket.socket() as found:
        found.bind(('localhost', 0))
        port = found.getsockname()[1]
    node = (
        '-m',
        'torch.distributed.run',
        '--nnodes=2',
        '--nproc_per_node=1',
        '--rdzv_backend=c10d',
        '--rdzv_id=1',
        f'--rdzv_endpoint=localhost:{port}',
        '--local_addr=localhost',
    )
    nodes = [
        start_train(data_folder, tmp_path, node, **STEPS, **SPLIT[2], **FAMILIES['gd adamw'])
        for _ in range(2)
    ]
    for process in nodes:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr[:3000]
    assert records(tmp_path)[0]['world_size'] == 2
    assert numbers(tmp_path, 'loss', 'val_loss') == pytest.approx(
        numbers(alone['gd adamw'], 'loss', 'val_loss'), rel=1e-5
    )


def test_a_signal_to_one_process_stops_all_and_resumes_bitwise(shared):
    """Rank 1 got a SIGTERM at its step 3; both saved it; going on gives the uninterrupted run,
    dropout included."""
    whole, stopped = (read(shared[name] / 'ckpt.pt') for name in ('dropout', 'stopped'))
    for key in ('model', 'optimizer', 'rng', 'step'):
        assert checkpoint.digest(whole[key]) == checkpoint.digest(stopped[key]), key
    assert [record['step'] for record in records(shared['stopped']) if 'config' in record] == [0, 4]
    assert numbers(shared['stopped'], 'loss') == numbers(shared['dropout'], 'loss')


def test_each_process_draws_its_own_dropout(shared):
    rng = read(shared['dropout'] / 'ckpt.pt')['rng']
    assert len(rng) == 2 and not torch.equal(rng[0][0], rng[1][0])


def test_a_mistake_is_told_once(data_folder, tmp_path):
    code, stdout, stderr, _ = run_train(
        data_folder, tmp_path / 'out', TORCHRUN, gradient_accumulation_steps=5
    )
    assert code != 0 and not (tmp_path / 'out').exists()
    lines = [line for line in (stdout + stderr).splitlines() if line.startswith('error:')]
    assert (
        len(lines) == 1
        and 'gradient_accumulation_steps=5' in lines[0]
        and '2 processes' in lines[0]
    )


if __name__ == '__main__':
    drive()
