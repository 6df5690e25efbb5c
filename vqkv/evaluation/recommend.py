"""Which way of storing a cache suits a model: bytes by its shape, losses by page 11, on SmolLM2-135M.

``measured.csv`` is that page in short (``python -m vqkv.study.measured`` writes it), so that the answer needs no
checkout. Sizes that depend on shapes alone are measured (``footprint``). What entropy coders store depends on the text:
they are taken to need the bits that they needed on SmolLM2-135M, and as many bytes
for each number of the matrices that ``GROWS`` counts.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

import pandas as pd
from torch import nn

from vqkv import presets
from vqkv.errors import DataError
from vqkv.evaluation.capacity import GB, MOST, architecture, largest
from vqkv.evaluation.footprint import Footprint, Shape, dynamic_footprint, expected, footprint, model_shape
from vqkv.models.load import config_of
from vqkv.presets.crosses import PAYS
from vqkv.runtime.checks import check_whole

MEASURED = Path(__file__).parent / "measured.csv"
BASELINE = "fp16 (DynamicCache)"
GROWS: dict[str, Callable[[Shape], int]] = {  # numbers in a design's matrices, but for a factor
    "by head": lambda shape: shape.num_layers * shape.num_kv_heads * shape.head_dim**2,
    "predictors": lambda shape: shape.num_layers * shape.width * (3 * shape.width + 8 * shape.head_dim) // 2,
    "by layer": lambda shape: shape.num_layers * shape.width**2,
    "all layers": lambda shape: (shape.num_layers * shape.width) ** 2,
}
READS: dict[str, Callable[[Shape], int]] = {  # layers that are put together from others while one is read
    "by head": lambda shape: 0,
    "predictors": lambda shape: 1,
    "by layer": lambda shape: 1,
    "all layers": lambda shape: shape.num_layers,
}


@dataclass(frozen=True)
class Candidate:
    """A way to store a cache: page 11's system, the call that makes it, what it occupies, what was measured, and for
    how many tokens that share the side information it is meant: ``least`` or more, and fewer than ``below``."""

    system: str
    call: str
    needed: Footprint
    measured: dict[str, float]
    least: int = 0
    below: int = MOST**2

    def row(self, context: int, batch_size: int, memory: int | None) -> dict:
        """As ``recommend`` says, but for what depends on other rows."""
        needed, tokens = self.needed, context * batch_size
        stored = needed.cache_bytes(context, batch_size) + needed.side_information
        row = {"system": self.system, "preset": self.call, "bits_all_told": 8 * stored / (tokens * needed.values)}
        row |= {"bits_per_value": needed.bits_per_value, "cache_gb": stored / GB}
        row |= {"side_mb": needed.side_information / 1e6, "break_even": break_even(needed)}
        if memory is not None:
            row["longest"] = largest(lambda seq_len: needed.peak(seq_len, batch_size) <= memory)
        losses = dict(self.measured)
        return row | {"ms_per_token": losses.pop("ns_per_value") * tokens * needed.values / 1e6} | losses


def recommend(
    model_or_config,
    context: int = 8192,
    batch_size: int = 1,
    memory_gb: float | None = None,
    ms_per_token: float | None = None,
) -> pd.DataFrame:
    """Ways to store a cache of ``batch_size`` sequences of ``context`` tokens, a row each, the fewest bytes first.

    ``model_or_config``: a loaded model, a transformers config or its contents as a dict; or the name of a bundled
    model, a local folder or a model of the hub, of which the config alone is read.

    ``bits_all_told``: bits of a value with side information and exact tokens; ``bits_per_value``: of the packed tokens.
    ``cache_gb``: GB of 10^9 bytes, of which ``side_mb`` MB are side information. ``break_even``: tokens from which on
    the cache of one sequence is smaller than in fp16. ``longest``: tokens of each sequence that fit ``memory_gb``
    beside the weights. ``ms_per_token``: what a step takes longer than with ``DynamicCache`` on one CPU thread, at page
    08's times in fp32, read in place where it can be; NaN where it has none. ``kl`` (nats) and ``facts_lost`` (points
    of questions about a text): page 11's on SmolLM2-135M, four tokens exact and no window; ``evaluate`` measures yours.
    ``recommended``: fits ``memory_gb`` and ``ms_per_token``, and no other such row has no more ``bits_all_told`` and no
    more KL. Presets that cannot store the model's shape have no row.

    Raises ``DataError`` for a model that ``capacity`` refuses, a name that cannot be reached, and limits that are none.
    """
    check_whole("context", context, 1, MOST)
    check_whole("batch_size", batch_size, 1, MOST)
    for label, limit in (("memory_gb", memory_gb), ("ms_per_token", ms_per_token)):
        if limit is not None and not (type(limit) in (int, float) and 0 < limit < MOST):
            raise DataError(f"{label} {limit!r} must be a number above 0 and below 2^40, or None for no limit")
    model = architecture(config_of(model_or_config) if isinstance(model_or_config, str) else model_or_config)
    memory = None if memory_gb is None else round(memory_gb * GB)
    tokens = context * batch_size
    found = [each for each in candidates(model, tokens) if each.least <= tokens < each.below]
    table = pd.DataFrame([each.row(context, batch_size, memory) for each in found])
    table = table.sort_values(["bits_all_told", "kl"], ignore_index=True)
    fits = (table["longest"] >= context) if memory is not None else table["system"].notna()
    if ms_per_token is not None:
        fits &= table["ms_per_token"] <= ms_per_token
    return table.assign(recommended=fits & _undominated(table[fits]).reindex(table.index, fill_value=False))


def candidates(model: nn.Module, tokens: int) -> list[Candidate]:
    """Ways to store a cache of ``model``, which may lie on the ``meta`` device, of which ``tokens`` tokens share the
    side information; also those of ``best``'s designs that it would not choose for so many."""
    known = measurements()
    numbers = ["ns_per_value", "kl", "facts_lost"]
    found = [Candidate(BASELINE, "None", dynamic_footprint(model), dict.fromkeys(numbers, 0.0))]
    for _, row in known.iterrows():
        name, arguments = json.loads(row["preset"])
        meant: dict[str, int] = {}
        if name == "best":
            meant, more = _chosen_for(row["system"].split()[0], model_shape(model).width, tokens)
            arguments |= more
        try:
            preset, shape = presets.make(name, **arguments), model_shape(model)
            if row["grows"]:
                side = round(row["side_bytes_each"] * GROWS[row["grows"]](shape))
                needed = expected(model, preset, Fraction(row["bits_per_value"]), side, READS[row["grows"]](shape))
            else:
                needed = footprint(model, preset)
        except DataError:  # group sizes that do not divide head_dim
            continue
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        measured = {name: float(row[name]) for name in numbers}
        found.append(Candidate(row["system"], f"presets.{name}({shown})", needed, measured, **meant))
    return found


def _chosen_for(design: str, width: int, tokens: int) -> tuple[dict, dict]:
    """For how many tokens ``best`` is this one of its designs, and arguments that make it so."""
    first = [*PAYS].index(design)
    least, below = (width * pays for pays in [*PAYS.values(), MOST][first : first + 2])
    return {"least": least, "below": below}, {"context": min(max(1, least, tokens), below - 1, MOST), "kv_width": width}


@cache
def measurements() -> pd.DataFrame:
    """``measured.csv``: ``system``, ``preset`` (name and arguments as JSON), what its side information ``grows`` with
    (a name in ``GROWS``; empty where its size depends on shapes alone), ``bits_per_value`` and ``side_bytes_each`` of
    those that grow, and numbers as in ``recommend``."""
    return pd.read_csv(MEASURED, keep_default_na=True).fillna({"grows": ""})


def break_even(needed: Footprint) -> int:
    """Tokens from which on a cache, side information included, is smaller than in 16 bits; 0 if it is those."""
    if needed.bits_per_value >= 16:
        return 0
    return largest(lambda tokens: needed.cache_bytes(tokens) + needed.side_information >= tokens * needed.exact) + 1


def _undominated(table: pd.DataFrame) -> pd.Series:
    """Rows, sorted by bits, than which no row before loses as little."""
    least = table["kl"].cummin().shift(fill_value=math.inf)
    return table["kl"] < least
