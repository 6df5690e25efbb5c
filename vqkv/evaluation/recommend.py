"""What fits a memory, and which way of storing a cache suits a model: bytes by ``footprint``, losses by page 11.

``measured.csv`` is that page in short (``python -m vqkv.study.measured`` writes it), so that the answer needs no
checkout. What entropy coders store depends on the text: they are taken to need the bits that they needed on
SmolLM2-135M, and as many bytes for each number of the matrices that ``GROWS`` counts.
"""

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.errors import DataError
from vqkv.evaluation.footprint import (
    GB,
    Footprint,
    Shape,
    architecture,
    dynamic_footprint,
    expected,
    footprint,
    model_shape,
)
from vqkv.presets import Preset
from vqkv.presets.crosses import best_for
from vqkv.runtime.checks import check_whole
from vqkv.runtime.files import cache_folder

SEARCH_END = 1 << 40  # tokens or sequences, where a search ends
MEASURED_ON = "SmolLM2-135M"
MEASURED = Path(__file__).parent / "measured.csv"
BASELINE = "fp16 (DynamicCache)"
LOSSES = ["ns_per_value", "kl", "facts_lost"]
GROWS: dict[str, Callable[[Shape], int]] = {  # numbers in a design's matrices, but for a factor
    "by head": lambda shape: shape.num_layers * shape.num_kv_heads * shape.head_dim**2,
    "predictors": lambda shape: shape.num_layers * shape.width * (3 * shape.width + 8 * shape.head_dim) // 2,
    "by layer": lambda shape: shape.num_layers * shape.width**2,
    "all layers": lambda shape: (shape.num_layers * shape.width) ** 2,
}


@dataclass(frozen=True)
class Capacity:
    """The most that fits a memory: ``context`` tokens in each of as many sequences, or ``batch_size`` sequences
    of as many tokens, as were asked for; 0 if not even one does. ``kinds``: bytes by kind at ``context``.
    ``fp16_...``: the same with transformers' ``DynamicCache`` in 16 bits. ``model_limit``: positions that the model was
    made for, of which memory knows nothing; None where its config does not say."""

    model: str
    dtype: str
    preset: str
    context: int
    batch_size: int
    kinds: dict[str, int]
    bits_per_value: float
    fp16_context: int
    fp16_batch_size: int
    model_limit: int | None


def capacity(
    model_or_config, preset: Preset | Compressor, memory_gb: float, batch_size: int = 1, context: int = 8192
) -> Capacity:
    """Find the longest context of ``batch_size`` sequences, and the largest batch of ``context`` tokens each, that fit.

    ``model_or_config``: a loaded model, a transformers config or its contents as a dict; or a name, of which the config
    alone is read. ``memory_gb``: in GB of 10^9 bytes (a GPU's: ``torch.cuda.get_device_properties(0).total_memory /
    1e9``). Leave some memory for what ``vqkv.evaluation.footprint`` does not count.

    Raises ``DataError`` if the model alone does not fit, for sizes that depend on the text, and for sliding windows,
    encoders or no KV heads; ``FormatError`` for a compressor of another model.
    """
    check_whole("batch_size", batch_size, 1, SEARCH_END)
    check_whole("context", context, 1, SEARCH_END)
    if not isinstance(preset, (Preset, Compressor)):
        raise DataError(f"pass a Preset such as presets.vqllm(), or a Compressor, not {preset!r}")
    model = architecture(model_or_config)
    name = getattr(model, "vqkv_name", model.config.name_or_path or type(model).__name__)
    needed, exact, memory = footprint(model, preset), dynamic_footprint(model), round(memory_gb * GB)
    sizes = {"weights": needed.weights, "side information": needed.side_information}
    if sum(sizes.values()) > memory:
        raise DataError(
            f"{name} in {model.dtype} does not fit a memory of {memory / GB:.4g} GB: "
            f"{', '.join(f'{kind} of {size / GB:.4g} GB' for kind, size in sizes.items())}. "
            "Name more memory, fewer bits or a smaller model"
        )
    longest, most = _largest(needed, memory, batch_size, context)
    fp16_longest, fp16_most = _largest(exact, memory, batch_size, context)
    return Capacity(
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        preset=preset.name,
        context=longest,
        batch_size=most,
        kinds=needed.kinds(longest, batch_size),
        bits_per_value=needed.bits_per_value,
        fp16_context=fp16_longest,
        fp16_batch_size=fp16_most,
        model_limit=getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None),
    )


def _largest(needed: Footprint, memory: int, batch_size: int, context: int) -> tuple[int, int]:
    """Find the longest context at ``batch_size`` and the largest batch at ``context``."""
    longest = largest(lambda seq_len: needed.peak(seq_len, batch_size) <= memory)
    return longest, largest(lambda sequences: needed.peak(context, sequences) <= memory)


def largest(fits: Callable[[int], bool]) -> int:
    """Find the largest number below ``SEARCH_END`` that fits, if all smaller ones do; 0 if none."""
    return bisect_right(range(1, SEARCH_END), False, key=lambda count: not fits(count))


def recommend(
    model_or_config,
    context: int = 8192,
    batch_size: int = 1,
    memory_gb: float | None = None,
    ms_per_token: float | None = None,
) -> pd.DataFrame:
    """List ways to store a cache of ``batch_size`` sequences of ``context`` tokens, the fewest bytes first.

    ``model_or_config``: as ``capacity`` takes it.

    ``bits_with_side``: bits a value with side information and exact tokens; ``bits_per_value``: of the packed tokens.
    ``cache_gb``: GB of 10^9 bytes, of which ``side_mb`` MB are side information. ``break_even``: tokens from which on
    the cache of one sequence is smaller than in fp16. ``longest``: tokens of each sequence that fit ``memory_gb``
    with the weights. ``ms_per_token``: what a step takes longer than with ``DynamicCache`` on one CPU thread, at page
    08's times in fp32, read in place where it can be; NaN where it has none. ``kl`` (nats) and ``facts_lost`` (points
    of questions about a text): page 11's on SmolLM2-135M, four tokens exact and no window; ``evaluate`` measures yours.
    ``measured_on``: the model itself where ``vqkv compare`` has measured it.
    ``recommended``: fits ``memory_gb`` and ``ms_per_token``, and no other such row has no more ``bits_with_side`` and
    no more KL; of the rows that ``vqkv compare`` has measured, if there are any. Presets that cannot store the model's
    shape have no row.

    Raises ``DataError`` for a model that ``capacity`` refuses, and a name that cannot be reached.
    """
    check_whole("context", context, 1, SEARCH_END)
    check_whole("batch_size", batch_size, 1, SEARCH_END)
    tokens, rows = context * batch_size, []
    for system, call, needed, measured in candidates(architecture(model_or_config), tokens):
        stored = needed.cache_bytes(context, batch_size) + needed.side_information
        row = {"system": system, "preset": call, "bits_with_side": 8 * stored / (tokens * needed.values)}
        row |= {"bits_per_value": needed.bits_per_value, "cache_gb": stored / GB}
        row |= {"side_mb": needed.side_information / 1e6, "break_even": break_even(needed)}
        if memory_gb is not None:
            row["longest"], _ = _largest(needed, round(memory_gb * GB), batch_size, context)
        ms_per_step = measured.pop("ns_per_value") * tokens * needed.values / 1e6
        rows.append(row | {"ms_per_token": ms_per_step} | measured)
    table = pd.DataFrame(rows).assign(measured_on=MEASURED_ON)
    if isinstance(model_or_config, str) and compared(model_or_config).is_file():
        table = _with_own(table, model_or_config)
    table = table.sort_values(["bits_with_side", "kl"], ignore_index=True)
    fits = table["kl"].notna() if memory_gb is None else table["longest"] >= context
    if (own := table["measured_on"] != MEASURED_ON).any():  # losses of two models do not compare
        fits &= own
    if ms_per_token is not None:
        fits &= table["ms_per_token"] <= ms_per_token
    least = table["kl"].where(fits).cummin().shift(fill_value=float("inf")).ffill()  # of the rows before that fit
    return table.assign(recommended=fits & (table["kl"] < least))


def compared(model: str) -> Path:
    """Name the file in which ``vqkv compare`` keeps what it measured on a model."""
    return cache_folder("compared") / f"{model.strip('/').replace('/', '--')}.csv"


def _with_own(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Replace SmolLM2-135M's losses by the model's own, where ``vqkv compare`` has measured them."""
    for own in pd.read_csv(compared(model)).to_dict("records"):
        lost = 100 * (own["facts_long_exact"] - own["facts_long"])
        rows = table["system"].str.fullmatch(own["like"])
        table.loc[rows, ["preset", "kl", "facts_lost", "measured_on"]] = own["preset"], own["kl"], lost, model
    return table


def candidates(model, tokens: int) -> list[tuple[str, str, Footprint, dict[str, float]]]:
    """List ways to store a cache of ``model`` if ``tokens`` tokens share side information: page 11's system, the call
    that makes it, what it occupies, and what was measured."""
    shape = model_shape(model)
    ways = [(BASELINE, "None", dynamic_footprint(model), dict.fromkeys(LOSSES, 0.0))]
    for row in measurements().to_dict("records"):
        name, arguments = json.loads(row["preset"])
        if name == "best":
            if row["system"].split()[0] != best_for(tokens, shape.width):
                continue
            arguments |= {"context": min(tokens, SEARCH_END), "kv_width": shape.width}
        try:
            preset = presets.make(name, **arguments)
            if grows := row["grows"]:
                side = round(row["side_bytes_each"] * GROWS[grows](shape))
                read = {"by head": 0, "all layers": shape.num_layers}.get(grows, 1)  # to put together a layer
                needed = expected(model, preset, row["bits_per_value"], side, read)
            else:
                needed = footprint(model, preset)
        except DataError:  # group sizes that do not divide head_dim
            continue
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        ways.append((row["system"], f"presets.{name}({shown})", needed, {loss: row[loss] for loss in LOSSES}))
    return ways


@cache
def measurements() -> pd.DataFrame:
    """Read ``measured.csv``: ``system``, ``preset`` (name, arguments as JSON), what its side information ``grows`` with
    (a name in ``GROWS``; empty where its size depends on shapes alone), ``bits_per_value`` and ``side_bytes_each`` of
    those that grow, and numbers as in ``recommend``."""
    return pd.read_csv(MEASURED).fillna({"grows": ""})


def break_even(needed: Footprint) -> int:
    """Find from how many tokens on a cache with side information is smaller than in 16 bits; 0 if it is those."""
    if needed.bits_per_value >= 16:
        return 0
    return largest(lambda tokens: needed.cache_bytes(tokens) + needed.side_information >= tokens * needed.exact) + 1
