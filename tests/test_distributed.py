"""Gloo processes on the CPU: the same run as one process, whatever shares the work.

All runs of a world size happen in one launch of ranks.py. Two processes train every scheme family
with every way to share the work that its weights or its optimizer could break; four, the cases
where shares become uneven: rows of a table, matrices of Muon, scalars."""

import json
import shutil
import socket

import pytest
import torch
from conftest import SMALL, arguments, records, run_train, start_train, train
from ranks import Launcher

from nanonag import checkpoint
from nanonag.checkpoint import read

TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2')
LAST = 6
STEPS = dict(
    max_iters=LAST, eval_interval=2, save_interval=2, keep_last=2, n_layer=2, learning_rate=3e-3
)
SPLIT = {  # of the same 8 sequences, by the number of processes
    1: dict(batch_size=4, gradient_accumulation_steps=2),
    2: dict(batch_size=2, gradient_accumulation_steps=4),
    4: dict(batch_size=1, gradient_accumulation_steps=8),
}
FAMILIES = {
    f'{update} {optimizer}': dict(update=update, optimizer=optimizer)
    for update in ('gd', 'lt_nag', 'lt_tmm', 'ngpt')
    for optimizer in ('adamw', 'muon')
}
FAMILIES['lt_nag split'] = dict(update='lt_nag', optimizer='muon', muon_qkv='split')
WAYS = {
    'ddp': {},
    'zero': dict(zero=True),
    'fsdp': dict(parallel='fsdp'),
    'sharded': dict(parallel='fsdp', save_sharded=True, activation_checkpointing=True),
}
FSDP = ('gd adamw', 'lt_nag muon', 'lt_nag split', 'lt_tmm adamw', 'ngpt adamw', 'ngpt muon')
CELLS = [
    *((family, way, 2) for family in FAMILIES for way in ('ddp', 'zero')),
    *((family, 'fsdp', 2) for family in FSDP),
    *((family, 'sharded', 2) for family in ('lt_nag muon', 'ngpt adamw')),
    *(('lt_nag muon', way, 4) for way in WAYS),
    *(('lt_nag split', way, 4) for way in ('zero', 'fsdp')),
    *(('ngpt adamw', way, 4) for way in ('fsdp', 'sharded')),
    ('gd adamw', 'zero', 4),
]
SHARDED = ('lt_nag muon', 'sharded', 2)
DROPOUT = dict(update='gd', dropout=0.2, max_iters=6, eval_interval=3, save_interval=3, **SPLIT[2])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('distributed')


@pytest.fixture(scope='module')
def alone(folder, data_folder):
    """{family: folder} of one process's runs."""
    for family, options in FAMILIES.items():
        assert train(data_folder, folder / family, **STEPS, **SPLIT[1], **options).code == 0
    return {family: folder / family for family in FAMILIES}


def at_step_2(source, folder):
    """A copy of a finished run that has its checkpoint of step 2 as the last one."""
    shutil.copytree(source, folder)
    shutil.move(folder / 'ckpt-00000002.pt', folder / 'ckpt.pt')


@pytest.fixture(scope='module')
def shared(folder, data_folder, alone):
    """{(family, way, processes): folder}, and some more runs of two or four processes by a name."""
    names = [*CELLS, 'from one', 'dropout', 'stopped', 'two to four']
    folders = {name: folder / f'shared {name}' for name in names}

    def run(name, processes, stop_at=None, **options):
        options = {'dataset': data_folder, 'out_dir': folders[name], **SPLIT[processes], **options}
        return arguments({**SMALL, **STEPS, **options}), stop_at

    def runs_of_cells(processes):
        return [
            run(cell, processes, **FAMILIES[cell[0]], **WAYS[cell[1]])
            for cell in CELLS
            if cell[2] == processes
        ]

    at_step_2(alone['lt_nag adamw'], folders['from one'])
    more = [
        run('from one', 2, init_from='resume', **FAMILIES['lt_nag adamw']),
        run('dropout', 2, **DROPOUT),
        run('stopped', 2, stop_at=3, **DROPOUT),
        run('stopped', 2, init_from='resume', **DROPOUT),
    ]
    with Launcher(folder) as launcher:
        launcher.launch(2, runs_of_cells(2) + more)
        at_step_2(folders[SHARDED], folders['two to four'])
        options = {**FAMILIES[SHARDED[0]], **WAYS['sharded'], 'init_from': 'resume'}
        launcher.launch(4, [*runs_of_cells(4), run('two to four', 4, **options)])
    return folders


def numbers(folder, *keys):
    return [record[key] for record in records(folder) for key in keys if key in record]


def ranks(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob('rank*.json'))]


@pytest.mark.parametrize('cell', CELLS, ids=lambda cell: ' '.join(map(str, cell)))
def test_many_processes_train_as_one(shared, alone, cell):
    """Steps in other micro-batches: losses and evaluations of one process's run, to 2e-6.

    A loss divided by the global count of micro-batches, or a rank reading the other's data, shows
    at the first step."""
    one, many = alone[cell[0]], shared[cell]
    assert [result['code'] for result in ranks(many)] == [0] * cell[2]
    for keys, tolerance in (
        (('loss',), 2e-6),
        (('train_loss', 'val_loss'), 2e-6),
        (('grad_norm',), 1e-5),
    ):
        expected = numbers(one, *keys)
        assert len(expected) >= LAST
        assert numbers(many, *keys) == pytest.approx(expected, rel=tolerance), keys
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
    steps = [record['step'] for record in records(shared[cell]) if 'loss' in record]
    assert steps == list(range(1, LAST + 1))
    names = {path.name for path in shared[cell].iterdir() if not path.name.startswith('rank')}
    expected = {'best.pt', 'ckpt.pt', 'ckpt-00000002.pt', 'ckpt-00000004.pt'}
    expected |= {'lock', 'metrics.jsonl'}
    if cell[1] == 'sharded':
        expected |= {f'shards-0000000{step}' for step in (2, 4, 6)}
    assert names == expected


def test_another_number_of_processes_reads_on_in_the_same_order(shared, alone):
    """One process to step 2, then two, and other micro-batches: the losses of the run that went on
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
    shutil.copy(shared[cell] / 'ckpt-00000004.pt', tmp_path / 'ckpt.pt')
    shutil.copy(shared[cell] / 'metrics.jsonl', tmp_path)
    if cell[1] == 'sharded':
        shutil.copytree(shared[cell] / 'shards-00000004', tmp_path / 'shards-00000004')
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
    assert 'optimizer' not in state and state['step'] == LAST
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
    assert len(lines) == 1
    assert 'gradient_accumulation_steps=5' in lines[0] and '2 processes' in lines[0]
