"""What transformers' blog post says ("Unlocking Longer Generation with Key-Value Cache Quantization")."""

import math

import numpy as np
import pandas as pd
import torch

from vqkv import presets
from vqkv.experiments.audit import shapes
from vqkv.experiments.audit.rows import PARTLY, Tables, at_least, close, measured, model_names, row, untested
from vqkv.experiments.capacity import BASELINE, blog_claims
from vqkv.tables import published

MODEL = "Llama-2-7B"
BITS, GROUP = 4, 64


def rows(stated: pd.Series, tables: Tables) -> list[dict]:
    """``stated``: figures in the sources' text by key. ``tables``: this study's by name."""
    longbench = published("hf_longbench")
    scores = longbench.drop(columns="dataset").notna().to_numpy().sum()
    needs = "They need Llama-2-7B and LongBench (the harness has it: vqkv lm-eval --tasks longbench)."
    return [
        *_sizes(stated),
        *_contexts(stated),
        *_saving(stated["blog_saving"], tables),
        *_formula(),
        _outperforms(longbench),
        untested("LongBench scores", math.nan, "scores", needs, int(scores)),
        untested("slower with quantised weights and cache", stated["blog_slowdown"], "x", "That needs its GPU."),
    ]


def _sizes(stated: pd.Series) -> list[dict]:
    needed, tokens = shapes.exact(MODEL), int(stated["blog_worked_tokens"])
    size = needed.cache_bytes(tokens)
    return [
        row("Llama-2-7B's cache of 10,000 tokens", stated["blog_worked_gb"], size / 1e9, "GB",
            "2 x 2 x 32 x 32 x 128 x 10,000 bytes; the blog rounds.", rule=close(0.05)),
        row("... beside its weights: almost one third", stated["blog_share"], size / needed.weights, "share",
            f"The weights are {needed.weights / 1e9:.1f} GB in 16 bits.", otherwise=PARTLY),
    ]  # fmt: skip


def _contexts(stated: pd.Series) -> list[dict]:
    """The longest contexts: counted alone, and beside what the fp16 claim leaves of the card for something else."""
    fp16, int4 = int(stated["blog_fp16_context"]), int(stated["blog_int4_context"])
    counted = blog_claims(float(stated["blog_memory"]), int(stated["blog_worked_tokens"]), fp16, int4, "float16")
    counted = counted[counted["claim"] == "longest context"].set_index("cache")
    left = counted.loc[BASELINE, "left_gb"]
    reason = f"It fits, but {left:.0f} of 80 GB stay free of weights and cache: the blog does not say what took them."
    beside = f"If what is not weights and cache at 40K in fp16, {left:.0f} GB, stays taken: the two claims agree."
    return [
        row("largest context in fp16, 80 GB", fp16 / 1000, counted.loc[BASELINE, "context"] / 1000, "K tokens", reason,
            otherwise=PARTLY),
        row("largest context in int4, 80 GB", int4 / 1000, counted.loc["quanto 4", "context"] / 1000, "K tokens",
            reason, otherwise=PARTLY),
        row("largest context in int4, given that in fp16", int4 / 1000,
            counted.loc["quanto 4", "context_beside_rest"] / 1000, "K tokens", beside),
    ]  # fmt: skip


def _saving(saving: float, tables: Tables) -> list[dict]:
    bits = shapes.stored(MODEL, presets.quanto(BITS, GROUP)).bits_per_value
    return [
        row("memory saved by int4: the cache alone", saving, 16 / bits, "x",
            f"{bits:g} bits a value, more than claimed; the blog measures a whole GPU.", rule=at_least),
        measured(tables, "08_peak", "memory saved by int4: the process at its peak", saving, "x", _at_peak,
                 rule=at_least),
        measured(tables, "08_position", "perplexity of int4 over fp16's", 1, "x", _perplexity),
    ]  # fmt: skip


def _at_peak(table: pd.DataFrame) -> tuple[float, str]:
    peak = table.drop_duplicates("system").set_index("system")["decode_mb"]
    ratio = peak.get("DynamicCache", math.nan) / peak.get("transformers quanto 4", math.nan)
    return ratio, "transformers' own int4 cache on a CPU, small model, after a long prompt: it decodes its history."


def _perplexity(table: pd.DataFrame) -> tuple[float, str]:
    rows = table[table["system"] == "transformers quanto 4"]
    ratio = np.exp(rows.groupby("model")["nll_added"].mean())
    furthest = ratio.loc[(ratio - 1).abs().idxmax()] if len(ratio) else math.nan
    return furthest, f"transformers' own int4 cache on {model_names(table)}, the one further off."


def _formula() -> list[dict]:
    """X_q = round(X / S) - Z with Z = round(-min / S), as written and with a plus, on groups of random values."""
    x = torch.randn(4096, GROUP, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale = (high - low) / (2**BITS - 1)
    zero = (-low / scale).round()
    written, meant = (x / scale).round() - zero, (x / scale).round() + zero
    fit = [_in_range(codes) for codes in (written, meant)]
    restored = (written + zero) * scale
    exact = ((restored - x).abs() <= scale / 2 * (1 + 1e-9)).double().mean().item()
    return [
        row("X_q = round(X/S) - Z fits 4 bits, as written", 1, fit[0], "of the codes",
            "Z = round(-min/S) is taken away where it must be added: codes run from 2 min/S up, not from 0."),
        row("... with + Z", 1, fit[1], "of the codes",
            "Codes run from 0 to 15."),
        row("... as written, in whole numbers: restored within S/2", 1, exact, "of the values",
            "X = (X_q + Z) S gives every value back: only the range of the codes is wrong."),
    ]  # fmt: skip


def _in_range(codes: torch.Tensor) -> float:
    return ((codes >= 0) & (codes < 2**BITS)).double().mean().item()


def _outperforms(longbench: pd.DataFrame) -> dict:
    better = int((longbench["quanto_int4"] > longbench["transformers_fp16"]).sum())
    return row("int4 outperforms fp16 on all of its datasets", len(longbench), better, "of 5 datasets",
               "Counted in its own table: TREC is equal, HotPotQA lower by 0.04.", otherwise=PARTLY)  # fmt: skip
