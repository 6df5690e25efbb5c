"""Figures of transformers' blog post ("Unlocking Longer Generation with Key-Value Cache Quantization"), found again: a
function for each kind of claim."""

import math

import pandas as pd
import torch

from vqkv import presets
from vqkv.evaluation.capacity import GB, capacity
from vqkv.evaluation.recommend import BASELINE
from vqkv.study.experiments.audit import shapes
from vqkv.study.experiments.audit.rows import stated
from vqkv.study.tables import published

MODEL = "Llama-2-7B"
BITS, GROUP = 4, 64
INT4 = "transformers quanto 4"


def worked_size() -> dict:
    """GB of the worked example's cache."""
    return {"recomputed": shapes.exact(MODEL).cache_bytes(int(stated("blog_worked_tokens"))) / 1e9}


def beside_weights() -> dict:
    """The same over the model's weights."""
    weights = shapes.exact(MODEL).weights
    return {"recomputed": worked_size()["recomputed"] * 1e9 / weights, "gigabytes": weights / 1e9}


def longest_context(cache: str, key: str, column: str) -> dict:
    """Thousands of tokens: counted alone (``context``), and beside what the fp16 claim leaves of the card for something
    else (``context_beside_rest``)."""
    memory, fp16_tokens = float(stated("blog_memory")), int(stated("blog_fp16_context"))
    left = memory - sum(shapes.exact(MODEL).kinds(fp16_tokens).values()) / GB
    reserve = left if column == "context_beside_rest" else 0
    found = capacity(shapes.model_of(MODEL), presets.quanto(BITS, GROUP), memory, reserve_gb=float(reserve))
    tokens = found.fp16_context if cache == BASELINE else found.context
    return {"published": int(stated(key)) / 1000, "recomputed": tokens / 1000, "left": left}


def saved_by_int4() -> dict:
    """The cache's bits against 16."""
    bits = shapes.stored(MODEL, presets.quanto(BITS, GROUP)).bits_per_value
    return {"recomputed": 16 / bits, "bits": bits}


def at_peak(table: pd.DataFrame) -> dict:
    """Memory of the whole process at its peak, prefill included."""
    peak = table.drop_duplicates("system").set_index("system")[["prefill_mb", "decode_mb"]].max(axis=1)
    return {"recomputed": peak.get("DynamicCache", math.nan) / peak.get(INT4, math.nan)}


def perplexity(table: pd.DataFrame) -> dict:
    """Over the exact cache's."""
    rows = table[table["system"] == "quanto 4"]
    return {"cases": rows["ppl"] / rows["ppl_exact"]}


def first_token(table: pd.DataFrame) -> dict:
    """Prefill of one sequence over a later token, by length of the prompt."""
    rows = table[(table["system"] == INT4) & (table["batch"] == 1)]
    ratio = rows["prefill_ms"] / rows["decode_ms"]
    return {"cases": ratio, "least": ratio.min(), "most": ratio.max()}


def fit_four_bits(sign: str) -> dict:
    """The share of codes within 4 bits, by X_q = round(X / S) - Z as written, or with a plus."""
    x, scale, zero = _groups()
    codes = (x / scale).round() + (zero if sign == "+" else -zero)
    return {"recomputed": ((codes >= 0) & (codes < 2**BITS)).double().mean().item()}


def restored() -> dict:
    """The share of values that come back within S / 2, as written and in whole numbers."""
    x, scale, zero = _groups()
    back = ((x / scale).round() - zero + zero) * scale
    return {"recomputed": ((back - x).abs() <= scale / 2 * (1 + 1e-9)).double().mean().item()}


def _groups() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random values by group, S, and Z = round(-min / S)."""
    x = torch.randn(4096, GROUP, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale = (high - low) / (2**BITS - 1)
    return x, scale, (-low / scale).round()


def outperforms() -> dict:
    """Points by which int4 is above fp16 on the data sets of its own table."""
    longbench = published("hf_longbench")
    return {"cases": longbench["quanto_int4"] - longbench["transformers_fp16"]}
