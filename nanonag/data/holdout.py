"""Which text is held out for validation: sources of pieces (text, last), as source.py describes
them, become one iterator of pieces (split, text, last), where `split` is 'train' or 'val'.
"""

from itertools import islice


def hold_out(sources, val_fraction, seed, continuous):
    """Divide text into training and validation text.

    Sources {'train': ..., 'val': ...} are divided already. Of a single one, about `val_fraction` is
    held out: by position if it is one `continuous` text or a single document, else by document, and
    then at least one. Returns an iterator of pieces (split, text, last) and the rule in words, for
    meta.json.
    """
    if 'val' in sources:
        return split_as_given(sources), 'given'
    source = sources['train']
    every = round(1 / max(val_fraction, 1e-9))
    n_documents = count_documents(source, limit=every)
    if continuous or n_documents == 1:
        n_train = int(count_characters(source) * (1 - val_fraction))
        rule = f'the first {n_train} characters train, the rest is val'
        return split_by_position(source, n_train), rule
    every = max(2, min(every, n_documents))
    rule = f'of each {every} documents, number {seed % every} (from 0) is val'
    return split_by_document(source, every, seed), rule


def split_as_given(sources):
    """Yield the pieces of sources that are splits already, {split: source}."""
    for split, source in sources.items():
        for text, last in source():
            yield split, text, last


def split_by_position(source, n_train):
    """Yield pieces whose first `n_train` characters are for training, the rest for validation."""
    remaining = n_train
    for text, last in source():
        head, tail = text[:remaining], text[remaining:]
        remaining -= len(head)
        if head:
            yield 'train', head, last and not tail
        if tail or not head:
            yield 'val', tail, last


def split_by_document(source, every, seed):
    """Yield pieces of whose documents one in `every` is for validation; `seed` tells which."""
    number = 0
    for text, last in source():
        yield 'val' if number % every == seed % every else 'train', text, last
        if last:
            number += 1


def count_documents(source, limit):
    """The number of documents of a source, counted up to `limit`."""
    ends = (last for _, last in source() if last)
    return sum(1 for _ in islice(ends, limit))


def count_characters(source):
    """The number of characters of a source."""
    return sum(len(text) for text, _ in source())
