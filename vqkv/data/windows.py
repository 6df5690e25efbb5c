"""Texts -> windows of token ids, as they come."""

import random
from collections.abc import Iterator
from itertools import islice

BATCH = 64  # texts tokenised at a time


def windows(texts: Iterator[str], tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield one window a document, at a random offset; short documents are packed together, separated by EOS."""
    head, eos, buffer = _head(tokenizer), tokenizer.eos_token_id, list[int]()
    body = seq_len - len(head)
    for text in texts:
        # Tokenising a book to use one window of it would cost minutes. A token has 16 characters at most on average.
        start = rng.randrange(max(1, len(text) - 16 * seq_len))
        start = text.rfind("\n", 0, start) + 1
        buffer += _ids(tokenizer, [text[start : start + 16 * seq_len]])[0][:seq_len]
        if len(buffer) >= body:
            yield head + buffer[:body]
            buffer = []  # the rest of a cut piece would give its document a second window
        if buffer and eos is not None:
            buffer.append(eos)


def packed(texts: Iterator[str], tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield complete documents, each followed by EOS, cut into consecutive windows that start with BOS."""
    head, eos, buffer = _head(tokenizer), tokenizer.eos_token_id, list[int]()
    body = seq_len - len(head)
    while batch := [*islice(texts, BATCH)]:
        for ids in _ids(tokenizer, batch):
            buffer += ids if eos is None else [*ids, eos]
        end = len(buffer) - len(buffer) % body
        yield from (head + buffer[i : i + body] for i in range(0, end, body))
        buffer = buffer[end:]


def joined(texts: Iterator[str], tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield windows of the one text that rows, joined by blank lines, make."""
    ids = _ids(tokenizer, ["\n\n".join(texts)])[0]
    if tokenizer("a", verbose=False)["input_ids"][:1] == _head(tokenizer):
        ids = _head(tokenizer) + ids
    yield from (ids[i : i + seq_len] for i in range(0, len(ids) - seq_len + 1, seq_len))


PACKINGS = {"windows": windows, "packed": packed, "joined": joined}


def _head(tokenizer) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
