"""Key-value recall: a list of pairs, then a key; choose its value. Measures recall at given distances."""

import random
import re

VOCABULARY = 128  # keys, and values; the earliest tokens of a BPE vocabulary are its most frequent
CHOICES = 4  # of a question
EARLIER = 8
WORD = re.compile(r"^[a-z]{3,9}$")


def recall_questions(tokenizer, distance: int, num_docs: int) -> list[dict]:
    """Write the same questions each time: ``context`` (lines of a key and its value, then one of the keys), ``choices``
    (its value and those of three other keys) and ``answer``, the right one's place. A value stands ``distance`` tokens
    before its answer, as nearly as complete lines allow; ``EARLIER`` pairs at most stand before it. Keys and values are
    words of one token each, so that distances are exact (Zoology, arXiv 2312.04927)."""
    words = single_token_words(tokenizer)[: 2 * VOCABULARY]
    keys, values = ([tokenizer.decode([word]) for word in half] for half in (words[::2], words[1::2]))
    newline, rng = tokenizer.encode("\n", add_special_tokens=False), random.Random(f"recall/{distance}")
    later, rows = round(distance / (len(newline) + 2)) - 1, []
    for _ in range(num_docs):
        pairs = later + 1 + rng.randrange(EARLIER + 1)
        asked, some_keys, some_values = pairs - 1 - later, rng.sample(keys, pairs), rng.sample(values, pairs)
        lines = "".join(f"{key}{value}{tokenizer.decode(newline)}" for key, value in zip(some_keys, some_values))
        right = some_values[asked]
        choices = [right, *rng.sample([value for value in some_values if value != right], CHOICES - 1)]
        rng.shuffle(choices)
        rows.append({"context": lines + some_keys[asked], "choices": choices, "answer": choices.index(right)})
    return rows


def single_token_words(tokenizer) -> list[int]:
    """List ids of tokens that are a space and a lower-case word, in byte-level or SentencePiece form."""
    vocabulary = tokenizer.get_vocab().items()
    return sorted(index for token, index in vocabulary if token[:1] in ("Ġ", "▁") and WORD.match(token[1:]))
