"""Reading checkpoints: damaged files are refused, hostile ones do no harm, nanoGPT's load."""

import os
import pickle
import re
import zipfile
from dataclasses import asdict

import pytest
import torch
from checkpoint_helpers import names, save, state
from conftest import fresh, nontrivial, tokens, train

from model import GPT, GPTConfig
from nanonag.checkpoint import digest, read
from nanonag.cli import UserError
from start import build_model

# damaged files


def test_one_flipped_byte_anywhere_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole, original = (
        tmp_path / 'ckpt.pt',
        (tmp_path / 'ckpt.pt').read_bytes(),
        digest(state(1)),
    )
    caught = 0
    for place in range(0, len(whole), 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            assert digest(read(path)) == original, place  # padding, which holds nothing
        except UserError:
            caught += 1
    assert caught > 100


def test_one_flipped_bit_of_a_weight_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole = tmp_path / 'ckpt.pt', (tmp_path / 'ckpt.pt').read_bytes()
    with zipfile.ZipFile(path) as archive:
        tensors = [info for info in archive.infolist() if '/data/' in info.filename]
        contents = [archive.read(info) for info in tensors]
    assert len(tensors) > 10
    for content in contents:
        place = whole.index(content) + len(content) // 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r'ckpt\.pt: its contents do not match its digest'):
            read(path)


def test_a_file_cut_off_anywhere_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole = tmp_path / 'ckpt.pt', (tmp_path / 'ckpt.pt').read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r'ckpt\.pt: '):
            read(path)


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\0' * 1000,
        b'PK\x03\x04' * 50,
        b'\x80\x02}q\x00.',
        b'not a checkpoint at all' * 100,
        b'\x80',
    ],
    ids=['empty', 'zeros', 'zip-like', 'pickle', 'text', 'one byte'],
)
def test_garbage_is_refused(tmp_path, content):
    (tmp_path / 'ckpt.pt').write_bytes(content)
    with pytest.raises(UserError, match=r'ckpt\.pt: not a'):
        read(tmp_path / 'ckpt.pt')


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(UserError, match='no such checkpoint.*--out_dir'):
        read(tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read(tmp_path)


@pytest.mark.parametrize('target', ['/dev/zero', 'pipe', '.'])
def test_what_is_no_file_is_not_read(tmp_path, target):
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'ckpt.pt').symlink_to(target)
    with pytest.raises(UserError, match='not a file'):
        read(tmp_path / 'ckpt.pt')


# wrong contents


def cyclic():
    value = []
    value.append(value)
    return value


def strange():
    """Contents, for torch.save, that are no checkpoint of ours."""
    good = state(1)
    return {
        'list': [1, 2],
        'number': 3,
        'empty dict': {},
        'text': 'x' * 10**6,
        'tensor': torch.zeros(3),
        'other version': good | {'version': 2},
        'no version': {key: value for key, value in good.items() if key != 'version'},
        'tensor version': good | {'version': torch.zeros(2)},
        'huge version': good | {'version': 'v' * 10**7},
        'no digest': good,
        'tensor digest': good | {'digest': torch.zeros(2)},
        'no model': {'version': 1},
        'mixed keys': good | {'digest': 'x', 'model': {1: 1, 'a': 2}},
        'cyclic': good | {'digest': 'x', 'rng': cyclic()},
        'sparse': good | {'digest': 'x', 'model': {'a': torch.eye(3).to_sparse()}},
        'bare state dict': good['model'],
        'nanogpt, model a number': {'model_args': {}, 'model': 5},
        'nanogpt, no model': {'model_args': {}},
        'nanogpt, model a list': {'model_args': {'n_layer': 1}, 'model': [torch.zeros(2)]},
        'nanogpt, numbered weights': {'model_args': {}, 'model': {0: torch.zeros(2)}},
        'nanogpt, weights of text': {'model_args': {}, 'model': {'transformer.wte.weight': 'x'}},
    }


@pytest.mark.parametrize('name', strange())
def test_other_contents_are_refused(tmp_path, name):
    torch.save(strange()[name], tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: ') as caught:
        read(tmp_path / 'ckpt.pt')
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    'part, value',
    [
        ('step', '3'),
        ('step', -1),
        ('step', True),
        ('skipped', None),
        ('best_val_loss', 'x'),
        ('best_val_loss', None),
        ('wandb_id', 3),
        ('data', {}),
        ('data', {'train': 1, 'val': 2}),
        ('rng', {}),
        ('rng', [3]),
        ('rng', [[]]),
        ('rng', [[3]]),
        ('optimizer', []),
        ('optimizer', {'a': 3}),
        ('scaler', None),
        ('model', {3: torch.zeros(2)}),
        ('model', {'a': torch.zeros(2, dtype=torch.int8)}),
        ('model', {'a': torch.zeros(2, dtype=torch.complex64)}),
    ],
    ids=repr,
)
def test_parts_that_a_resume_could_not_use_are_refused(tmp_path, part, value):
    content = state(1) | {part: value}
    torch.save(content | {'digest': digest(content)}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=rf'ckpt\.pt: holds no .*{part}'):
        read(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize('part', ['model', 'gpt_config', 'train_config', 'shards'])
@pytest.mark.parametrize('value', ['x', None, 3, [1]], ids=repr)
def test_valid_digests_of_wrong_parts_are_refused(tmp_path, part, value):
    content = state(1) | {part: value}
    torch.save(content | {'digest': digest(content)}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=rf'ckpt\.pt: holds no .*{part}'):
        read(tmp_path / 'ckpt.pt')


# hostile files


def laughs():
    """A small object that unfolds to an exponentially large one (the "billion laughs" attack)."""
    value = ['ha']
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    'part', ['rng', 'gpt_config', 'scaler', 'model_args', 'version', 'digest', 'model', 'shards']
)
@pytest.mark.parametrize(
    'value',
    [
        laughs(),
        {'n_layer': laughs()},
        {'n_layer': {1, 2}},
        {'n_layer': b'x'},
        {'n_layer': 1j},
        {'n_layer': torch.zeros(2, device='meta')},
    ],
    ids=['laughs', 'laughs inside', 'set', 'bytes', 'complex', 'meta'],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_at_once(tmp_path, part, value):
    """Before anything walks through it or prints it, which could take forever or fail."""
    torch.save(state(1) | {'digest': 'x', part: value}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: ') as caught:
        build_model(read(tmp_path / 'ckpt.pt'), tmp_path / 'ckpt.pt')
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    'value',
    [{1, 2}, b'x', 1j, torch.float64, laughs()],
    ids=['set', 'bytes', 'complex', 'dtype', 'laughs'],
)
def test_only_tensors_and_plain_values_are_read(tmp_path, value, monkeypatch):
    monkeypatch.setattr('nanonag.checkpoint.format.digest', lambda state: 'valid')
    torch.save(state(1) | {'spare': [value], 'digest': 'valid'}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='has no place in a checkpoint|in two places'):
        read(tmp_path / 'ckpt.pt')


def test_a_packed_archive_is_refused(tmp_path):
    """A few bytes of it could expand to any amount of memory."""
    save(tmp_path, 1)
    with (
        zipfile.ZipFile(tmp_path / 'ckpt.pt') as file,
        zipfile.ZipFile(tmp_path / 'small.pt', 'w', zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in file.namelist():
            packed.writestr(name, file.read(name))
    with pytest.raises(UserError, match='compressed: it could expand'):
        read(tmp_path / 'small.pt')


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize(
    'how', ['torch.save', 'inside a checkpoint', 'legacy torch.save', 'bare pickle']
)
def test_code_in_a_file_does_not_run(tmp_path, how):
    marker, path = str(tmp_path / 'ran'), tmp_path / 'ckpt.pt'
    if how == 'bare pickle':
        path.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        content = (
            Hostile(marker) if how == 'torch.save' else state(1) | {'wandb_id': Hostile(marker)}
        )
        torch.save(content, path, _use_new_zipfile_serialization=not how.startswith('legacy'))
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read(path)
    assert not os.path.exists(marker)


@pytest.mark.parametrize('nanogpt', [False, True], ids=['ours', 'nanogpt'])
def test_a_small_file_of_huge_tensors_is_refused(tmp_path, nanogpt):
    """A zero-stride tensor can claim more elements than the file stores.

    No memory may be allocated for them.
    """
    config = {
        'update': 'gd',
        'n_layer': 1,
        'n_head': 1,
        'n_embd': 2**20,
        'vocab_size': 13,
        'block_size': 8,
    }
    with torch.device('meta'):
        # 13 TB for c_attn alone
        shapes = {name: w.shape for name, w in GPT(GPTConfig(**config)).state_dict().items()}
    huge = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    content = {'model': huge} | (
        {'model_args': config} if nanogpt else {'version': 1, 'gpt_config': config, 'digest': 'x'}
    )
    torch.save(content, tmp_path / 'ckpt.pt')
    assert os.path.getsize(tmp_path / 'ckpt.pt') < 100_000
    with pytest.raises(UserError, match=r'ckpt\.pt: '):
        build_model(read(tmp_path / 'ckpt.pt'), tmp_path / 'ckpt.pt')


# weights and configuration


def test_build_model_gives_the_same_logits(variant, tmp_path):
    model = nontrivial(torch.float32, **variant)
    built = build_model(
        {'model': model.state_dict(), 'gpt_config': asdict(model.cfg)}, 'here'
    ).eval()
    assert built.cfg == model.cfg
    assert torch.equal(
        built(tokens(), return_logits=True)[0], model(tokens(), return_logits=True)[0]
    )


@pytest.mark.parametrize(
    'change',
    [
        {'n_layer': 2},
        {'n_layer': 10**6},
        {'n_layer': 2**62},
        {'n_embd': 8},
        {'n_embd': 2**20},
        {'n_embd': 2**40},
        {'n_embd': 2**62},
        {'vocab_size': 14},
        {'vocab_size': 2**50},
        {'block_size': 9},
        {'block_size': 2**50},
        {'bias': True},
        {'update': 'lt_nag'},
        {'mlp': 'swiglu'},
        {'tie_weights': False, 'bias': True},
    ],
    ids=str,
)
def test_weights_that_do_not_fit_their_configuration(change):
    content = state(1)
    content['gpt_config'].update(change, vocab_used=None)
    if 'update' in change:
        kept = {key: value for key, value in content['gpt_config'].items() if value is not None}
        content['gpt_config'] = kept | change
    with pytest.raises(UserError, match='^here: '):
        build_model(content, 'here')


@pytest.mark.parametrize(
    'change, message',
    [
        ({'update': 'adam'}, 'adam'),
        ({'n_head': 3}, 'not divisible'),
        ({'n_layer': 0}, 'n_layer'),
        ({'n_layer': 'many'}, 'n_layer'),
        ({'dropout': float('nan')}, 'dropout'),
        ({'unheard': 1}, 'unheard'),
        ({'n_layer': torch.zeros(2)}, 'n_layer'),
        ({'vocab_used': 99}, 'vocab_used'),
    ],
    ids=str,
)
def test_a_configuration_from_a_file_is_checked(change, message):
    content = state(1)
    content['gpt_config'].update(change)
    with pytest.raises(UserError, match=message):
        build_model(content, 'here')


def test_missing_and_extra_weights_are_named():
    content = state(1)
    del content['model']['transformer.ln_f.weight']
    content['model']['transformer.spare'] = torch.zeros(1)
    with pytest.raises(
        UserError, match=r'here: .*transformer\.ln_f\.weight, transformer\.spare \(2 in all\)'
    ):
        build_model(content, 'here')


# nanoGPT's files


def nanogpt_file(path, model, prefix=''):
    """Writes a file in nanoGPT's layout.

    It has the prefixes of torch.compile and DDP, causal masks as buffers, its own configuration.
    """
    weights = {prefix + name: w for name, w in model.state_dict().items()}
    for i in range(model.cfg.n_layer):
        weights[f'{prefix}transformer.h.{i}.attn.bias'] = torch.ones(
            1, 1, model.cfg.block_size, model.cfg.block_size
        ).tril()
    arguments = {
        key: getattr(model.cfg, key)
        for key in ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
    }
    torch.save(
        {
            'model': weights,
            'optimizer': {'state': {}, 'param_groups': []},
            'model_args': arguments,
            'iter_num': 5000,
            'best_val_loss': torch.tensor(1.2),
            'config': {'out_dir': 'out', 'learning_rate': 1e-3},
        },
        path,
    )


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize(
    'prefix', ['', '_orig_mod.', 'module.', '_orig_mod.module.', 'module._orig_mod.']
)
def test_nanogpt_files_load(tmp_path, prefix, bias):
    model = nontrivial(torch.float32, update='gd', bias=bias)
    nanogpt_file(tmp_path / 'ckpt.pt', model, prefix)
    found = read(tmp_path / 'ckpt.pt')
    built = build_model(found, tmp_path / 'ckpt.pt').eval()
    assert found['step'] == 5000 and built.cfg.update == 'gd'
    assert torch.equal(
        built(tokens(), return_logits=True)[0], model(tokens(), return_logits=True)[0]
    )


@pytest.mark.parametrize(
    'weight',
    [
        torch.empty(13, 16, device='meta'),
        torch.zeros(13, 16).to_sparse(),
        torch.zeros(13, 16, dtype=torch.int8),
        torch.zeros(1).expand(13, 16),
        torch.zeros(13, 16, dtype=torch.complex64),
    ],
    ids=['meta', 'sparse', 'int', 'expanded', 'complex'],
)
def test_weights_without_numbers_of_their_own_are_refused(tmp_path, weight):
    nanogpt_file(tmp_path / 'ckpt.pt', fresh(update='gd'))
    content = torch.load(tmp_path / 'ckpt.pt')
    content['model']['transformer.wte.weight'] = weight
    torch.save(content, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: '):
        read(tmp_path / 'ckpt.pt')


def test_finetuning_from_a_nanogpt_file(tmp_path, data_folder):
    nanogpt_file(
        tmp_path / 'nano.pt', fresh(update='gd', n_layer=1, n_embd=16, block_size=16), '_orig_mod.'
    )
    assert (
        train(
            data_folder, tmp_path / 'out', update='gd', init_from=tmp_path / 'nano.pt', max_iters=2
        ).code
        == 0
    )
    start, end = (
        read(path)['model'] for path in (tmp_path / 'nano.pt', tmp_path / 'out' / 'ckpt.pt')
    )
    moves = [(end[name] - start[name]).abs().max() for name in end]
    assert 0 < max(moves) < 0.2  # the run started from these weights, not from random ones


def test_resuming_a_nanogpt_folder_is_a_users_mistake(tmp_path, data_folder):
    """The file lacks what a resume needs; the message says how to start from its weights."""
    nanogpt_file(tmp_path / 'ckpt.pt', fresh(update='gd', n_layer=1, n_embd=16, block_size=16))
    outcome = train(data_folder, tmp_path, update='gd', init_from='resume')
    assert outcome.code == 2 and re.search(r'ckpt\.pt', outcome.message)
    assert names(tmp_path) == ['ckpt.pt']
