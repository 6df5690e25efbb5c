"""Rows that the reference models learn from: source text, repeated segments, key-value recall.

Repeats (arXiv 2505.17863) and recall with keys and values from disjoint words (Zoology, arXiv 2312.04927) keep up and
sharpen the induction that the models begin with. All is a function of a seed, so that training goes on where it was.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vqkv.data.bundled import documents
from vqkv.evaluation.questions import single_token_words
from vqkv.runtime.files import replacing

CORPORA = ("python", "prose-files")
TOKENIZER_DIR = Path(__file__).parent / "tokenizer"
IGNORE = -100
COPY = 0.7  # chance that a segment is copied once more
LONGEST_SEGMENT = 21


@dataclass(frozen=True)
class Words:
    """Token ids: ``keys`` and ``values`` are disjoint halves of the tokenizer's complete words."""

    keys: np.ndarray
    values: np.ndarray
    newline: int
    bos: int

    @classmethod
    def of(cls, tokenizer) -> "Words":
        """Split all words of the tokenizer."""
        words = np.array(single_token_words(tokenizer))
        (newline,) = tokenizer.encode("\n", add_special_tokens=False)
        return cls(words[::2], words[1::2], newline, tokenizer.bos_token_id)

    @property
    def all(self) -> np.ndarray:
        """Keys, values and the newline: all that a recall sequence is made of, but for BOS."""
        return np.concatenate([self.keys, self.values, [self.newline]])


def repeats(rng: np.random.Generator, seq_len: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw (row, labels): segments of random tokens, copied until a coin ends it; labels on what is foretold."""
    row: list[int] = []
    labels: list[int] = []
    while len(row) < seq_len:
        segment = rng.choice(tokens, rng.integers(4, min(LONGEST_SEGMENT, seq_len // 2) + 1))
        row += [*segment]
        labels += [IGNORE] * len(segment)
        while len(row) < seq_len and rng.random() < COPY:
            row += [*segment]
            labels += [IGNORE, *segment[1:]]
    return np.array(row[:seq_len]), np.array(labels[:seq_len])


def far_repeat(rng: np.random.Generator, seq_len: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw (row, labels): one long segment of random tokens and its copies, half a row apart at most."""
    segment = rng.choice(tokens, rng.integers(8, seq_len // 2 + 1))
    row = np.resize(segment, seq_len)
    labels = np.where(np.arange(seq_len) >= len(segment), row, IGNORE)
    labels[:: len(segment)] = IGNORE
    return row, labels


def recall(
    rng: np.random.Generator, seq_len: int, words: Words, num_pairs: int, filler: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw (row, labels): BOS, lines of ``key value``, filler, then the lines in random order, values labelled."""
    keys, values = rng.permutation(words.keys)[:num_pairs], rng.choice(words.values, num_pairs)
    lines = np.stack([keys, values, np.full(num_pairs, words.newline)], 1)
    filler = np.empty(0, dtype=np.int64) if filler is None else np.append(filler, words.newline)
    start = 1 + lines.size + len(filler)
    rounds = math.ceil((seq_len - start) / lines.size)
    asked = np.concatenate([rng.permutation(num_pairs) for _ in range(rounds)])
    row = np.concatenate([[words.bos], lines.ravel(), filler, lines[asked].ravel()])[:seq_len]
    labels = np.full(seq_len, IGNORE)
    labels[start + 1 :: 3] = row[start + 1 :: 3]
    return row, labels


def write_stream(path: Path, tokenizer, split: str) -> None:
    """Write the token ids of every document of one split, source and prose, to a uint16 file."""
    with replacing(path) as file:
        for name in CORPORA:
            for text in tqdm(documents(name, split), desc=f"tokenise {name} {split}", unit=" documents"):
                ids = tokenizer.encode(text, add_special_tokens=False)
                file.write(np.array([tokenizer.bos_token_id, *ids], dtype=np.uint16).tobytes())


class TokenStream:
    """Windows, chunks and functions of a file of uint16 token ids."""

    def __init__(self, path: Path, tokenizer):
        self.ids = np.memmap(path, dtype=np.uint16, mode="r")
        self.bos = tokenizer.bos_token_id
        (self.newline,) = tokenizer.encode("\n", add_special_tokens=False)
        begins = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("\ndef", "\n def")]
        self.functions = np.flatnonzero(np.isin(self.ids, begins))

    def span(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Draw ``length`` consecutive ids from a random position."""
        start = rng.integers(0, len(self.ids) - length)
        return self.ids[start : start + length].astype(np.int64)

    def window(self, rng: np.random.Generator, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw (row, labels): BOS and text."""
        row = np.append(self.bos, self.span(rng, seq_len - 1))
        return row, row

    def copied(self, rng: np.random.Generator, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw (row, labels): BOS and text in which a chunk or function comes back, other text in between."""
        if rng.random() < 0.5:
            i = rng.integers(0, len(self.functions) - 1)  # from a ``def`` to the next
            start, end = self.functions[i], self.functions[i + 1]
            part = self.ids[start : min(end, start + seq_len // 3)].astype(np.int64)
        else:
            part = self.span(rng, int(rng.integers(16, seq_len // 3 + 1)))
        row = [np.array([self.bos])]
        while sum(map(len, row)) < seq_len:
            row += [self.span(rng, int(rng.integers(8, seq_len // 3 + 1))), np.array([self.newline]), part]
        tokens = np.concatenate(row)[:seq_len]
        return tokens, tokens
