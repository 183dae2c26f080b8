"""Checkpoints: whatever moment a run dies at, a good one is left; whatever a file holds, it can do no harm."""

import builtins
import os
import pickle
import re
import zipfile
from dataclasses import asdict

import pytest
import torch

import checkpoint
from checkpoint import Saver, build_model, digest, read, read_latest
from configurator import UserError
from conftest import fresh, nontrivial, tokens, train
from model import GPT, GPTConfig

TOKENIZER = {'kind': 'char', 'chars': list('abcdefghijklm')}


def state(step, update='gd', **kwargs):
    """A full state as train.py makes it, its weights telling the step."""
    model = fresh(update=update, n_layer=1, n_embd=4, n_head=1, **kwargs)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(step)
    return {'version': 1, 'model': model.state_dict(), 'gpt_config': asdict(model.cfg), 'step': step,
            'best_val_loss': 2.5,
            'tokenizer': TOKENIZER, 'optimizer': {'a': {'step': torch.tensor(3.0), 'exp_avg': torch.ones(2)}},
            'scaler': {},
            'train_config': {'seed': 1, 'min_lr': None}, 'skipped': 0, 'rng': [[torch.get_rng_state()]],
            'data': {'train': 'x', 'val': 'y'},
            'wandb_id': None}


def save(folder, *steps, **options):
    """A Saver that has written these steps."""
    saver = Saver(folder, **options)
    for step in steps:
        saver.save(state(step))
        assert saver.wait()
    return saver


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(plain, value))
    return value is None or type(value) in (torch.Tensor, str, int, float, bool)


# writing and reading back

def test_round_trip(tmp_path):
    save(tmp_path, 7)
    found = read(tmp_path / 'ckpt.pt')
    assert digest(found) == digest(state(7)) and found.keys() == state(7).keys() | {'digest'}
    assert found['train_config'] == {'seed': 1, 'min_lr': None} and type(found['best_val_loss']) is float


def test_a_file_holds_tensors_and_plain_types_only(finished):
    for name in ('ckpt.pt', 'best.pt'):
        found = torch.load(finished / name, weights_only=True)
        assert plain(found)
        assert not any(key.startswith(('_orig_mod.', 'module.')) for key in found['model'])


def test_best_holds_what_sampling_and_finetuning_need(tmp_path):
    saver = Saver(tmp_path)
    saver.save(state(3), best=True)
    saver.save(state(4), best=False)
    assert saver.wait()
    best = read(tmp_path / 'best.pt')
    assert best['step'] == 3 and best.keys() == {'version', 'model', 'gpt_config', 'step', 'best_val_loss', 'tokenizer', 'digest'}
    assert (best['model']['transformer.wte.weight'] == 3).all()
    assert read(tmp_path / 'ckpt.pt')['step'] == 4


def test_what_is_saved_is_a_copy(tmp_path):
    """The loop goes on training while the file is being written."""
    written = state(1)
    saver = Saver(tmp_path)
    saver.save(written)
    for weights in (written['model']['transformer.wte.weight'], written['optimizer']['a']['exp_avg'],
                    written['rng'][0][0]):
        weights.zero_()
    written['train_config']['seed'] = 5
    assert saver.wait()
    assert digest(read(tmp_path / 'ckpt.pt')) == digest(state(1))


@pytest.mark.parametrize('keep_last, kept', [(0, []), (1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_keep_last(tmp_path, keep_last, kept):
    save(tmp_path, 1, 2, 3, 4, keep_last=keep_last)
    assert names(tmp_path) == ['ckpt-%08d.pt' % step for step in kept] + ['ckpt.pt']
    for step in kept:
        assert read(tmp_path / f'ckpt-{step:08d}.pt')['step'] == step
    assert read_latest(tmp_path)['step'] == 4


def test_other_files_are_left_alone(tmp_path):
    others = ['ckpt-best.pt', 'ckpt-5.pt', 'notes.txt', 'ckpt-00000001.pt.bak']
    for name in others:
        (tmp_path / name).write_text('mine')
    save(tmp_path, 1, 2, 3, keep_last=1)
    checkpoint.clear(tmp_path)
    assert names(tmp_path) == sorted(others)


def test_an_empty_folder_has_no_state(tmp_path):
    assert read_latest(tmp_path) is None and read_latest(tmp_path / 'nowhere') is None


# dying and failing while writing

class Killed(BaseException):
    """The process ends here."""


CALLS = ['torch.save', 'open', 'os.fsync', 'os.link', 'os.replace', 'os.unlink']


def break_call(monkeypatch, call, error, before=True, times=99, half=False):
    """Makes a call that checkpoint.py uses raise `error`, before or after its work, the first `times` times."""
    owners = {'torch.save': (torch, 'save'), 'open': (checkpoint, 'open'), 'os.unlink': (checkpoint.Path, 'unlink')}
    owner, name = owners.get(call, (os, call[3:]))
    original = getattr(owner, name, builtins.open)
    left = [times]

    def broken(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0 or (call == 'open' and 'w' not in args[1]):
            return original(*args, **kwargs)
        if half:
            args[1].write(b'PK' * 500)
        elif not before:
            original(*args, **kwargs)
        raise error
    monkeypatch.setattr(owner, name, broken, raising=False)


@pytest.mark.parametrize('before', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('call', CALLS)
def test_a_kill_at_any_moment_leaves_a_good_one(tmp_path, monkeypatch, call, before):
    saver = save(tmp_path, 1, 2, keep_last=1)
    with monkeypatch.context() as patch:
        break_call(patch, call, Killed(), before)
        with pytest.raises(Killed):
            saver.write('ckpt.pt', state(3))
    latest = read_latest(tmp_path)
    assert latest['step'] in (2, 3) and read(tmp_path / 'ckpt.pt')['step'] == latest['step']
    save(tmp_path, 4, last_step=latest['step'])
    assert read_latest(tmp_path)['step'] == 4


@pytest.mark.parametrize('before', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('call', CALLS)
def test_a_kill_after_a_fall_back_leaves_a_good_one(tmp_path, monkeypatch, call, before):
    """ckpt.pt is damaged, the run went on from the one before: that one must stay until the new one is in place."""
    save(tmp_path, 1, 2, keep_last=1)
    (tmp_path / 'ckpt.pt').write_bytes(b'damaged')
    assert read_latest(tmp_path)['step'] == 1
    saver = Saver(tmp_path, keep_last=1, last_step=1)  # as train.py makes it on resume
    with monkeypatch.context() as patch:
        break_call(patch, call, Killed(), before)
        try:
            saver.write('ckpt.pt', state(3))
        except Killed:
            pass
    assert read_latest(tmp_path)['step'] in (1, 3)


@pytest.mark.parametrize('times', [1, 99], ids=['once', 'lasting'])
@pytest.mark.parametrize('call', CALLS + ['half a file'])
def test_a_failing_write_is_told_and_tried_again(tmp_path, monkeypatch, capsys, call, times):
    saver = save(tmp_path, 1, 2, keep_last=1)
    with monkeypatch.context() as patch:
        break_call(patch, call.replace('half a file', 'torch.save'), OSError(28, 'No space left on device'),
                   times=times,
                   half=call == 'half a file')
        saver.save(state(3), best=True)
        succeeded = saver.wait()
    latest = read_latest(tmp_path)
    if call == 'os.link':  # a file system without links: the file is moved instead
        assert succeeded and latest['step'] == 3
    else:
        warnings = [line for line in capsys.readouterr().err.splitlines() if 'NOT saved' in line]
        assert not succeeded and warnings and all('No space left' in line for line in warnings)
        assert latest['step'] in (2, 3)
    saver.save(state(4), best=True)
    assert saver.wait()
    assert read_latest(tmp_path)['step'] == read(tmp_path / 'best.pt')['step'] == 4
    assert not any(name.endswith('.tmp') for name in names(tmp_path))
    for path in tmp_path.glob('ckpt-*.pt'):
        assert read(path)['step'] == int(path.stem[5:]), 'a kept file is named after its step'


def test_a_folder_that_went_away(tmp_path, capsys):
    saver = Saver(tmp_path / 'gone')
    saver.save(state(1))
    assert not saver.wait() and 'NOT saved' in capsys.readouterr().err


def test_a_disk_that_lies_is_found_out(tmp_path, monkeypatch, capsys):
    """The file is read back before it replaces the old one."""
    saver = save(tmp_path, 1)
    save_truly = torch.save

    def save_badly(obj, file):
        save_truly(obj, file)
        file.seek(file.tell() // 2)
        file.write(b'\xff' * 64)
        file.seek(0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', save_badly)
        saver.save(state(2))
        assert not saver.wait()
    assert read_latest(tmp_path)['step'] == 1


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_that_are_not_finite_never_replace_a_file(tmp_path, capsys, value):
    saver = save(tmp_path, 1)
    bad = state(2)
    bad['model']['transformer.ln_f.weight'][1] = value
    saver.save(bad, best=True)
    assert not saver.wait()
    assert names(tmp_path) == ['ckpt.pt'] and read_latest(tmp_path)['step'] == 1
    assert 'not finite' in capsys.readouterr().err


# damaged files

def test_one_flipped_byte_anywhere_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole, original = tmp_path / 'ckpt.pt', (tmp_path / 'ckpt.pt').read_bytes(), digest(state(1))
    caught = 0
    for place in range(0, len(whole), 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1:])
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
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
        with pytest.raises(UserError, match=r'ckpt\.pt: its contents do not match its digest'):
            read(path)


def test_a_file_cut_off_anywhere_is_found(tmp_path):
    save(tmp_path, 1)
    path, whole = tmp_path / 'ckpt.pt', (tmp_path / 'ckpt.pt').read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r'ckpt\.pt: '):
            read(path)


def cyclic():
    value = []
    value.append(value)
    return value


def strange():
    """Contents that are no checkpoint of ours, made by torch.save."""
    good = state(1)
    return {
        'list': [1, 2], 'number': 3, 'empty dict': {}, 'text': 'x' * 10**6, 'tensor': torch.zeros(3),
        'other version': good | {'version': 2},
        'no version': {key: value for key, value in good.items() if key != 'version'},
        'tensor version': good | {'version': torch.zeros(2)},
        'huge version': good | {'version': 'v' * 10**7}, 'no digest': good,
        'tensor digest': good | {'digest': torch.zeros(2)},
        'no model': {'version': 1}, 'mixed keys': good | {'digest': 'x', 'model': {1: 1, 'a': 2}},
        'cyclic': good | {'digest': 'x', 'rng': cyclic()},
        'sparse': good | {'digest': 'x', 'model': {'a': torch.eye(3).to_sparse()}},
        'bare state dict': good['model'],
        'nanogpt, model a number': {'model_args': {}, 'model': 5}, 'nanogpt, no model': {'model_args': {}},
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


def laughs():
    """A small object, exponentially large to who walks it."""
    value = ['ha']
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize('part', ['rng', 'gpt_config', 'scaler', 'model_args', 'version', 'digest', 'model', 'shards'])
@pytest.mark.parametrize('value', [laughs(), {'n_layer': laughs()}, {'n_layer': {1, 2}}, {'n_layer': b'x'}, {'n_layer': 1j},
                                   {'n_layer': torch.zeros(2, device='meta')}],
                         ids=['laughs', 'laughs inside', 'set', 'bytes', 'complex', 'meta'])
def test_what_has_no_place_in_a_checkpoint_is_refused_at_once(tmp_path, part, value):
    """Before anything walks or prints it, which would take for ever or fail."""
    torch.save(state(1) | {'digest': 'x', part: value}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: ') as caught:
        build_model(read(tmp_path / 'ckpt.pt'), tmp_path / 'ckpt.pt')
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize('part, value', [
    ('step', '3'), ('step', -1), ('step', True), ('skipped', None), ('best_val_loss', 'x'), ('best_val_loss', None), ('wandb_id', 3), ('data', {}),
    ('data', {'train': 1, 'val': 2}), ('rng', {}), ('rng', [3]), ('rng', [[]]), ('rng', [[3]]), ('optimizer', []), ('optimizer', {'a': 3}), ('scaler', None),
    ('model', {3: torch.zeros(2)}), ('model', {'a': torch.zeros(2, dtype=torch.int8)}), ('model', {'a': torch.zeros(2, dtype=torch.complex64)})], ids=repr)
def test_parts_that_a_resume_could_not_use_are_refused(tmp_path, part, value):
    content = state(1) | {part: value}
    torch.save(content | {'digest': digest(content)}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=rf'ckpt\.pt: holds no .*{part}'):
        read(tmp_path / 'ckpt.pt')


def test_a_packed_archive_is_refused(tmp_path):
    """A few bytes of it could unpack to any amount of memory."""
    save(tmp_path, 1)
    with zipfile.ZipFile(tmp_path / 'ckpt.pt') as file, zipfile.ZipFile(tmp_path / 'small.pt', 'w', zipfile.ZIP_DEFLATED) as packed:
        for name in file.namelist():
            packed.writestr(name, file.read(name))
    with pytest.raises(UserError, match='packed'):
        read(tmp_path / 'small.pt')


@pytest.mark.parametrize('target', ['/dev/zero', 'pipe', '.'])
def test_what_is_no_file_is_not_read(tmp_path, target):
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'ckpt.pt').symlink_to(target)
    with pytest.raises(UserError, match='not a file'):
        read(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize('part', ['model', 'gpt_config', 'train_config', 'shards'])
@pytest.mark.parametrize('value', ['x', None, 3, [1]], ids=repr)
def test_valid_digests_of_wrong_parts_are_refused(tmp_path, part, value):
    content = state(1) | {part: value}
    torch.save(content | {'digest': digest(content)}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=rf'ckpt\.pt: holds no .*{part}'):
        read(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize('content', [b'', b'\0' * 1000, b'PK\x03\x04' * 50, b'\x80\x02}q\x00.',
                                     b'not a checkpoint at all' * 100, b'\x80'],
                         ids=['empty', 'zeros', 'zip-like', 'pickle', 'text', 'one byte'])
def test_garbage_is_refused(tmp_path, content):
    (tmp_path / 'ckpt.pt').write_bytes(content)
    with pytest.raises(UserError, match=r'ckpt\.pt: not a'):
        read(tmp_path / 'ckpt.pt')


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(UserError, match='no such checkpoint.*--out_dir'):
        read(tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read(tmp_path)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize('how', ['torch.save', 'inside a checkpoint', 'legacy torch.save', 'bare pickle'])
def test_code_in_a_file_does_not_run(tmp_path, how):
    marker, path = str(tmp_path / 'ran'), tmp_path / 'ckpt.pt'
    if how == 'bare pickle':
        path.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        content = Hostile(marker) if how == 'torch.save' else state(1) | {'wandb_id': Hostile(marker)}
        torch.save(content, path, _use_new_zipfile_serialization=not how.startswith('legacy'))
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read(path)
    assert not os.path.exists(marker)


@pytest.mark.parametrize('nanogpt', [False, True], ids=['ours', 'nanogpt'])
def test_a_small_file_of_huge_tensors_is_refused(tmp_path, nanogpt):
    """One stored element can be a tensor of any size by strides of zero; nothing may be allocated for it."""
    config = {'update': 'gd', 'n_layer': 1, 'n_head': 1, 'n_embd': 2**20, 'vocab_size': 13, 'block_size': 8}
    with torch.device('meta'):
        shapes = {name: w.shape for name, w in GPT(GPTConfig(**config)).state_dict().items()}  # 13 TB for c_attn alone
    huge = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    content = {'model': huge} | ({'model_args': config}
                                 if nanogpt else {'version': 1, 'gpt_config': config, 'digest': 'x'})
    torch.save(content, tmp_path / 'ckpt.pt')
    assert os.path.getsize(tmp_path / 'ckpt.pt') < 100_000
    with pytest.raises(UserError, match=r'ckpt\.pt: '):
        build_model(read(tmp_path / 'ckpt.pt'), tmp_path / 'ckpt.pt')


# falling back

def test_a_damaged_file_falls_back_to_the_one_before(tmp_path, capsys):
    save(tmp_path, 1, 2, 3, keep_last=2)
    os.truncate(tmp_path / 'ckpt.pt', 500)
    assert read_latest(tmp_path)['step'] == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and 'ckpt.pt' in lines[0] and 'falling back' in lines[0]
    os.truncate(tmp_path / 'ckpt-00000002.pt', 500)
    assert read_latest(tmp_path)['step'] == 1
    os.truncate(tmp_path / 'ckpt-00000001.pt', 500)
    with pytest.raises(UserError, match='not a readable checkpoint'):
        read_latest(tmp_path)


def test_a_kept_file_alone_is_enough(tmp_path):
    save(tmp_path, 1, 2, keep_last=1)
    (tmp_path / 'ckpt.pt').unlink()
    assert read_latest(tmp_path)['step'] == 1


# weights and configuration

def test_build_model_gives_the_same_logits(variant, tmp_path):
    model = nontrivial(torch.float32, **variant)
    built = build_model({'model': model.state_dict(), 'gpt_config': asdict(model.cfg)}, 'here').eval()
    assert built.cfg == model.cfg
    assert torch.equal(built(tokens(), return_logits=True)[0], model(tokens(), return_logits=True)[0])


@pytest.mark.parametrize('change', [
    {'n_layer': 2}, {'n_layer': 10**6}, {'n_layer': 2**62}, {'n_embd': 8}, {'n_embd': 2**20}, {'n_embd': 2**40},
    {'n_embd': 2**62},
    {'vocab_size': 14}, {'vocab_size': 2**50}, {'block_size': 9}, {'block_size': 2**50}, {'bias': True},
    {'update': 'lt_nag'},
    {'mlp': 'swiglu'}, {'tie_weights': False, 'bias': True},
], ids=str)
def test_weights_that_do_not_fit_their_configuration(change):
    content = state(1)
    content['gpt_config'].update(change, vocab_used=None)
    if 'update' in change:
        kept = {key: value for key, value in content['gpt_config'].items() if value is not None}
        content['gpt_config'] = kept | change
    with pytest.raises(UserError, match='^here: '):
        build_model(content, 'here')


@pytest.mark.parametrize('change, message', [
    ({'update': 'adam'}, 'adam'), ({'n_head': 3}, 'not divisible'), ({'n_layer': 0}, 'n_layer'),
    ({'n_layer': 'many'}, 'n_layer'),
    ({'dropout': float('nan')}, 'dropout'), ({'unheard': 1}, 'unheard'), ({'n_layer': torch.zeros(2)}, 'n_layer'),
    ({'vocab_used': 99}, 'vocab_used'),
], ids=str)
def test_a_configuration_from_a_file_is_checked(change, message):
    content = state(1)
    content['gpt_config'].update(change)
    with pytest.raises(UserError, match=message):
        build_model(content, 'here')


def test_missing_and_extra_weights_are_named():
    content = state(1)
    del content['model']['transformer.ln_f.weight']
    content['model']['transformer.spare'] = torch.zeros(1)
    with pytest.raises(UserError, match=r'here: .*transformer\.ln_f\.weight, transformer\.spare \(2 in all\)'):
        build_model(content, 'here')


# nanoGPT's files

def nanogpt_file(path, model, prefix=''):
    """A file in nanoGPT's layout: prefixes of compile and DDP, causal masks as buffers, its own configuration."""
    weights = {prefix + name: w for name, w in model.state_dict().items()}
    for i in range(model.cfg.n_layer):
        weights[f'{prefix}transformer.h.{i}.attn.bias'] = torch.ones(1, 1, model.cfg.block_size,
                                                                     model.cfg.block_size).tril()
    arguments = {key: getattr(model.cfg, key)
                 for key in ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')}
    torch.save({'model': weights, 'optimizer': {'state': {}, 'param_groups': []}, 'model_args': arguments,
                'iter_num': 5000,
                'best_val_loss': torch.tensor(1.2), 'config': {'out_dir': 'out', 'learning_rate': 1e-3}}, path)


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('prefix', ['', '_orig_mod.', 'module.', '_orig_mod.module.', 'module._orig_mod.'])
def test_nanogpt_files_load(tmp_path, prefix, bias):
    model = nontrivial(torch.float32, update='gd', bias=bias)
    nanogpt_file(tmp_path / 'ckpt.pt', model, prefix)
    found = read(tmp_path / 'ckpt.pt')
    built = build_model(found, tmp_path / 'ckpt.pt').eval()
    assert found['step'] == 5000 and built.cfg.update == 'gd'
    assert torch.equal(built(tokens(), return_logits=True)[0], model(tokens(), return_logits=True)[0])


@pytest.mark.parametrize('weight', [torch.empty(13, 16, device='meta'), torch.zeros(13, 16).to_sparse(), torch.zeros(13, 16, dtype=torch.int8),
                                    torch.zeros(1).expand(13, 16), torch.zeros(13, 16, dtype=torch.complex64)], ids=['meta', 'sparse', 'int', 'expanded', 'complex'])
def test_weights_without_numbers_of_their_own_are_refused(tmp_path, weight):
    nanogpt_file(tmp_path / 'ckpt.pt', fresh(update='gd'))
    content = torch.load(tmp_path / 'ckpt.pt')
    content['model']['transformer.wte.weight'] = weight
    torch.save(content, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: '):
        read(tmp_path / 'ckpt.pt')


def test_finetuning_from_a_nanogpt_file(tmp_path, data_folder):
    nanogpt_file(tmp_path / 'nano.pt', fresh(update='gd', n_layer=1, n_embd=16, block_size=16), '_orig_mod.')
    assert train(data_folder, tmp_path / 'out', update='gd', init_from=tmp_path / 'nano.pt', max_iters=2).code == 0
    start, end = (read(path)['model'] for path in (tmp_path / 'nano.pt', tmp_path / 'out' / 'ckpt.pt'))
    moves = [(end[name] - start[name]).abs().max() for name in end]
    assert 0 < max(moves) < 0.2  # from there, not from scratch


def test_resuming_a_nanogpt_folder_is_a_users_mistake(tmp_path, data_folder):
    """Its file lacks what a resume needs; the message says how to go on from its weights."""
    nanogpt_file(tmp_path / 'ckpt.pt', fresh(update='gd', n_layer=1, n_embd=16, block_size=16))
    outcome = train(data_folder, tmp_path, update='gd', init_from='resume')
    assert outcome.code == 2 and re.search(r'ckpt\.pt', outcome.message)
    assert names(tmp_path) == ['ckpt.pt']


def test_resuming_from_best_alone_is_a_users_mistake(tmp_path, data_folder, finished):
    (tmp_path / 'ckpt.pt').write_bytes((finished / 'best.pt').read_bytes())
    outcome = train(data_folder, tmp_path, init_from='resume')
    assert outcome.code == 2 and re.search(r'ckpt\.pt', outcome.message)
