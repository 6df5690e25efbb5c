"""Time until a stored prompt goes on: read from a file, or computed again. Systems take turns in one process."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from tqdm import tqdm

from vqkv.study.bench.caches import EVERYTHING, KeepingDecoded, Uncompressed
from vqkv.study.bench.generation import Generation

__all__ = ["EVERYTHING", "FP16", "timed_prompts"]

FP16 = "fp16 file"


def timed_prompts(model, compressors: dict, tokens: torch.Tensor, lengths: list[int], rounds: int) -> list[dict]:
    """Save, restore and go on after the first of ``tokens`` (1, seq_len), for each of ``lengths``; a row per length and
    way to store: a safetensors file of 16 bits, and ``compressors`` by label.

    Medians of ``rounds``, milliseconds: ``load_ms``; ``first_ms``, for the token after the prompt; ``ready_ms``, both.
    ``again_ms``: prompt and token computed again with transformers' cache, in the same round. Files are read while the
    operating system still holds them in memory.
    """
    ways = {FP16: Uncompressed()} | {label: KeepingDecoded(each) for label, each in compressors.items()}
    with TemporaryDirectory() as folder:
        bar = tqdm(lengths, desc="prompts", leave=False, disable=None)
        return [row for n in bar for row in _timed_prompt(model, ways, tokens[:, : n + 1], rounds, Path(folder))]


def _timed_prompt(model, ways: dict, tokens: torch.Tensor, rounds: int, folder: Path) -> list[dict]:
    for label, way in ways.items():
        stored = Generation(model, way)
        stored.prefill(tokens[:, :-1])
        way.save(stored.cache, folder / label)
    rows = []
    for turn in range(rounds + 1):  # the first warms up
        found = {label: _restored(model, way, folder / label, tokens[:, -1:]) for label, way in ways.items()}
        again = {"again_ms": Generation(model, Uncompressed()).prefill(tokens)}
        rows += [{"system": label} | row | again for label, row in found.items() if turn]
    about = {label: {"tokens": tokens.shape[1] - 1, "system": label} for label in ways}
    medians = pd.DataFrame(rows).groupby("system").median().to_dict("index")
    return [about[label] | {"file_bytes": (folder / label).stat().st_size} | medians[label] for label in ways]


def _restored(model, way, path: Path, last: torch.Tensor) -> dict[str, float]:
    """Milliseconds until the cache is back, and for the token ``last`` after it."""
    going = Generation(model, way)
    start = going.now()
    going.cache = way.load(path, model)
    load_ms, first_ms = 1e3 * (going.now() - start), going.feed(last)
    return {"load_ms": load_ms, "first_ms": first_ms, "ready_ms": load_ms + first_ms}
