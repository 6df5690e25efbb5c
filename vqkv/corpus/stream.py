"""The documents of a streamed data set in a fixed, shuffled order that can be taken up again anywhere."""

import dataclasses
import random
from collections.abc import Iterator
from itertools import chain, islice

from vqkv.corpus.hub import HubCorpus, open_split, parsed
from vqkv.errors import DataError

ROWS = 1000  # of a block, within which documents are shuffled
CHARACTERS = 4_000_000  # after which a block ends all the same


class Stream:
    """Blocks of documents (lists of str) of one split; after each, ``state`` is plain JSON that another goes on from.

    Shuffled by ``seed``: the files, and the documents within a block of about ``rows`` rows (by default ``ROWS``),
    which takes them from several files in turn. (``IterableDataset.shuffle`` loses its buffer in a saved state.)
    Unshuffled: all rows in order, also empty ones. ``num_docs``: stop after as many.
    """

    def __init__(self, corpus, split: str, seed: int, shuffled=True, num_docs=None, state=None, rows: int = 0):
        self.corpus, self.split, self.seed, self.shuffled = corpus, split, seed, shuffled
        self.num_docs, self.rows, self.line_by_line = num_docs, rows or ROWS, corpus.line_by_line
        self.state = state or {"group": 0, "positions": None, "blocks": 0, "docs": 0}

    def __iter__(self) -> Iterator[list[str]]:
        dataset, keep = open_split(self.corpus, self.split, self.shuffled)
        groups = self._groups(dataset)
        for number in range(self.state["group"], len(groups)):
            yield from self._group(groups[number], number, len(groups), keep)
            if self._enough():
                return

    def _groups(self, dataset) -> list[list]:
        """The files that are read in turn, group by group."""
        if not self.shuffled:
            return [[dataset]]
        count = dataset.num_shards
        order = random.Random(f"{self.seed}").sample(range(count), count)
        shards, size = [dataset.shard(num_shards=count, index=i) for i in order], self.corpus.open_shards
        return [shards[i : i + size] for i in range(0, count, size)]

    def _group(self, shards: list, number: int, groups: int, keep) -> Iterator[list[str]]:
        if self.state["positions"] is not None:
            for shard, position in zip(shards, self.state["positions"], strict=True):
                shard.load_state_dict(position)
        rows = [self._rows(shard) for shard in shards]
        while not self._enough() and (texts := self._block(rows)) is not None:
            positions = [shard.state_dict() for shard in shards]
            chosen = [text for text in texts if keep(text)]
            if self.shuffled:
                random.Random(f"{self.seed}/{self.state['blocks']}").shuffle(chosen)
            chosen = chosen[: None if self.num_docs is None else self.num_docs - self.state["docs"]]
            blocks, docs = self.state["blocks"] + 1, self.state["docs"] + len(chosen)
            self.state = {"group": number, "positions": positions, "blocks": blocks, "docs": docs}
            yield chosen
        if number + 1 < groups:
            self.state = self.state | {"group": number + 1, "positions": None}

    def _block(self, shards: list[Iterator]) -> list[str] | None:
        """About as many rows from each file; None when all have ended."""
        texts = []
        for shard in shards:
            taken = 0
            for row in islice(shard, -(-self.rows // len(shards))):
                texts.append(self._text(row))
                taken += len(texts[-1])
                if taken * len(shards) >= CHARACTERS:
                    break
        return texts or None

    def _rows(self, shard) -> Iterator[dict]:
        try:
            yield from shard
        except Exception as error:  # the library raises as many types here as where it opens a data set
            raise DataError(
                f"data set {self.corpus.where} broke off ({type(error).__name__}: {str(error)[:200]}): run it again, "
                "and it goes on from the last piece"
            ) from error

    def _text(self, row: dict) -> str:
        column = self.corpus.column
        if self.line_by_line:
            row = parsed(row["text"], self.corpus)
        if column not in row:
            raise DataError(f"data set {self.corpus.where} has no column {column!r}; it has {', '.join(sorted(row))}")
        text = "" if row[column] is None else row[column]
        if not isinstance(text, str):
            raise DataError(f"column {column!r} of data set {self.corpus.where} holds {type(text).__name__}, not text")
        return text

    def _enough(self) -> bool:
        return self.num_docs is not None and self.state["docs"] >= self.num_docs


def first_text(corpus: HubCorpus, split: str) -> str:
    """The first document. Raises ``DataError`` or ``UnknownNameError`` as a stream does."""
    one_file = dataclasses.replace(corpus, open_shards=1)
    for text in chain.from_iterable(Stream(one_file, split, 0, shuffled=corpus.packing != "joined", rows=8)):
        if text.strip():
            return text
    raise DataError(f"data set {corpus.where} has no text in its {split} split")
