"""Data of tasks that a cache can lose: what is asked for stands earlier in the context, and nowhere else.

Made on the fly from the ``test`` split of the bundled text, the same each time; see ``local/*.yaml``.
"""

import random
import re
from collections.abc import Iterator
from itertools import islice

from datasets import Dataset
from transformers import AutoTokenizer

from vqkv.data.bundled import documents
from vqkv.data.recall import single_token_words
from vqkv.errors import DataError
from vqkv.evaluation.harness.local_data import CHOICES, _balanced, _dataset
from vqkv.models.load import BUNDLED

CORPUS = "python"
FILES = 300  # of the test split; each gives a few documents
FUNCTION = re.compile(r"^def \w+\(.*?\n(?=\S|\Z)", re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r"^\s*(?:def|class)\s+(\w{5,})|^\s*(\w{5,})\s*=(?!=)", re.MULTILINE)
POINT = re.compile(r"(?<=[A-Za-z0-9])(?=[^\w\s]|\s\S)")  # where tokens of either side cannot join
LONGEST_TARGET = 12  # characters


def recall_pairs(num_docs: int, num_pairs: int, gap: int = 0, **about) -> dict[str, Dataset]:
    """``context`` (``num_pairs`` lines ``key value`` in a random order, ``gap`` lines of held-out source, then a key)
    and ``target``, its value. Keys and values are single tokens, from disjoint halves of the words (Zoology, arXiv
    2312.04927); chance is 1 in ``num_pairs`` for a model that only knows which values were listed.

    Raises ``DataError`` for a tokenizer with fewer words than that takes."""
    name = about.get("tokenizer") or about.get("pretrained") or "vqkv/llama-mini"
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED.get(name, name)) if isinstance(name, str) else name
    words = [tokenizer.decode([word]) for word in single_token_words(tokenizer)]
    if len(words) < 2 * num_pairs:
        raise DataError(
            f"the tokenizer has {len(words)} whole words, {num_pairs} pairs take {2 * num_pairs}: ask for fewer pairs"
        )
    rng = random.Random(f"recall/{num_pairs}/{gap}")
    between = _lines_between(gap, rng)
    return _dataset((_episode(words, num_pairs, next(between), rng) for _ in range(num_docs)), num_docs)


def copied(num_docs: int, between_chars: int, seen: bool = True, **_) -> dict[str, Dataset]:
    """``context`` (a function, other lines of about ``between_chars`` characters, the function again up to a place in
    it) and ``target`` (the rest of the line). With ``seen`` false the first is left out: what guessing gives."""
    rows = _balanced(_copies(text, others, between_chars, seen, index) for index, text, others in _with_others())
    return _dataset(rows, num_docs)


def names(num_docs: int, context_chars: int, **_) -> dict[str, Dataset]:
    """``context`` (lines of a file up to the use of an identifier that is defined in them, at least a quarter of
    ``context_chars`` after it was last named), ``choices`` (it and three of other files, about as long), ``answer``."""
    rows = _balanced(_uses(text, others, context_chars, index) for index, text, others in _with_others())
    return _dataset(rows, num_docs)


def _with_others() -> Iterator[tuple[int, str, str]]:
    """(index, text, the text of another file) of the first files of the test split."""
    texts = [*islice(documents(CORPUS, "test"), FILES)]
    return ((i, text, texts[i - 1]) for i, text in enumerate(texts))


def _lines_between(count: int, rng: random.Random) -> Iterator[str]:
    texts = [*islice(documents(CORPUS, "test"), FILES)] if count else []
    long = [lines for text in texts if len(lines := text.splitlines()) > count]
    while True:
        lines = rng.choice(long) if count else []
        start = rng.randrange(len(lines) - count) if count else 0
        yield "".join(line + "\n" for line in lines[start : start + count])


def _episode(words: list[str], num_pairs: int, between: str, rng: random.Random) -> dict:
    keys, values = rng.sample(words[::2], num_pairs), rng.sample(words[1::2], num_pairs)
    listed = "".join(f"{key}{value}\n" for key, value in zip(keys, values, strict=True))
    asked = rng.randrange(num_pairs)
    return {"context": listed + between + keys[asked], "target": values[asked]}


def _copies(text: str, others: str, between_chars: int, seen: bool, index: int) -> Iterator[dict]:
    rng = random.Random(f"copy/{between_chars}/{index}")
    functions = [found.group() for found in FUNCTION.finditer(text) if 200 <= len(found.group()) <= 800]
    rng.shuffle(functions)
    for function in functions:
        points = [
            place for place in range(len(function) // 2, len(function))
            if POINT.match(function, place) and 2 <= len(_rest(function, place).strip()) <= LONGEST_TARGET
        ]  # fmt: skip
        start = rng.randrange(max(1, len(others) - between_chars))
        between = others[start : start + between_chars].partition("\n")[2].rpartition("\n")[0] + "\n"
        if points:
            place = rng.choice(points)
            context = function * seen + between + function[:place]
            yield {"context": context, "target": _rest(function, place)}


def _rest(text: str, place: int) -> str:
    return text[place:].partition("\n")[0]


def _uses(text: str, others: str, context_chars: int, index: int) -> Iterator[dict]:
    rng = random.Random(f"names/{context_chars}/{index}")
    wrong = sorted({name for found in DEFINED.findall(others) for name in found if name and name not in text})
    starts = list(range(0, len(text) - context_chars, context_chars))
    rng.shuffle(starts)
    for start in starts:
        context = text[start : start + context_chars].partition("\n")[2]
        use = _last_use(context)
        if use is None:
            continue
        name, place = use
        alike = [other for other in wrong if abs(len(other) - len(name)) <= 2]
        if len(alike) >= CHOICES - 1:
            choices = [name, *rng.sample(alike, CHOICES - 1)]
            rng.shuffle(choices)
            yield {"context": context[:place], "choices": choices, "answer": choices.index(name)}


def _last_use(context: str) -> tuple[str, int] | None:
    """(identifier, place) of the last use of one that was defined, and last named a quarter of the context, before."""
    half = len(context) // 2
    defined = {name for found in DEFINED.findall(context[:half]) for name in found if name}
    uses = []
    for name in sorted(defined):
        place = re.search(rf"(?<=[(\[ .]){name}\b", context[half:])
        if place and half + place.start() - context.rindex(name, 0, half + place.start()) >= len(context) // 4:
            uses.append((half + place.start(), name))
    return max(uses)[::-1] if uses else None
