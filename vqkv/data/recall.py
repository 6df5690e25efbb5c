"""Key-value recall: a list of pairs, then a key; answer its value. Measures long-range recall at known distances."""

import random
import re
from dataclasses import dataclass

import torch

from vqkv.errors import DataError

VOCABULARY = 128  # keys, and values: chance is 1 in 128; the earliest tokens of a BPE vocabulary are its most frequent
CHOICES = 4  # of a question
EARLIER = 8
WORD = re.compile(r"^[a-z]{3,9}$")


@dataclass(frozen=True)
class RecallBatch:
    """``tokens`` (n, seq_len); ``answers`` (n, seq_len), True where the token is the answer to a query;
    ``distance`` (n, seq_len), how many tokens back its value stands in the list (0 elsewhere)."""

    tokens: torch.Tensor
    answers: torch.Tensor
    distance: torch.Tensor


class RecallTask:
    """Writes recall sequences with one token for each key and value, so that distances are exact: ``key value`` for
    each pair, one to a line, then the same lines in another order, where a key's value is the answer. Keys and values
    are disjoint halves of the words (Zoology, arXiv 2312.04927)."""

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

    def episodes(self, num_pairs: int, num_seqs: int, seed, between: torch.Tensor | None = None) -> RecallBatch:
        """``num_seqs`` episodes of ``num_pairs`` pairs; tokens ``between`` (num_seqs, gap) stand before the queries."""
        if not 1 <= num_pairs <= len(self.keys):
            raise DataError(
                f"num_pairs {num_pairs} must be from 1 to {len(self.keys)}, the number of keys to draw from"
            )
        rng = random.Random(f"recall/{seed}")
        texts = [[]] * num_seqs if between is None else between.tolist()
        rows = [self._episode(num_pairs, rng, text) for text in texts]
        tokens, distance = (torch.tensor(column) for column in zip(*rows, strict=True))
        return RecallBatch(tokens, distance > 0, distance)

    def _episode(self, pairs: int, rng, text: list[int]) -> tuple[list[int], list[int]]:
        keys, values = rng.sample(self.keys, pairs), rng.choices(self.values, k=pairs)
        tokens, order = list(self.bos), list(range(pairs))
        distance, value_at = [0] * len(tokens), dict[int, int]()
        for ask in (False, True):
            for i in order:
                value_at.setdefault(i, len(tokens) + 1)
                tokens += [keys[i], values[i], *self.newline]
                back = len(tokens) - self.line + 1 - value_at[i]
                distance += [0, back, *[0] * len(self.newline)]
            if not ask:
                tokens, distance = tokens + text, distance + [0] * len(text)
            rng.shuffle(order)
        return tokens, distance


def recall_questions(tokenizer, distance: int, num_docs: int) -> list[dict]:
    """Write the same questions each time: ``context`` (lines of a key and its value, then one of the keys), ``choices``
    (its value and those of three other keys) and ``answer``, the right one's place. A value stands ``distance`` tokens
    before its answer, as nearly as whole lines allow; ``EARLIER`` pairs at most stand before it."""
    task, rng = RecallTask(tokenizer), random.Random(f"recall/{distance}")
    keys, values = ([tokenizer.decode([word]) for word in half] for half in (task.keys, task.values))
    later, newline, rows = round(distance / task.line) - 1, tokenizer.decode(task.newline), []
    for _ in range(num_docs):
        pairs = later + 1 + rng.randrange(EARLIER + 1)
        listed, told = rng.sample(keys, pairs), rng.sample(values, pairs)
        asked = pairs - 1 - later
        lines = "".join(f"{key}{value}{newline}" for key, value in zip(listed, told, strict=True))
        choices = [told[asked], *rng.sample([value for value in told if value != told[asked]], CHOICES - 1)]
        rng.shuffle(choices)
        rows.append({"context": lines + listed[asked], "choices": choices, "answer": choices.index(told[asked])})
    return rows


def single_token_words(tokenizer) -> list[int]:
    """Ids of tokens that are a space and a lower-case English-looking word, in byte-level or SentencePiece form."""
    known = tokenizer.get_vocab().items()
    return sorted(index for token, index in known if token[:1] in ("Ġ", "▁") and WORD.match(token[1:]))
