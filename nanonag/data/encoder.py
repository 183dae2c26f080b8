"""Tokenizing a stream of pieces (split, text, last), in this process or in several.

Processes, because threads of one process do not scale: two give 1.3 times the speed of one. The
results come in the order of the text, so they do not depend on the number of processes, and only
few chunks are in memory at a time.
"""

import functools
import json
from collections import deque
from concurrent.futures import Future
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from nanonag.data import tokenizer
from nanonag.data.folder import SPLITS
from nanonag.workers import worker_pool

CHUNK = 2**20  # characters tokenized by one process at a time


class Encoded(NamedTuple):
    """A tokenized chunk."""

    ids: dict[str, np.ndarray]  # {split: uint32 array}
    documents: dict[str, int]  # {split: number of documents that end in the chunk}
    n_pieces: int


def encode_stream(tokens, pieces, end_documents, num_proc):
    """Yield the pieces as Encoded chunks, in order.

    tokens: the tokenizer. end_documents: whether its end-of-text token, if it has one, follows each
    document. The chunks are tokenized by `num_proc` other processes if there is more than one chunk
    and `num_proc` is more than one, else in this process.
    """
    chunks = in_chunks(pieces)
    if num_proc > 1:
        first = list(islice(chunks, 2))
        chunks = chain(first, chunks)
        if len(first) > 1:
            description = json.dumps(tokens.description)
            work = functools.partial(encode_in_worker, description, end_documents)
            with worker_pool(num_proc) as pool:
                yield from ordered_map(pool, work, chunks, 2 * num_proc)
            return
    for chunk in chunks:
        yield encode_chunk(tokens, end_documents, chunk)


def in_chunks(pieces):
    """Yield lists of pieces, of about CHUNK characters together."""
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece[1]) + 1
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_chunk(tokens, end_documents, chunk):
    """A list of pieces -> Encoded."""
    ids, documents = {}, {}
    for split in SPLITS:
        pieces = [(text, last) for name, text, last in chunk if name == split]
        documents[split] = sum(last for _, last in pieces)
        if end_documents and tokens.eot is not None:
            ids[split] = tokens.encode_documents(pieces)
        else:
            parts = [tokens.encode_array(text) for text, _ in pieces]
            ids[split] = np.concatenate([np.empty(0, np.uint32), *parts])
    return Encoded(ids, documents, len(chunk))


def encode_in_worker(description, end_documents, chunk):
    """encode_chunk in a process that gets its tokenizer's description as JSON."""
    return encode_chunk(worker_tokenizer(description), end_documents, chunk)


@functools.cache
def worker_tokenizer(description):
    """The tokenizer of a JSON description, made once in each process."""
    return tokenizer.from_description(json.loads(description))


def ordered_map(pool, function, items, ahead):
    """Yield function(item) for each item, computed by the workers of a pool, in order.

    At most `ahead` items wait behind the one whose result is yielded.
    """
    futures: deque[Future] = deque()
    for item in items:
        futures.append(pool.submit(function, item))
        if len(futures) > ahead:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()
