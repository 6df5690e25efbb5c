"""Key-value recall: a list of pairs, then a key; answer its value. Measures long-range recall at known distances."""

import random
import re
from dataclasses import dataclass

import torch

from vqkv.errors import DataError

VOCABULARY = 128  # keys, and values: chance is 1 in 128; the earliest tokens of a BPE vocabulary are its most frequent
WORD = re.compile(r"^[a-z]{3,9}$")


@dataclass(frozen=True)
class RecallBatch:
    """``tokens`` (n, seq_len); ``answers`` (n, seq_len), True where the token is the answer to a query;
    ``distance`` (n, seq_len), how many tokens back its value stands in the list (0 elsewhere)."""

    tokens: torch.Tensor
    answers: torch.Tensor
    distance: torch.Tensor


class RecallTask:
    """Writes recall sequences with one token for each key and value, so that distances are exact.

    An episode is ``key value`` for each pair, one to a line, then the same lines in another order: the second time a
    key appears, its value is the answer. Keys and values are disjoint halves of the words (Zoology, arXiv 2312.04927).
    """

    def __init__(self, tokenizer):
        words = single_token_words(tokenizer)[: 2 * VOCABULARY]
        if len(words) < 64:
            raise DataError(
                f"the tokenizer has only {len(words)} whole words of one token each, and recall needs at least 64: use "
                "a model whose tokenizer has more, or another task"
            )
        self.keys, self.values = words[::2], words[1::2]
        self.newline = tokenizer.encode("\n", add_special_tokens=False)
        self.bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.line = len(self.newline) + 2

    def batch(self, seq_len: int, num_seqs: int, seed, num_pairs: int | None = None) -> RecallBatch:
        """``num_seqs`` sequences of episodes of ``num_pairs`` pairs, or (None) of random size, until they are full."""
        if num_pairs is not None and not 1 <= num_pairs <= len(self.keys):
            raise DataError(
                f"num_pairs {num_pairs} must be from 1 to {len(self.keys)}, the number of keys to draw from"
            )
        rng = random.Random(f"recall/{seed}")
        rows = [self._sequence(seq_len, rng, num_pairs) for _ in range(num_seqs)]
        tokens, answers, distance = (torch.tensor(column) for column in zip(*rows, strict=True))
        return RecallBatch(tokens, answers.bool(), distance)

    def episodes(self, num_pairs: int, num_seqs: int, seed, between: torch.Tensor | None = None) -> RecallBatch:
        """``num_seqs`` episodes of ``num_pairs`` pairs; tokens ``between`` (num_seqs, gap) stand between list and
        queries."""
        gap = 0 if between is None else between.shape[1]
        half = len(self.bos) + num_pairs * self.line
        plain = self.batch(half + num_pairs * self.line, num_seqs, seed, num_pairs)
        if between is None:
            return plain
        parts = [(plain.tokens, between), (plain.answers, torch.zeros_like(between, dtype=torch.bool))]
        tokens, answers = (torch.cat([x[:, :half], middle, x[:, half:]], 1) for x, middle in parts)
        distance = torch.cat([plain.distance[:, :half], torch.zeros_like(between), plain.distance[:, half:] + gap], 1)
        return RecallBatch(tokens, answers, distance * answers)

    def _sequence(self, seq_len, rng, num_pairs):
        tokens, distance = list(self.bos), [0] * len(self.bos)
        largest = (seq_len - len(self.bos)) // (2 * self.line)
        if largest < 2:
            raise DataError(
                f"seq_len {seq_len} is too short for a recall episode of two pairs ({4 * self.line} tokens)"
            )
        while len(tokens) < seq_len:
            pairs = num_pairs or int(2 * (min(largest, len(self.keys)) / 2) ** rng.random())
            self._episode(pairs, rng, tokens, distance)
        tokens, distance = tokens[:seq_len], distance[:seq_len]
        return tokens, [d > 0 for d in distance], distance

    def _episode(self, pairs: int, rng, tokens: list[int], distance: list[int]) -> None:
        keys, values = rng.sample(self.keys, pairs), rng.choices(self.values, k=pairs)
        value_at = {}
        order = list(range(pairs))
        for ask in (False, True):
            for i in order:
                tokens.append(keys[i])
                distance.append(0)
                distance.append(len(tokens) - value_at[i] if ask else 0)
                value_at.setdefault(i, len(tokens))
                tokens += [values[i], *self.newline]
                distance += [0] * len(self.newline)
            rng.shuffle(order)


def single_token_words(tokenizer) -> list[int]:
    """Ids of tokens that are a space and a lower-case English-looking word, in byte-level or SentencePiece form."""
    found = []
    for token, index in tokenizer.get_vocab().items():
        if token[:1] in ("Ġ", "▁") and WORD.match(token[1:]):
            found.append(index)
    return sorted(found)
