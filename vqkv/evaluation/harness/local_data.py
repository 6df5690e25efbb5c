"""Data of this package's own tasks, made on the fly from text that every installation has, and the same each time.

Held-out Python source (the ``test`` split) and key-value lists; see ``local/*.yaml``.
"""

import difflib
import random
import re
from collections.abc import Iterator

from datasets import Dataset
from transformers import AutoTokenizer

from vqkv.data.corpus import documents
from vqkv.data.recall import RecallTask
from vqkv.errors import DataError
from vqkv.models.load import BUNDLED

CORPUS = "python"
CHOICES = 4
EARLIER = 8  # at most so many pairs stand before the one that is asked for
SPLIT_POINT = re.compile(r"(?<=[\w)\]])(?=[^\w\s]|\s\S)")  # within a line, before a space or an operator


def code_cloze(num_docs: int, context_chars: int, **_) -> dict[str, Dataset]:
    """``num_docs`` documents: ``context`` (whole lines of a file, at most ``context_chars`` characters), ``choices``
    (the line that follows it and three other lines of the file, about as long), ``answer`` (the first one's place).

    The other lines do not occur in the context, or a model would know them for being repeated.
    """
    return _dataset(_balanced(_clozes(text, context_chars, index) for index, text in _sources()), num_docs)


def code_line(num_docs: int, context_chars: int, **_) -> dict[str, Dataset]:
    """``context`` (lines of a file, and the beginning of the next one) and ``target`` (the rest of that line)."""
    return _dataset(_balanced(_halves(text, context_chars, index) for index, text in _sources()), num_docs)


def recall(num_docs: int, distance: int, **about) -> dict[str, Dataset]:
    """``context`` (a list of ``key value`` lines in ``RecallTask``'s format, then a key again), ``choices`` (its value
    and those of three other keys), ``answer``; ``distance``: how many tokens before the answer its value stands, which
    is as near to the one asked for as whole lines allow. Words are single tokens of the tokenizer that lm_eval's
    ``metadata`` names (``tokenizer`` or ``pretrained``)."""
    name = about.get("tokenizer") or about.get("pretrained") or "vqkv/llama-mini"
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED.get(name, name)) if isinstance(name, str) else name
    task = RecallTask(tokenizer)
    later = round(distance / task.line) - 1  # lines between the pair and its key's return
    if later < CHOICES - 1 or later + 1 + EARLIER > len(task.values):
        raise DataError(
            f"distance {distance}: lines have {task.line} tokens and there are {len(task.values)} values, so from "
            f"{CHOICES * task.line} to {(len(task.values) - EARLIER) * task.line} is possible"
        )
    keys, values = ([tokenizer.decode([word]) for word in half] for half in (task.keys, task.values))
    newline = tokenizer.decode(task.newline)
    rng = random.Random(f"recall/{distance}")
    rows = [_episode(keys, values, newline, later, rng) for _ in range(num_docs)]
    return _dataset(iter([row | {"distance": task.line * (later + 1)} for row in rows]), num_docs)


def line_scores(doc: dict, results: list[str]) -> dict[str, float]:
    """Edit similarity (share of matching characters, ``difflib``) and exact match of a completed line."""
    found = results[0].split("\n")[0].strip()
    wanted = doc["target"].strip()
    similarity = difflib.SequenceMatcher(None, found, wanted, autojunk=False).ratio()
    return {"edit_similarity": similarity, "exact_match": float(found == wanted)}


def _sources() -> Iterator[tuple[int, str]]:
    return enumerate(documents(CORPUS, "test"))


def _dataset(rows: Iterator[dict], num_docs: int) -> dict[str, Dataset]:
    found = [row for row, _ in zip(rows, range(num_docs), strict=False)]
    if len(found) < num_docs:
        raise DataError(f"only {len(found)} of {num_docs} documents could be made: ask for fewer, or shorter contexts")
    return {"test": Dataset.from_list(found)}


def _balanced(by_file: Iterator[Iterator[dict]]) -> Iterator[dict]:
    """One document of each file, then the next of each: no file is asked more about than others."""
    waiting = list(by_file)
    while waiting:
        rest = []
        for rows in waiting:
            if (row := next(rows, None)) is not None:
                yield row
                rest.append(rows)
        waiting = rest


def _places(text: str, context_chars: int, rng: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    """(context, the next line, all other lines) at places of a file that do not overlap, in random order."""
    lines = text.splitlines()
    ends, start, size = [], 0, 0
    for i, line in enumerate(lines):
        if size + len(line) + 1 > context_chars:
            ends.append((start, i))
            start, size = i, 0
        size += len(line) + 1
    rng.shuffle(ends)
    for start, end in ends:
        if end > start and _is_code(lines[end]):
            context = "\n".join(lines[start:end]) + "\n"
            yield context, lines[end], lines[:start] + lines[end + 1 :]


def _is_code(line: str) -> bool:
    return 12 <= len(line.strip()) <= 72 and line.isascii() and not line.lstrip().startswith(("#", '"', "'"))


def _clozes(text: str, context_chars: int, index: int) -> Iterator[dict]:
    rng = random.Random(f"cloze/{context_chars}/{index}")
    for context, line, others in _places(text, context_chars, rng):
        similar = {other for other in others if _is_code(other) and abs(len(other) - len(line)) <= 6}
        alike = sorted(other for other in similar - {line} if other not in context)
        if len(alike) >= CHOICES - 1:
            choices = [line, *rng.sample(alike, CHOICES - 1)]
            rng.shuffle(choices)
            yield {"context": context, "choices": choices, "answer": choices.index(line)}


def _halves(text: str, context_chars: int, index: int) -> Iterator[dict]:
    rng = random.Random(f"line/{context_chars}/{index}")
    for context, line, _ in _places(text, context_chars, rng):
        points = [m.start() for m in SPLIT_POINT.finditer(line) if 2 <= len(line[m.start() :].strip()) <= 10]
        if points and line[: points[-1]].strip():
            yield {"context": context + line[: points[-1]], "target": line[points[-1] :]}


def _episode(keys: list[str], values: list[str], newline: str, later: int, rng: random.Random) -> dict:
    pairs = later + 1 + rng.randrange(EARLIER + 1)
    keys, values = rng.sample(keys, pairs), rng.sample(values, pairs)
    asked = pairs - 1 - later
    listed = "".join(f"{key}{value}{newline}" for key, value in zip(keys, values, strict=True))
    wrong = rng.sample([value for value in values if value != values[asked]], CHOICES - 1)
    choices = [values[asked], *wrong]
    rng.shuffle(choices)
    return {"context": listed + keys[asked], "choices": choices, "answer": choices.index(values[asked])}
