"""sample.py: a checkpoint is all it needs."""

import math
import re
import shutil

import pytest
import torch
from conftest import ALPHABET, arguments, call, fresh, train, write_data

import sample
from nanonag import checkpoint


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    """A run that learned the alphabet, its data folder deleted."""
    folder = tmp_path_factory.mktemp('sample')
    write_data(folder / 'data')
    assert (
        train(
            folder / 'data',
            folder / 'out',
            max_iters=60,
            optimizer='adamw',
            learning_rate=0.03,
            eval_interval=30,
        ).code
        == 0
    )
    shutil.rmtree(folder / 'data')
    return folder / 'out'


@pytest.fixture
def draw(run_folder, capsys):
    """Runs sample.py -> (exit code, message, samples)."""

    def run(**options):
        capsys.readouterr()
        defaults = dict(
            out_dir=run_folder,
            start='abc',
            num_samples=1,
            max_new_tokens=12,
            device='cpu',
            dtype='float32',
        )
        code, message = call(sample.main, arguments({**defaults, **options}))
        return code, message, capsys.readouterr().out.split('\n' + '-' * 15 + '\n')[:-1]

    return run


def test_continues_the_prompt_without_the_data(draw):
    code, _, samples = draw(start='abc')
    assert code == 0 and len(samples) == 1 and samples[0].startswith('abc')
    assert len(samples[0]) == 3 + 12 and set(samples[0]) <= set(ALPHABET)


def test_greedy_is_deterministic_and_knows_what_was_learned(draw):
    samples = [draw(temperature=0, seed=seed, start='cdef')[2][0] for seed in (1, 2)]
    assert samples[0] == samples[1] and samples[0].startswith('cdefghijkl')


def test_past_the_block_size(draw):
    assert len(draw(start='abcdefghijkl' * 3, max_new_tokens=40)[2][0]) == 76


def test_several_samples_differ(draw):
    samples = draw(num_samples=4, temperature=1.5)[2]
    assert len(samples) == 4 and len(set(samples)) > 1


def test_the_same_seed_gives_the_same_text(draw):
    first = draw(num_samples=2, temperature=1.2, max_new_tokens=30)[2]
    assert first == draw(num_samples=2, temperature=1.2, max_new_tokens=30)[2]
    assert first != draw(num_samples=2, temperature=1.2, max_new_tokens=30, seed=2)[2]


def test_top_k_of_one_is_greedy(draw):
    assert draw(top_k=1, temperature=2.0)[2] == draw(temperature=0)[2]


def test_top_k_zero_is_no_limit(draw):
    assert draw(top_k=0, temperature=1.5)[2] == draw(top_k=len(ALPHABET), temperature=1.5)[2]


def test_a_prompt_from_a_file(draw, tmp_path):
    (tmp_path / 'prompt.txt').write_text('fgh\nab', encoding='utf-8')
    assert draw(start=f'FILE:{tmp_path}/prompt.txt')[2][0].startswith('fgh\nab')
    (tmp_path / 'windows.txt').write_bytes(b'\xef\xbb\xbffgh\r\nab')
    assert draw(start=f'FILE:{tmp_path}/windows.txt')[2][0].startswith('fgh\nab')


def test_best_is_taken_then_the_last(draw, run_folder, tmp_path):
    """best.pt if there is one, else ckpt.pt; a file can also be named."""
    shutil.copy(run_folder / 'ckpt.pt', tmp_path)
    expected = draw(temperature=0)[2]
    assert draw(temperature=0, out_dir=tmp_path)[:1] == (0,)
    assert draw(temperature=0, init_from=run_folder / 'best.pt', out_dir='nowhere')[2] == expected
    shutil.copy(run_folder / 'best.pt', tmp_path)
    (tmp_path / 'ckpt.pt').write_bytes(b'damaged')
    assert draw(temperature=0, out_dir=tmp_path)[2] == expected


@pytest.mark.parametrize('content', [b'', b'damaged'])
def test_a_damaged_best_falls_back_to_the_last_with_one_warning(
    draw, run_folder, tmp_path, capsys, content
):
    expected = draw(temperature=0, init_from=run_folder / 'ckpt.pt')[2]
    shutil.copy(run_folder / 'ckpt.pt', tmp_path)
    (tmp_path / 'best.pt').write_bytes(content)
    code = call(
        sample.main,
        arguments(
            dict(
                out_dir=tmp_path,
                start='abc',
                num_samples=1,
                max_new_tokens=12,
                temperature=0,
                device='cpu',
                dtype='float32',
            )
        ),
    )
    out, err = capsys.readouterr()
    assert code == (0, '') and out.startswith(expected[0])
    assert err.count('warning: ') == 1 and 'best.pt' in err and 'falling back to ckpt.pt' in err


def test_nothing_readable_is_told_without_a_promise(draw, tmp_path, capsys):
    for name in ('best.pt', 'ckpt.pt'):
        (tmp_path / name).write_bytes(b'damaged')
    code = call(sample.main, [f'--out_dir={tmp_path}'])
    assert (
        code[0] == 2 and 'ckpt.pt' in code[1] and capsys.readouterr().err.count('falling back') == 1
    )


def test_a_temperature_beyond_float32_is_greedy(draw):
    assert draw(temperature=1e-320, start='cde')[2] == draw(temperature=0, start='cde')[2]


@pytest.mark.parametrize('num_samples', [2**40, 2**62])
def test_more_samples_than_memory_are_a_users_mistake(draw, num_samples):
    code, message, samples = draw(num_samples=num_samples)
    assert code == 2 and 'out of memory' in message and '--num_samples' in message and samples == []


@pytest.mark.parametrize(
    'options, message',
    [
        (
            dict(init_from='scratch'),
            'init_from=scratch: neither a checkpoint file nor one of resume, gpt2',
        ),
        (dict(start='abcXYé'), "'X', 'Y', '\\\\xe9'"),
        (dict(start=''), 'start is empty'),
        (dict(start='FILE:missing.txt'), 'missing.txt'),
        (dict(out_dir='no-such-run'), r'no-such-run.*no such checkpoint.*--out_dir'),
        (dict(init_from='no-such.pt'), 'no-such.pt'),
        (dict(temperature=-1), 'temperature'),
        (dict(num_samples=0), 'num_samples'),
        (dict(max_new_tokens=0), 'max_new_tokens'),
        (dict(top_k=-1), 'top_k'),
        (dict(device='warp'), 'device=warp'),
        (dict(tempreature=1), "did you mean 'temperature'"),
    ],
    ids=str,
)
def test_mistakes(draw, options, message):
    code, told, samples = draw(**options)
    assert code == 2 and re.search(message, told) and samples == [], told


def test_a_prompt_file_that_is_no_text(draw, tmp_path):
    (tmp_path / 'bad.txt').write_bytes(b'ab\xff')
    code, message, _ = draw(start=f'FILE:{tmp_path}/bad.txt')
    assert code == 2 and 'bad.txt' in message and 'UTF-8' in message


@pytest.mark.parametrize('content', [b'', b'damaged', b'\x80\x02}q\x00.'])
def test_a_damaged_checkpoint(draw, tmp_path, content):
    (tmp_path / 'ckpt.pt').write_bytes(content)
    code, message, _ = draw(out_dir=tmp_path)
    assert code == 2 and 'ckpt.pt' in message


@pytest.mark.parametrize(
    'description',
    [
        None,
        5,
        {'kind': 'char', 'chars': ['a']},
        {'kind': 'char', 'chars': list('abcdefghijklmnop')},
        {'kind': 'word'},
    ],
    ids=str,
)
def test_a_tokenizer_that_does_not_fit_the_weights(draw, tmp_path, run_folder, description):
    """More entries than the table has rows, or no tokenizer at all: told. Fewer: never sampled
    beyond."""
    state = checkpoint.read(run_folder / 'ckpt.pt') | {'tokenizer': description}
    torch.save(state | {'digest': checkpoint.digest(state)}, tmp_path / 'ckpt.pt')
    code, message, samples = draw(out_dir=tmp_path, start='a', temperature=2.0)
    if description == {'kind': 'char', 'chars': ['a']}:
        assert samples == ['a' * 13]
    else:
        assert code == 2 and message and samples == []


def test_padding_is_never_sampled(draw, tmp_path, run_folder):
    """Rows of the table past the vocabulary exist for speed only."""
    model = fresh(update='gd', vocab_size=64, vocab_used=13)
    state = checkpoint.read(run_folder / 'ckpt.pt') | {
        'model': model.state_dict(),
        'gpt_config': model.cfg.__dict__,
    }
    torch.save(state | {'digest': checkpoint.digest(state)}, tmp_path / 'ckpt.pt')
    code, _, samples = draw(
        out_dir=tmp_path, temperature=3.0, num_samples=8, max_new_tokens=20, top_k=0
    )
    assert code == 0 and all(len(text) == 23 for text in samples)


def test_weights_that_are_not_finite_are_told(draw, tmp_path, run_folder):
    """No token of them means anything; on some devices they would even be ids that cannot be
    decoded."""
    state = checkpoint.read(run_folder / 'ckpt.pt')
    state['model'] = {name: w * math.nan for name, w in state['model'].items()}
    torch.save(state | {'digest': checkpoint.digest(state)}, tmp_path / 'ckpt.pt')
    code, message, samples = draw(out_dir=tmp_path)
    assert code == 2 and 'non-finite logits' in message and samples == []


def test_a_file_in_place_of_a_run(tmp_path):
    (tmp_path / 'whole.pt').write_bytes(b'')
    code, message = call(sample.main, [f'--out_dir={tmp_path}/whole.pt'])
    assert code == 2 and f'write --init_from={tmp_path}/whole.pt' in message
