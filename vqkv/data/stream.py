"""The documents of a streamed data set, in memory that does not grow with it, in an order that a seed fixes."""

import dataclasses
import random
from collections.abc import Iterator
from itertools import chain, islice

from vqkv.data.hub import HubCorpus, open_split, parsed
from vqkv.errors import DataError

ROWS = 1000  # of a block, within which documents are shuffled
CHARACTERS = 4_000_000  # after which a block ends all the same


def stream(
    corpus: HubCorpus, split: str, seed: int, shuffled: bool = True, num_docs: int | None = None, rows: int = 0
) -> Iterator[list[str]]:
    """Blocks of documents of one split, ``num_docs`` at most.

    Shuffled by ``seed``: the files, and the documents within a block of about ``rows`` rows (by default ``ROWS``),
    which takes them from several files in turn. Unshuffled: all rows in order, also empty ones.
    """
    dataset, keep = open_split(corpus, split, shuffled)
    groups = _groups(corpus, dataset, seed) if shuffled else [[dataset]]
    blocks = chain.from_iterable(_blocks(corpus, group, rows or ROWS) for group in groups)
    left = num_docs
    for number, texts in enumerate(blocks):
        chosen = [text for text in texts if keep(text)]
        if shuffled:
            random.Random(f"{seed}/{number}").shuffle(chosen)
        yield chosen[:left]
        if left is not None and (left := left - len(chosen)) <= 0:
            return


def first_text(corpus: HubCorpus, split: str) -> str:
    """The first document. Raises ``DataError`` or ``UnknownNameError`` as a stream does."""
    one_file = dataclasses.replace(corpus, open_shards=1)
    for text in chain.from_iterable(stream(one_file, split, 0, shuffled=corpus.packing != "joined", rows=8)):
        if text.strip():
            return text
    raise DataError(f"data set {corpus.where} has no text in its {split} split")


def _groups(corpus: HubCorpus, dataset, seed: int) -> list[list]:
    """The files, shuffled, in groups that are read in turn."""
    count, size = dataset.num_shards, corpus.open_shards
    order = random.Random(f"{seed}").sample(range(count), count)
    shards = [dataset.shard(num_shards=count, index=i) for i in order]
    return [shards[i : i + size] for i in range(0, count, size)]


def _blocks(corpus: HubCorpus, shards: list, rows: int) -> Iterator[list[str]]:
    """About as many rows from each file, until all have ended."""
    texts = [_texts(corpus, shard) for shard in shards]
    rows, characters = -(-rows // len(shards)), CHARACTERS / len(shards)
    while block := [text for shard in texts for text in _some(shard, rows, characters)]:
        yield block


def _some(texts: Iterator[str], count: int, characters: float) -> Iterator[str]:
    """The next ``count`` texts, or fewer that have so many characters."""
    taken = 0
    for text in islice(texts, count):
        yield text
        taken += len(text)
        if taken >= characters:
            return


def _texts(corpus: HubCorpus, shard) -> Iterator[str]:
    try:
        for row in shard:
            yield _text(corpus, parsed(row["text"], corpus) if corpus.line_by_line else row)
    except DataError:
        raise
    except Exception as error:  # the library raises as many types here as where it opens a data set
        raise DataError(
            f"data set {corpus.where} broke off ({type(error).__name__}: {str(error)[:200]}): run it again, or use a "
            "local copy, NAME@FOLDER"
        ) from error


def _text(corpus: HubCorpus, row: dict) -> str:
    if corpus.column not in row:
        raise DataError(f"data set {corpus.where} has no column {corpus.column!r}; it has {', '.join(sorted(row))}")
    text = "" if row[corpus.column] is None else row[corpus.column]
    if not isinstance(text, str):
        raise DataError(f"column {corpus.column!r} of data set {corpus.where} holds {type(text).__name__}, not text")
    return text
