"""Data of this package's own tasks, key-value lists, made on the fly and the same each time; see ``local/*.yaml``."""

import random

from datasets import Dataset
from transformers import AutoTokenizer

from vqkv.data.recall import RecallTask
from vqkv.errors import DataError
from vqkv.models.load import BUNDLED

CHOICES = 4
EARLIER = 8  # at most so many pairs stand before the one that is asked for


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
    return {"test": Dataset.from_list([row | {"distance": task.line * (later + 1)} for row in rows])}


def _episode(keys: list[str], values: list[str], newline: str, later: int, rng: random.Random) -> dict:
    pairs = later + 1 + rng.randrange(EARLIER + 1)
    keys, values = rng.sample(keys, pairs), rng.sample(values, pairs)
    asked = pairs - 1 - later
    listed = "".join(f"{key}{value}{newline}" for key, value in zip(keys, values, strict=True))
    wrong = rng.sample([value for value in values if value != values[asked]], CHOICES - 1)
    choices = [values[asked], *wrong]
    rng.shuffle(choices)
    return {"context": listed + keys[asked], "choices": choices, "answer": choices.index(values[asked])}
