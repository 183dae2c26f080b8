"""data/ and nanonag/data/: pytest tests/test_data.py"""

import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from nanonag.cli import UserError
from nanonag.data import download, encoder, folder, holdout, source, tokenizer, writer

ROOT = Path(__file__).resolve().parents[1]
BINS = ('train.bin', 'val.bin')
STORIES = [
    f'Story {i}: a cat saw {i * i} dogs.\n\nThe end\u2019s near, caf\u00e9 {i}!' for i in range(200)
]


def prepare(name, out_dir, *inputs, **options):
    """Run data/NAME/prepare.py in this process; returns its meta.json, read back."""
    argv = [f'--out_dir={out_dir}', *(['--input', *map(str, inputs)] if inputs else [])]
    importlib.import_module(f'data.{name}.prepare').main(
        argv + [f'--{key}={value}' for key, value in options.items()]
    )
    meta = folder.read_meta(out_dir)
    for split in folder.SPLITS:
        data = (Path(out_dir) / f'{split}.bin').read_bytes()
        ids = np.frombuffer(data, np.dtype(meta['dtype']).newbyteorder('<'))
        assert len(ids) == meta['tokens'][split]
        assert ids.max() == meta['max_id'][split] < meta['vocab_size']
        assert hashlib.sha256(data).hexdigest() == meta['sha256'][split]
    assert {path.name for path in Path(out_dir).iterdir()} == {*BINS, 'meta.json'}
    return meta


def contents(path):
    return {name: (Path(path) / name).read_bytes() for name in (*BINS, 'meta.json')}


def ids_of(path, split):
    meta = folder.read_meta(path)
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    return np.fromfile(Path(path) / f'{split}.bin', dtype).tolist()


def documents(path, split):
    """The documents of a bin, taken apart at its end-of-text tokens."""
    gpt2 = tokenizer.from_description(folder.read_meta(path)['tokenizer'])
    parts, part = [], []
    for i in ids_of(path, split):
        if i == gpt2.eot:
            parts.append(gpt2.decode(part))
            part = []
        else:
            part.append(i)
    assert not part, 'the last document does not end'
    return parts


def write_jsonl(path, texts):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts), encoding='utf-8')
    return path


def run(*args, cwd, **env):
    command, env = [sys.executable, *map(str, args)], {**os.environ, **env}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture
def stories(tmp_path):
    return write_jsonl(tmp_path / 'stories.jsonl', STORIES)


# ---- the data sets


def test_characters_are_split_by_position(tmp_path):
    text = (
        'First Citizen:\nBefore we proceed any further, hear me speak. caf\u00e9 \U0001f600\n' * 50
    )
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    meta = prepare('shakespeare_char', tmp_path / 'out', tmp_path / 'in.txt')
    assert meta['tokenizer'] == {'kind': 'char', 'chars': sorted(set(text))}
    assert meta['vocab_size'] == len(set(text)) and meta['dtype'] == 'uint16'
    chars = tokenizer.from_description(meta['tokenizer'])
    n = int(len(text) * 0.9)
    assert chars.decode(ids_of(tmp_path / 'out', 'train')) == text[:n]
    assert chars.decode(ids_of(tmp_path / 'out', 'val')) == text[n:]


def test_shakespeare_has_no_end_of_text(tmp_path):
    text = 'To be, or not to be.\n\nThat is   the question. <|endoftext|>\n' * 30
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    prepare('shakespeare', tmp_path / 'out', tmp_path / 'in.txt')
    gpt2, n = tokenizer.from_description({'kind': 'gpt2'}), int(len(text) * 0.9)
    assert ids_of(tmp_path / 'out', 'train') == gpt2.encode(text[:n])
    assert ids_of(tmp_path / 'out', 'val') == gpt2.encode(text[n:])


@pytest.mark.parametrize('kind', ['jsonl', 'txt', 'parquet'])
def test_formats_hold_the_same_documents(tmp_path, stories, kind):
    path = tmp_path / f'stories.{kind}'
    if kind == 'txt':
        path.write_text('\n<|endoftext|>\n'.join(STORIES) + '\n<|endoftext|>\n', encoding='utf-8')
    if kind == 'parquet':
        pyarrow = pytest.importorskip('pyarrow')
        table = pyarrow.table({'n': range(len(STORIES)), 'text': STORIES})
        pytest.importorskip('pyarrow.parquet').write_table(table, path)
    meta = prepare('tinystories', tmp_path / 'out', path)
    train, val = documents(tmp_path / 'out', 'train'), documents(tmp_path / 'out', 'val')
    assert val == STORIES[2357 % 200 :: 200]
    assert train == [text for text in STORIES if text not in val]
    assert meta['source']['documents'] == {'train': len(train), 'val': len(val)}
    assert meta['source']['files'] == {'train': [{'name': path.name, 'bytes': path.stat().st_size}]}


def test_given_validation_files(tmp_path, stories):
    val = write_jsonl(tmp_path / 'val.jsonl', ['only me', 'and me'])
    prepare('openwebtext', tmp_path / 'out', stories, val_input=val)
    assert documents(tmp_path / 'out', 'train') == STORIES
    assert documents(tmp_path / 'out', 'val') == ['only me', 'and me']
    with pytest.raises(UserError, match='is in --input too'):
        prepare('openwebtext', tmp_path / 'out', stories, val_input=f'{tmp_path}/*.jsonl')


@pytest.mark.parametrize('name', ['openwebtext', 'tinystories', 'pystdlib_char'])
@pytest.mark.parametrize('n', [2, 3])
def test_a_set_of_few_documents_has_one_for_validation(tmp_path, name, n):
    meta = prepare(name, tmp_path / 'out', write_jsonl(tmp_path / 'in.jsonl', STORIES[:n]))
    assert meta['source']['documents'] == {'train': n - 1, 'val': 1}


def test_a_single_document_is_split_by_position(tmp_path):
    text = 'one two three four\n' * 1000
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    prepare('openwebtext', tmp_path / 'out', tmp_path / 'in.txt', val_fraction=0.25)
    gpt2 = tokenizer.from_description({'kind': 'gpt2'})
    assert gpt2.decode(ids_of(tmp_path / 'out', 'train')) == text[: int(len(text) * 0.75)]
    assert documents(tmp_path / 'out', 'val') == [text[int(len(text) * 0.75) :]]


def test_options_that_choose_documents(tmp_path, stories):
    prepare('openwebtext', tmp_path / 'out', stories, val_fraction=0.1, seed=13, max_docs=50)
    assert documents(tmp_path / 'out', 'val') == STORIES[3:50:10]
    assert documents(tmp_path / 'out', 'train') == [
        text for i, text in enumerate(STORIES[:50]) if i % 10 != 3
    ]


def test_end_of_text_inside_a_document_is_ordinary_text(tmp_path):
    texts = ['a <|endoftext|> b', 'c', '', '<|endoftext|>']
    prepare('openwebtext', tmp_path / 'out', write_jsonl(tmp_path / 'in.jsonl', texts), seed=0)
    assert documents(tmp_path / 'out', 'train') == texts[1:]
    assert documents(tmp_path / 'out', 'val') == texts[:1]


def test_standard_library(tmp_path, monkeypatch):
    script = importlib.import_module('data.pystdlib_char.prepare')
    files = {
        'b.py': b'x = 1\r\n' * 9,
        'a/z.py': b'# a\n' * 9,
        'a/bad.py': b'\xff',
        'a/cafe.py': 'caf\u00e9'.encode(),
        'test/t.py': b'!',
        'a/site-packages/s.py': b'!',
        'c.txt': b'!',
    }
    for name, text in files.items():
        (tmp_path / 'lib' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'lib' / name).write_bytes(text)
    assert list(script.modules(tmp_path / 'lib')) == [('# a\n' * 9, True), ('x = 1\n' * 9, True)]
    monkeypatch.setattr(script.sysconfig, 'get_path', lambda name: str(tmp_path / 'lib'))
    meta = prepare('pystdlib_char', tmp_path / 'out')
    assert meta['source']['documents'] == {'train': 1, 'val': 1}


def test_the_real_standard_library_is_enough():
    script = importlib.import_module('data.pystdlib_char.prepare')
    pieces = list(islice(script.download(None)[0]['train'](), 20))
    assert len(pieces) == 20
    assert set(''.join(text for text, _ in pieces).encode()) <= script.VOCABULARY


# ---- downloads (all of them simulated)


def test_shakespeare_download(tmp_path, monkeypatch):
    text = b'Once more unto the breach.\n' * 20
    script = importlib.import_module('data.shakespeare.prepare')
    monkeypatch.setattr(download.urllib.request, 'urlopen', lambda url, timeout: io.BytesIO(text))
    with pytest.raises(UserError, match='SHA-256 differs'):
        prepare('shakespeare_char', tmp_path / 'out')
    monkeypatch.setattr(script, 'SHA256', hashlib.sha256(text).hexdigest())
    assert sum(prepare('shakespeare_char', tmp_path / 'out')['tokens'].values()) == len(text)


def test_no_network(tmp_path, monkeypatch):
    def fail(url, timeout):
        raise urllib.error.URLError('no route')

    monkeypatch.setattr(download.urllib.request, 'urlopen', fail)
    with pytest.raises(UserError, match='cannot be downloaded.*--input'):
        prepare('shakespeare', tmp_path / 'out')
    assert not list((tmp_path / 'out').iterdir())


@pytest.fixture
def hub(monkeypatch):
    """A hub whose every data set has these stories, at the commit named like the revision."""
    datasets = pytest.importorskip('datasets')
    huggingface_hub = pytest.importorskip('huggingface_hub')
    info = type('Info', (), {})

    def dataset_info(self, name, revision):
        if revision == 'nowhere':
            raise ConnectionError('no route')
        info.sha = f'commit-of-{revision}'
        return info

    def load_dataset(name, revision, num_proc):
        assert revision.startswith('commit-of-')
        return {
            split: datasets.Dataset.from_dict({'text': texts})
            for split, texts in (('train', STORIES * 20), ('validation', STORIES[:9]))
        }

    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', dataset_info)
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)


def test_tinystories_has_its_own_splits(tmp_path, hub):
    meta = prepare('tinystories', tmp_path / 'out', revision='v1', max_docs=30)
    assert documents(tmp_path / 'out', 'train') == STORIES[:30]
    assert documents(tmp_path / 'out', 'val') == STORIES[:9]
    assert meta['source']['hub'] == 'roneneldan/TinyStories'
    assert meta['source']['commit'] == 'commit-of-v1'


def test_openwebtext_is_split_as_nanogpt_does(tmp_path, hub):
    prepare('openwebtext', tmp_path / 'out')
    # what train_test_split draws; it holds out the first 0.0005
    order = np.random.default_rng(2357).permutation(4000)
    assert documents(tmp_path / 'out', 'val') == [STORIES[i % 200] for i in order[:2]]
    assert documents(tmp_path / 'out', 'train') == [STORIES[i % 200] for i in order[2:]]


def test_hub_that_cannot_be_reached(tmp_path, hub):
    with pytest.raises(
        UserError, match="TinyStories at 'nowhere' cannot be downloaded.*no route.*--input"
    ):
        prepare('tinystories', tmp_path / 'out', revision='nowhere')


# ---- what users get wrong


@pytest.mark.parametrize(
    'name, data, message',
    [
        ('empty.txt', b'', 'too little text: train has 0 and val has 0 tokens.*at least 2'),
        ('short.txt', b'abc', 'too little text: val has 1 tokens'),
        ('empty.jsonl', b'\n\n', 'too little text'),
        (
            'latin.txt',
            b'x' * 2**20 + b'na\xefve',
            r'latin.txt: byte 1048578 is not utf-8.*--encoding=latin-1',
        ),
        ('split.txt', b'x' * (2**20 - 1) + b'\xc3', 'split.txt: byte 1048575 is not utf-8'),
        ('latin.jsonl', b'{"text": "ok"}\n{"text": "\xe9"}', 'latin.jsonl: byte 25 is not utf-8'),
        (
            'utf16.txt',
            'hello world'.encode('utf-16') * 20,
            'utf16.txt: byte 0 is not utf-8.*--encoding=utf-16',
        ),
        (
            'utf16le.txt',
            'hello world'.encode('utf-16-le') * 20,
            r'utf16le.txt: byte 1 is not utf-8 text \(a zero\).*--encoding=utf-16',
        ),
        ('zero.txt', b'x' * 2**20 + b'ab\0', 'zero.txt: byte 1048578 is not utf-8'),
        ('marked.txt', b'\xef\xbb\xbfab\xff', 'marked.txt: byte 5 is not utf-8'),
        ('bad.jsonl', b'{"text": "a"}\n\n{"text": \n', 'bad.jsonl:3: not valid JSON'),
        ('deep.jsonl', b'[' * 100000, 'deep.jsonl:1: not valid JSON'),
        ('list.jsonl', b'["a"]', "list.jsonl:1: no field 'text'"),
        ('field.jsonl', b'{"text": "a"}\n{"txt": "a"}', "field.jsonl:2: no field 'text'"),
        ('number.jsonl', b'{"text": 3}', "number.jsonl:1: no field 'text' with a string"),
        ('not.parquet', b'PAR0', 'not.parquet: not a readable parquet file'),
        (
            'novel.docx',
            b'x',
            'novel.docx: files of this kind are not read; allowed are .txt, .jsonl, .parquet',
        ),
    ],
)
def test_bad_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        prepare('shakespeare_char', tmp_path / 'out', tmp_path / name)
    assert not list((tmp_path / 'out').iterdir())


def test_bad_parquet_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    parquet.write_table(pyarrow.table({'a': ['x'], 'b': ['y']}), tmp_path / 'other.parquet')
    with pytest.raises(UserError, match="no column 'text'; it has a, b"):
        prepare('openwebtext', tmp_path / 'out', tmp_path / 'other.parquet')
    parquet.write_table(pyarrow.table({'text': ['x', None]}), tmp_path / 'null.parquet')
    with pytest.raises(UserError, match='row 1: .*must hold strings, not None'):
        prepare('openwebtext', tmp_path / 'out', tmp_path / 'null.parquet')


def test_bad_inputs_and_options(tmp_path, stories):
    (tmp_path / 'none').mkdir()
    for name, message in [
        ('missing.txt', 'missing.txt: no such file'),
        (tmp_path / 'none', 'no file there matches'),
        (f'{tmp_path}/*.md', 'no file there matches'),
    ]:
        with pytest.raises(UserError, match=message):
            prepare('tinystories', tmp_path / 'out', name)
    for key, value, message in [
        ('num_proc', 0, 'at least 1'),
        ('max_docs', 0, 'at least 1'),
        ('val_fraction', 0, 'above 0'),
        ('val_fraction', 0.9, 'at most 0.5'),
        ('encoding', 'utf-9', 'unknown to Python'),
        ('encoding', 'zip', 'unknown to Python'),
        ('encoding', 'undefined', 'unknown to Python'),
        ('encoding', 'punycode', 'is not punycode text'),
        ('encoding', 'utf-16', 'is not utf-16 text'),
        ('nproc', 1, 'num_proc'),
    ]:
        with pytest.raises(UserError, match=message):
            prepare('tinystories', tmp_path / 'out', stories, **{key: value})


def test_options_without_effect(tmp_path, stories):
    with pytest.raises(UserError, match='--revision has no effect here'):
        prepare('tinystories', tmp_path / 'out', stories, revision='v1')
    for name, key in [
        ('tinystories', 'seed'),
        ('tinystories', 'encoding'),
        ('shakespeare_char', 'seed'),
        ('pystdlib_char', 'revision'),
        ('pystdlib_char', 'val_input'),
    ]:
        with pytest.raises(UserError, match=f'--{key} has no effect here'):
            prepare(name, tmp_path / 'out', **{key: 1})


def test_folders_patterns_and_duplicates(tmp_path):
    (tmp_path / 'in' / 'deep').mkdir(parents=True)
    for name in ('b.txt', 'a.txt', 'deep/c.txt', 'deep/d.jsonl', 'README.md'):
        (tmp_path / 'in' / name).touch()

    def names(*inputs):
        paths = [f'{tmp_path}/{name}' for name in inputs]
        return [path.name for path in source.find_files(paths)]

    assert names('in') == ['a.txt', 'b.txt', 'c.txt', 'd.jsonl']
    assert names('in/b.txt', 'in/*.txt') == ['b.txt', 'a.txt']
    assert names('in/**/*.txt') == ['a.txt', 'b.txt', 'c.txt']


def test_other_encodings(tmp_path):
    text = 'na\u00efve caf\u00e9 ' * 200
    (tmp_path / 'in.txt').write_bytes(text.encode('utf-16'))
    meta = prepare('shakespeare_char', tmp_path / 'out', tmp_path / 'in.txt', encoding='utf-16')
    assert meta['tokenizer']['chars'] == sorted(set(text))
    assert sum(meta['tokens'].values()) == len(text)


def test_line_ends_are_kept_on_every_system(tmp_path):
    """Python's text mode would read all three as one, and the file would give other tokens than its
    bytes say.
    """
    text = 'one\r\ntwo\nthree\rfour ' * 50
    (tmp_path / 'in.txt').write_bytes(text.encode())
    meta = prepare('shakespeare_char', tmp_path / 'out', tmp_path / 'in.txt')
    chars = tokenizer.from_description(meta['tokenizer'])
    assert chars.decode(ids_of(tmp_path / 'out', 'train') + ids_of(tmp_path / 'out', 'val')) == text
    (tmp_path / 'in.jsonl').write_bytes(b'{"text": "a\\r\\nb"}\r\n\r\n{"text": "c"}\r\n')
    prepare('tinystories', tmp_path / 'lines', tmp_path / 'in.jsonl')
    assert documents(tmp_path / 'lines', 'train') + documents(tmp_path / 'lines', 'val') in (
        ['a\r\nb', 'c'],
        ['c', 'a\r\nb'],
    )


@pytest.mark.parametrize(
    'name, data',
    [('in.txt', b'abc' * 99), ('in.jsonl', b'{"text": "abc"}\n{"text": "abcabcabcabccba"}\n')],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, data):
    """Windows editors put it in front; as a character it would be in the vocabulary, or make the
    first line invalid JSON.
    """
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf' + data)
    meta = prepare('shakespeare_char', tmp_path / 'out', tmp_path / name)
    assert meta['tokenizer']['chars'] == list('abc')
    (tmp_path / 'bad.txt').write_bytes(b'\xef\xbb\xbfab\xff')
    with pytest.raises(UserError, match='bad.txt: byte 5 is not utf-8'):
        prepare('shakespeare_char', tmp_path / 'out', tmp_path / 'bad.txt')


@pytest.mark.parametrize('val_fraction', [1e-320, 1e-12, 1e-3])
def test_a_val_fraction_of_nothing(tmp_path, val_fraction, stories):
    (tmp_path / 'in.txt').write_text('abc' * 100, encoding='utf-8')
    with pytest.raises(
        UserError, match='too little text: val has [01] tokens.*larger --val_fraction'
    ):
        prepare(
            'shakespeare_char', tmp_path / 'out', tmp_path / 'in.txt', val_fraction=val_fraction
        )
    meta = prepare('tinystories', tmp_path / 'stories', stories, val_fraction=val_fraction)
    assert meta['source']['documents']['val'] == 1


def test_half_a_character_in_json(tmp_path):
    (tmp_path / 'in.jsonl').write_text(
        '{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00b"}\n', encoding='utf-8'
    )
    meta = prepare('pystdlib_char', tmp_path / 'out', tmp_path / 'in.jsonl')
    assert meta['tokenizer']['chars'] == ['a', 'b', '\ufffd', '\U0001f600']


def test_large_vocabularies_take_four_bytes(tmp_path):
    text = ''.join(chr(i) for i in range(0x100, 0x14000) if not 0xD800 <= i < 0xE000) * 2
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    meta = prepare('shakespeare_char', tmp_path / 'out', tmp_path / 'in.txt')
    assert meta['dtype'] == 'uint32' and meta['max_id']['train'] == meta['vocab_size'] - 1 > 65535
    chars = tokenizer.from_description(meta['tokenizer'])
    assert chars.decode(ids_of(tmp_path / 'out', 'train')) == text[: int(len(text) * 0.9)]
    assert [folder.token_dtype(n) for n in (65535, 65536)] == ['uint16', 'uint32']


def test_ids_that_do_not_fit_are_refused(tmp_path):
    part = writer.Bin(tmp_path / 'x.bin', 'uint16', np.ones(5, int))
    part.append(np.array([0, 4], np.uint32))
    with pytest.raises(UserError, match='token id 65536 does not fit'):
        part.append(np.array([0, 65536], np.uint32))
    part.file.close()
    assert (tmp_path / 'x.bin').read_bytes() == b'\0\0\4\0'


# ---- streams, processes, interruptions


def test_the_bytes_do_not_depend_on_num_proc_or_chunks(tmp_path, stories, monkeypatch):
    prepare('tinystories', tmp_path / 'one', stories, num_proc=1)
    monkeypatch.setattr(encoder, 'CHUNK', 500)
    monkeypatch.setattr(source, 'BLOCK', 100)
    for num_proc in (1, 3):
        prepare('tinystories', tmp_path / 'many', stories, num_proc=num_proc)
        assert contents(tmp_path / 'many') == contents(tmp_path / 'one')


def test_a_long_text_is_cut_into_pieces_with_the_same_tokens(tmp_path, monkeypatch):
    text = "It's   the end,\n\n\twe'll say: \u00e9t\u00e9!  \n" * 200 + 'x' * 900
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    monkeypatch.setattr(source, 'BLOCK', 37)
    monkeypatch.setattr(source, 'LONGEST', 1000)
    monkeypatch.setattr(encoder, 'CHUNK', 200)
    val = write_jsonl(tmp_path / 'val.jsonl', ['a', 'b'])
    prepare('openwebtext', tmp_path / 'out', tmp_path / 'in.txt', val_input=val, num_proc=1)
    gpt2 = tokenizer.from_description({'kind': 'gpt2'})
    assert ids_of(tmp_path / 'out', 'train') == gpt2.encode(text) + [gpt2.eot]


def test_documents_of_several_pieces_stay_whole():
    def pieces():
        return iter([('ab', False), ('cd', True), ('ef', False), ('gh', True), ('ij', True)])

    assert list(source.first_documents(pieces, 1)()) == [('ab', False), ('cd', True)]
    assert list(holdout.split_by_document(pieces, 2, 0)) == [
        ('val', 'ab', False),
        ('val', 'cd', True),
        ('train', 'ef', False),
        ('train', 'gh', True),
        ('val', 'ij', True),
    ]
    assert list(holdout.split_by_position(pieces, 3)) == [
        ('train', 'ab', False),
        ('train', 'c', False),
        ('val', 'd', True),
        ('val', 'ef', False),
        ('val', 'gh', True),
        ('val', 'ij', True),
    ]


def test_a_bin_is_continued_after_the_bytes_to_keep(tmp_path):
    (tmp_path / 'x.bin').write_bytes(b'\3\0\1\0\2')
    part = writer.Bin(tmp_path / 'x.bin', 'uint16', np.ones(9, int), keep=2)
    part.append(np.empty(0, np.uint32))
    assert part.sync() == 2 and (part.tokens, part.max_id) == (1, 3)
    part.file.close()
    assert (tmp_path / 'x.bin').read_bytes() == b'\3\0'


def test_few_items_are_in_flight():
    pulled = count(1)
    items = (next(pulled) for _ in range(100))
    with ThreadPoolExecutor(3) as pool:
        for done, result in enumerate(encoder.ordered_map(pool, lambda x: -x, items, 6), 1):
            assert result == -done
            ahead = next(pulled) - 1 - done
            pulled = count(done + ahead + 1)
            assert ahead <= 6


def test_a_killed_tokenizing_process_is_told_and_the_next_run_goes_on(
    tmp_path, stories, monkeypatch, capsys
):
    ordered_map = encoder.ordered_map

    def killed(pool, *args):
        yield from islice(ordered_map(pool, *args), 3)
        pool.submit(os._exit, 1).result()

    prepare('tinystories', tmp_path / 'whole', stories, num_proc=1)
    monkeypatch.setattr(encoder, 'CHUNK', 500)
    monkeypatch.setattr(writer, 'SAVE_EVERY', 0)
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match='process was killed.*lower --num_proc'),
    ):
        patch.setattr(encoder, 'ordered_map', killed)
        prepare('tinystories', tmp_path / 'out', stories, num_proc=2)
    assert not any((tmp_path / 'out').glob('*.bin'))
    prepare('tinystories', tmp_path / 'out', stories, num_proc=1)
    assert 'continuing the unfinished preparation' in capsys.readouterr().out
    assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')


def test_tokenizing_processes_end_with_a_killed_parent(tmp_path):
    """Otherwise they would wait for work for ever."""
    text = 'a story of a dog and a cat\n<|endoftext|>\n' * 600_000
    (tmp_path / 'in.txt').write_text(text, encoding='utf-8')
    command = [sys.executable, 'data/tinystories/prepare.py', '--num_proc=2']
    command += ['--input', tmp_path / 'in.txt', '--out_dir', tmp_path / 'out']
    part = tmp_path / 'out' / 'train.bin.part'
    # the workers hold the pipe, too
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        while not part.exists() or not part.stat().st_size:
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
        parent.communicate(timeout=20)


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, 'CHUNK', 2**16)
    # 22 MB, 44 MB of ids
    (tmp_path / 'in.txt').write_text('never mind the length\n' * 10**6, encoding='utf-8')
    tracemalloc.start()
    pieces = holdout.split_by_position(lambda: source.read_files([tmp_path / 'in.txt']), 2 * 10**7)
    chars = tokenizer.CharTokenizer(sorted(set('never mind the length\n')))
    writer.write(tmp_path, chars, pieces, {})
    peak = tracemalloc.get_traced_memory()[1]  # numpy's arrays included
    tracemalloc.stop()
    assert 2**20 < peak < 60 * 2**20, peak


KILLED = """
import os, signal, sys
from nanonag.data import encoder, writer
from data.tinystories.prepare import main
encoder.CHUNK, writer.SAVE_EVERY = 500, 0
save, append = writer.write_json, writer.Bin.append

def save_once(path, value):
    save(path, value)
    if value['pieces'] > 100:
        writer.SAVE_EVERY, writer.Bin.append = 1e9, append_and_die

def append_and_die(self, ids):
    append(self, ids)
    self.file.flush()  # on the disk, but in no record
    if self.path_count() > 3:
        os.kill(os.getpid(), signal.SIGKILL)

calls = []
writer.Bin.path_count = lambda self: calls.append(1) or len(calls)
writer.write_json = save_once
main(sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='needs SIGKILL')
def test_a_killed_preparation_is_continued_to_the_same_bytes(tmp_path, stories, capsys):
    prepare('tinystories', tmp_path / 'whole', stories)
    arguments = ['--input', stories, '--out_dir', tmp_path / 'out', '--num_proc=1']
    done = run('-c', KILLED, *arguments, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = {path.name for path in (tmp_path / 'out').iterdir()}
    assert names == {'progress.json.part', 'train.bin.part', 'val.bin.part'}
    progress = json.loads((tmp_path / 'out' / writer.PROGRESS).read_text(encoding='utf-8'))
    assert 100 < progress['pieces'] < 200
    assert (tmp_path / 'out' / 'train.bin.part').stat().st_size > progress['bytes']['train']
    shutil.copytree(tmp_path / 'out', tmp_path / 'other')

    prepare('tinystories', tmp_path / 'out', stories)
    assert 'continuing the unfinished preparation' in capsys.readouterr().out
    assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')

    write_jsonl(stories, STORIES[::-1])
    prepare('tinystories', tmp_path / 'other', stories)
    assert 'starting over' in capsys.readouterr().out
    prepare('tinystories', tmp_path / 'whole', stories)
    assert contents(tmp_path / 'other') == contents(tmp_path / 'whole')


def test_a_failed_preparation_leaves_an_earlier_one_alone(tmp_path, stories):
    prepare('tinystories', tmp_path / 'out', stories)
    before = contents(tmp_path / 'out')
    (tmp_path / 'bad.jsonl').write_text('{', encoding='utf-8')
    with pytest.raises(UserError, match='bad.jsonl:1'):
        prepare('tinystories', tmp_path / 'out', stories, tmp_path / 'bad.jsonl', seed=1)
    assert contents(tmp_path / 'out') == before


def test_a_full_disk_is_no_traceback(tmp_path, stories, monkeypatch):
    def full(self, ids):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(writer.Bin, 'append', full)
    with pytest.raises(UserError, match='No space left on device'):
        prepare('tinystories', tmp_path / 'out', stories)


# ---- the command line


def test_the_script_runs_anywhere_under_the_c_locale(tmp_path):
    script = ROOT / 'data' / 'shakespeare_char' / 'prepare.py'
    c_locale = {'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0'}
    (tmp_path / 'in.txt').write_text('na\u00efve \u4f60\u597d\n' * 99, encoding='utf-8')
    done = run(
        '-X', 'utf8=0', script, '--input', 'in.txt', '--out_dir', 'out', cwd=tmp_path, **c_locale
    )
    assert done.returncode == 0, done.stderr
    assert '\u4f60' in folder.read_meta(tmp_path / 'out')['tokenizer']['chars']
    done = run('-X', 'utf8=0', script, '--input', 'nowhere.txt', cwd=tmp_path, **c_locale)
    assert done.returncode == 2
    assert done.stderr.startswith('error: --input nowhere.txt: no such file')


@pytest.mark.parametrize(
    'name', ['openwebtext', 'pystdlib_char', 'shakespeare', 'shakespeare_char', 'tinystories']
)
def test_help(tmp_path, name):
    done = run(ROOT / 'data' / name / 'prepare.py', '--help', cwd=tmp_path)
    assert done.returncode == 0
    assert f'python data/{name}/prepare.py' in done.stdout
    assert '--max_docs' in done.stdout


# ---- meta.json from a stranger

META = {
    'version': 1,
    'tokenizer': {'kind': 'char', 'chars': ['a', 'b']},
    'vocab_size': 2,
    'dtype': 'uint16',
    'tokens': {'train': 9, 'val': 3},
    'max_id': {'train': 1, 'val': 0},
    'sha256': {'train': 'a' * 64, 'val': '0' * 64},
    'source': {},
}


def test_read_meta(tmp_path):
    (tmp_path / 'meta.json').write_text(json.dumps(META), encoding='utf-8')
    assert folder.read_meta(tmp_path) == folder.read_meta(str(tmp_path)) == META


@pytest.mark.parametrize(
    'key, value, message',
    [
        ('version', 2, 'version must be 1'),
        ('version', True, 'version'),
        ('source', 'x', 'source'),
        ('tokenizer', {'kind': 'x'}, 'tokenizer description'),
        ('vocab_size', 3, "vocab_size must be the tokenizer's 2"),
        ('vocab_size', 2.0, 'vocab_size'),
        ('dtype', 'uint32', "dtype must be 'uint16'"),
        ('dtype', 'object', 'dtype'),
        ('dtype', ['uint16'], 'dtype'),
        ('tokens', {'train': 9}, 'tokens must be an object'),
        ('tokens', [9, 3], 'tokens'),
    ],
)
def test_meta_with_a_wrong_entry(tmp_path, key, value, message):
    (tmp_path / 'meta.json').write_text(json.dumps({**META, key: value}), encoding='utf-8')
    with pytest.raises(UserError, match=f'meta.json: .*{message}'):
        folder.read_meta(tmp_path)


@pytest.mark.parametrize(
    'key, value',
    [
        ('tokens', 0),
        ('tokens', -9),
        ('tokens', 2**60),
        ('tokens', 1e30),
        ('tokens', float('nan')),
        ('tokens', '9'),
        ('max_id', 2),
        ('max_id', -1),
        ('max_id', None),
        ('sha256', 'A' * 64),
        ('sha256', 'a' * 63),
        ('sha256', ['a'] * 64),
    ],
)
def test_meta_with_a_wrong_entry_for_a_split(tmp_path, key, value):
    for split in folder.SPLITS:
        (tmp_path / 'meta.json').write_text(
            json.dumps({**META, key: {**META[key], split: value}}), encoding='utf-8'
        )
        with pytest.raises(UserError, match=f'meta.json: {key}.{split} must be'):
            folder.read_meta(tmp_path)


@pytest.mark.parametrize('key', META)
def test_meta_without_an_entry(tmp_path, key):
    (tmp_path / 'meta.json').write_text(
        json.dumps({k: v for k, v in META.items() if k != key}), encoding='utf-8'
    )
    with pytest.raises(UserError, match='meta.json: '):
        folder.read_meta(tmp_path)


@pytest.mark.parametrize(
    'data, message',
    [
        (b'', 'not valid JSON'),
        (b'{', 'not valid JSON'),
        (b'\x80\x04K\x01.', 'not valid JSON'),
        (b'[' * 200000, 'nested too deeply'),
        (b'[]', 'must be a JSON object'),
        (b'null', 'must be a JSON object'),
        (b'9' * 9999, 'not valid JSON|must be a JSON object'),
        (b' ' * (2**25 + 1), 'larger than'),
    ],
)
def test_meta_that_is_no_meta(tmp_path, data, message):
    (tmp_path / 'meta.json').write_bytes(data)
    with pytest.raises(UserError, match=message):
        folder.read_meta(tmp_path)


def test_missing_data_names_the_command(tmp_path, monkeypatch):
    with pytest.raises(UserError, match='run: python data.tinystories.prepare.py --out_dir='):
        folder.read_meta(tmp_path / 'tinystories')
    with pytest.raises(
        UserError, match='data/NAME/prepare.py --out_dir=.*pystdlib_char, shakespeare'
    ):
        folder.read_meta(tmp_path)
    assert folder.find_data('tinystories') == ROOT / 'data' / 'tinystories'
    assert folder.find_data('x/y') == Path('x/y')
    monkeypatch.setattr(folder, 'ROOT', tmp_path)
    (tmp_path / 'data' / 'tinystories').mkdir(parents=True)
    (tmp_path / 'data' / 'tinystories' / 'prepare.py').touch()
    with pytest.raises(UserError, match=r'No such file.*run: python data.tinystories.prepare.py$'):
        folder.read_meta(folder.find_data('tinystories'))


def test_a_misspelt_data_set_is_guessed():
    with pytest.raises(
        UserError, match=r"no data set of that name; did you mean 'pystdlib_char'\?"
    ):
        folder.read_meta('pystdlib_cha')
