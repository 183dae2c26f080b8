"""Sharded checkpoints, on a process group of one: what is refused, what a failure leaves behind."""

import json
import shutil
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import call, fresh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint as script
from nanonag import checkpoint, parallel
from nanonag.checkpoint import Saver, read, read_latest
from nanonag.checkpoint import saver as saver_module
from nanonag.checkpoint import shards as sharded
from nanonag.cli import UserError
from nanonag.optim import configure_optimizer
from nanonag.runtime import Runtime
from train import TrainConfig


@pytest.fixture(scope='module')
def group():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend='gloo')
    dist.destroy_process_group()


def state(model, optimizer, step):
    return {
        'version': checkpoint.VERSION,
        'model': model.state_dict(),
        'gpt_config': {},
        'step': step,
        'best_val_loss': 1.0,
        'tokenizer': {},
        'optimizer': optimizer.state_dict(gather=False),
        'train_config': {},
    }


def trained(**options):
    """A sharded model, its optimizer after a step, and the same weights whole."""
    model = fresh(update='lt_nag', **options)
    parallel.shard(model, Runtime(torch.device('cpu'), torch.float32))
    optimizer = configure_optimizer(model, TrainConfig().resolve(False))
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))[1].backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(group, tmp_path):
    """(folder with a sharded checkpoint of step 1 and one of step 2, the weights of step 2)."""
    model, optimizer = trained()
    saver = Saver(tmp_path, keep_last=1, group=group)
    for step in (1, 2):
        with torch.no_grad():
            model.transformer.wte.weight.add_(1.0)
        saver.save(state(model, optimizer, step), best=step == 1)
        assert saver.wait()
    return tmp_path, {name: w.full_tensor().clone() for name, w in model.state_dict().items()}


def test_shards_are_read_as_one_dict(saved):
    folder, weights = saved
    found = read(folder / 'ckpt.pt')
    assert found['step'] == 2 and all(
        torch.equal(w, weights[name]) for name, w in found['model'].items()
    )
    assert all(
        isinstance(value, torch.Tensor)
        for values in found['optimizer'].values()
        for value in values.values()
    )
    assert read(folder / 'best.pt')['step'] == 1 and 'optimizer' not in read(folder / 'best.pt')


def test_loading_in_place_gives_the_same_numbers(saved):
    folder, weights = saved
    model, optimizer = trained()
    found = read_latest(folder, whole=False)
    assert all(w is None for w in found['model'].values())
    optimizer.load_state_dict(found['optimizer'])
    sharded.load(folder, found, model, optimizer)
    assert all(
        torch.equal(w.full_tensor(), weights[name]) for name, w in model.state_dict().items()
    )
    expected = read(folder / 'ckpt.pt')['optimizer']
    assert checkpoint.digest(optimizer.state_dict()) == checkpoint.digest(expected)


def test_shards_that_nothing_names_are_deleted(saved, group):
    folder, _ = saved
    assert [path.name for path in sharded.folders(folder)] == ['shards-00000001', 'shards-00000002']
    model, optimizer = trained()
    saver = Saver(folder, keep_last=1, last_step=2, group=group)
    for step in (3, 4):
        saver.save(state(model, optimizer, step))
        assert saver.wait()
    # 1: best.pt's
    assert [path.name for path in sharded.folders(folder)] == [
        'shards-00000001',
        'shards-00000003',
        'shards-00000004',
    ]


def test_a_best_written_late_keeps_the_newest_shards(saved, group, monkeypatch, capsys):
    """The best.pt of step 3 fails and is written by the save of step 4.

    At that moment ckpt.pt does not name the shards of step 4 yet.
    """
    folder, _ = saved
    model, optimizer = trained()
    saver, replace = Saver(folder, keep_last=1, last_step=2, group=group), saver_module.os.replace

    def failing(source, target):
        if target.name == 'best.pt':
            raise OSError(28, 'No space left on device')
        replace(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(saver_module.os, 'replace', failing)
        saver.save(state(model, optimizer, 3), best=True)
        assert not saver.wait()
    saver.save(state(model, optimizer, 4))
    assert (
        saver.wait()
        and read(folder / 'ckpt.pt')['step'] == 4
        and read(folder / 'best.pt')['step'] == 3
    )


def shard(folder):
    return next((folder / 'shards-00000002').glob('*.safetensors'))


def flip(folder):
    data = bytearray(shard(folder).read_bytes())
    data[-7] ^= 1
    shard(folder).write_bytes(data)


DAMAGE = {
    'a flipped bit': flip,
    'cut off': lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-9]),
    'a shard gone': lambda folder: shard(folder).unlink(),
    'all gone': lambda folder: shutil.rmtree(folder / 'shards-00000002'),
    'one too many': lambda folder: shutil.copy(
        shard(folder), folder / 'shards-00000002' / 'more.safetensors'
    ),
    'not a shard': lambda folder: shard(folder).write_bytes(b'x' * 100),
}


@pytest.mark.parametrize('whole', [True, False])
@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_shard_falls_back_to_the_checkpoint_before(damage, whole, saved, capsys):
    folder, _ = saved
    DAMAGE[damage](folder)
    assert read_latest(folder, whole)['step'] == 1
    assert 'falling back' in capsys.readouterr().err


@pytest.mark.parametrize(
    'shards',
    [
        None,
        [],
        {'folder': '../elsewhere', 'files': {}},
        {'folder': 'shards-00000002'},
        {'folder': 3, 'files': 4},
        {'folder': 'shards-00000002', 'files': {'../x.safetensors': ''}},
    ],
)
def test_names_that_lead_elsewhere_are_refused(shards, saved):
    folder, _ = saved
    content = checkpoint.load(folder / 'ckpt.pt') | {'shards': shards}
    content['digest'] = checkpoint.digest(content)
    torch.save(content, folder / 'hostile.pt')
    with pytest.raises(UserError, match='not readable as the shards|holds no usable `shards`'):
        read(folder / 'hostile.pt')


def test_a_dict_that_names_other_tensors_than_its_shards_is_refused(saved):
    folder, _ = saved
    content = checkpoint.load(folder / 'ckpt.pt')
    content['model'] = content['model'] | {'another': None}
    content['digest'] = checkpoint.digest(content)
    torch.save(content, folder / 'hostile.pt')
    with pytest.raises(UserError, match='lack'):
        read(folder / 'hostile.pt')


def test_another_architecture_does_not_take_the_shards(saved):
    folder, _ = saved
    model, optimizer = trained(n_embd=32)
    with pytest.raises(UserError, match='not the shards of this run'):
        sharded.load(folder, read_latest(folder, whole=False), model, optimizer)


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), RuntimeError('lost')])
@pytest.mark.parametrize('where', ['write_data', 'load_file'])
def test_a_failed_write_leaves_the_last_checkpoint_and_is_tried_again(
    where, error, saved, group, monkeypatch, capsys
):
    folder, weights = saved
    model, optimizer = trained()
    saver = Saver(folder, keep_last=1, last_step=2, group=group)

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(
            sharded if where == 'load_file' else sharded.dcp.HuggingFaceStorageWriter, where, fail
        )
        saver.save(state(model, optimizer, 3))
        assert not saver.wait()
    assert 'NOT saved' in capsys.readouterr().err
    assert all(
        torch.equal(w, weights[name]) for name, w in read(folder / 'ckpt.pt')['model'].items()
    )
    saver.save(state(model, optimizer, 4))
    assert saver.wait() and read(folder / 'ckpt.pt')['step'] == 4


def test_weights_that_are_not_finite_are_not_saved(saved, group, capsys):
    folder, _ = saved
    model, optimizer = trained()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(float('inf'))
    saver = Saver(folder, last_step=2, group=group)
    saver.save(state(model, optimizer, 3))
    assert not saver.wait() and read(folder / 'ckpt.pt')['step'] == 2


def write_on_rank(rank, folder):
    """Writes a tensor that is infinite on rank 0 only; every rank stores what it raised."""
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2)
    weight = torch.ones(4, 2)
    weight[0, 0] = float('inf')
    mesh = init_device_mesh('cpu', (2,))
    tensors = {'model.w': distribute_tensor(weight, mesh, [Shard(0)])}
    # A deadlock would last for this time.
    group = dist.new_group(backend='gloo', timeout=timedelta(seconds=60))
    try:
        sharded.write(folder / 'shards-00000001', tensors, group)
    except Exception as error:
        (folder / f'{rank}.txt').write_text(repr(error))
    dist.destroy_process_group()


def test_weights_that_are_not_finite_on_one_rank_fail_on_all_at_once(tmp_path):
    torch.multiprocessing.spawn(write_on_rank, (tmp_path,), 2)
    for rank in range(2):
        told = (tmp_path / f'{rank}.txt').read_text()
        assert told == repr(OSError('the weights are not finite'))


def test_a_shard_holds_no_code(saved):
    """Not even in the library's own metadata file, which would be a pickle."""
    folder, _ = saved
    for path in (folder / 'shards-00000002').iterdir():
        length = int.from_bytes(path.read_bytes()[:8], 'little')
        assert path.suffix == '.safetensors' and json.loads(path.read_bytes()[8 : 8 + length])


def test_one_file_of_shards(saved, tmp_path):
    folder, weights = saved
    content = checkpoint.load(folder / 'ckpt.pt')
    assert call(script.main, [folder / 'ckpt.pt', tmp_path / 'whole.pt'])[0] == 0
    shutil.rmtree(folder / 'shards-00000002')
    whole = read(tmp_path / 'whole.pt')
    assert 'shards' not in whole and whole.keys() | {'shards'} == content.keys()
    assert all(torch.equal(w, weights[name]) for name, w in whole['model'].items())


@pytest.mark.parametrize(
    'argv, message',
    [
        ([], 'no arguments'),
        (['a'], 'SOURCE TARGET'),
        (['--help', 'b'], 'SOURCE TARGET'),
        (['none.pt', 'b.pt'], 'no such checkpoint'),
        (['none.pt', __file__], 'exists'),
    ],
)
def test_mistakes_in_making_one_file(argv, message):
    code, text = call(script.main, argv)
    assert code == 2 and message in text
