"""Notebook 05: the VQ quality framework's threshold sweep, next to what it claims, and the KL of every single sequence:
whether it has two modes, and what becomes of changed predictions."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kurtosis, skew

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.capture import capture
from vqkv.study.eviction import H2O
from vqkv.study.experiments.audit_algorithms import fallback_bits
from vqkv.study.experiments.common import FRAMEWORK, exact_compressor
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product
from vqkv.study.tables import published

Maker = Callable[..., presets.Preset]
WITH_FALLBACK: dict[str, Maker] = {"vqq": partial(presets.vqq, 1.0), "vqq_product": partial(presets.vqq_product, 1.0)}
WITHOUT_FALLBACK: dict[str, Maker] = {
    "vq, 2": partial(presets.vq, 2),
    "vq, 8": partial(presets.vq, 8),
    "vq, 8, unscaled": partial(presets.vq, 8, per_head_scale=False),
    "rvq2": presets.rvq2,
}
TINYLLAMA = {  # rows of its table 4.2, and what they are called here
    "m=2 threshold=0.08": ("vqq_product", 0.08),
    "m=2 threshold=0.10": ("vqq_product", 0.1),
    "block 2, no fallback": ("vq, 2", None),
    "block 8, no fallback": ("vq, 8, unscaled", None),
}


def claimed_sweep() -> pd.DataFrame:
    """Return the source's tables 4.1 (GPT-2, plain VQ) and 4.2 (TinyLlama): one row per method and threshold.
    ``claimed_live`` is the ratio to the live fp16 cache that its shares of blocks in fp16 leave."""
    plain, other = published("vqq_threshold_sweep_gpt2"), published("vqq_tinyllama").set_index("config")
    live = 16 / fallback_bits(plain["fp16_fallback_pct"] / 100)
    plain = plain.assign(method="vqq", claimed_live=live).rename(columns={"kl": "claimed_kl"})
    rows = [
        {"method": method, "threshold": threshold, "claimed_ratio": other["claimed_ratio"][config]}
        | {"claimed_kl": float(other["kl_mean"][config])}
        for config, (method, threshold) in TINYLLAMA.items()
    ]
    columns = ["method", "threshold", "claimed_ratio", "claimed_kl", "claimed_live"]
    return pd.concat([plain, pd.DataFrame(rows)])[columns].astype({"threshold": float})


@experiment(
    lambda thresholds: (
        product(method=WITH_FALLBACK, threshold=thresholds) + product(method=WITHOUT_FALLBACK, threshold=[None])
    )
)
def threshold_sweep(
    subject: Subject, method: str, threshold: float | None, prompt_len: int, codebook_size: int
) -> list[dict]:
    """Sweep the fallback's threshold with VQ and product codes, then plain VQ and two residual stages without fallback.

    The prompt is one keyframe, ``snapshot`` protocol. A row per method, threshold (NaN without) and sequence;
    ``vq_blocks``: share not in fp16; ``ratio``: to the live fp16 cache; ``median_error``: over a head's maximum.
    """
    keys, values = _prompts(subject=subject, prompt_len=prompt_len)
    compressor = _fitted(subject=subject, method=method, prompt_len=prompt_len, codebook_size=codebook_size)
    label = {"model": subject.name, "method": method, "threshold": float("nan"), "vq_blocks": 1.0}
    if threshold is not None:
        for codec in (codec for pair in compressor.codecs for codec in pair):
            codec.quantizer.threshold = threshold
        layers = zip(compressor.codecs, keys, values, strict=True)
        masks = [codec.encode(x).mask() for pair, *layer in layers for codec, x in zip(pair, layer, strict=True)]
        label |= {"threshold": threshold, "vq_blocks": statistics.mean(mask.float().mean().item() for mask in masks)}
    label["median_error"] = _median_error(compressor, keys, values)
    settings: dict[str, Any] = {"prompt_len": prompt_len, "batch_size": len(subject.test), "reconstruction": False}
    settings["step_size"] = subject.test.shape[1] - prompt_len  # fewer than a keyframe: none is packed, so all at once
    settings |= {"exact": subject.exact, "per_sequence": True}
    row = evaluate(subject.model, compressor, subject.test, "snapshot", **settings)
    label |= {name: row[name] for name in ("bits_per_value", "kl_floor")} | {"ratio": 16 / row["bits_per_value"]}
    each = enumerate(zip(row["kl_each"], row["top1_each"], strict=True))
    return [label | {"sequence": i, "kl": kl, "top1": top1} for i, (kl, top1) in each]


@per_process(maxsize=1)
def _prompts(subject: Subject, prompt_len: int):
    return capture(subject.model, subject.test[:, :prompt_len], pre_rope=False)


@per_process(maxsize=1)
def _fitted(subject: Subject, method: str, prompt_len: int, codebook_size: int) -> Compressor:
    make = (WITH_FALLBACK | WITHOUT_FALLBACK)[method]
    return subject.calibrated(make(block_tokens=prompt_len, codebook_size=codebook_size, seed=subject.seed))


def _median_error(compressor, keys, values) -> float:
    """Mean over layers and roles."""
    medians = []
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        for x, x_hat in zip(pair, compressor.reconstruct(layer, *pair), strict=True):
            error = (x - x_hat).abs() / x.abs().amax(dim=(2, 3), keepdim=True)
            medians.append(error.median().item())
    return statistics.mean(medians)


BROKEN, DEFENSIBLE = 0.5, 0.1  # nats: the source's words
DRAWS = 5000
CODECS = ("VQ of 8 values", "VQ of 2 values", "VQ of 8, threshold 0.07", "product codes, threshold 0.10")


@experiment(lambda retain: product(codec=[*CODECS, f"H2O, {100 * retain:.0f}% retained"]))
def sequence_damage(
    subject: Subject, codec: str, prompt_len: int, retain: float, recent: float, codebook_size: int
) -> list[dict]:
    """Measure KL after ``prompt_len`` stored tokens, ``snapshot`` protocol; a row per codec and sequence.

    ``top1``, ``top2``: how often the exact prediction is the best, or among the two best.
    """
    compressor: Any
    if codec in CODECS:
        preset = FRAMEWORK[codec](block_tokens=prompt_len, codebook_size=codebook_size, seed=subject.seed)
        compressor = subject.calibrated(preset)
    else:
        compressor = H2O(exact_compressor(subject), retain, recent)
    settings: dict[str, Any] = {"prompt_len": prompt_len, "step_size": subject.test.shape[1] - prompt_len}
    settings |= {"reconstruction": False, "batch_size": 8, "per_sequence": True, "exact": subject.exact}
    row = evaluate(subject.model, compressor, subject.test, "snapshot", **settings)
    label = {"model": subject.name, "codec": codec, "tokens": settings["step_size"] - 1, "kl_floor": row["kl_floor"]}
    each = zip(*(row[f"{name}_each"] for name in ("kl", "top1", "top2")), strict=True)
    return [label | dict(zip(("sequence", "kl", "top1", "top2"), (i, *numbers))) for i, numbers in enumerate(each)]


def modes(table: pd.DataFrame) -> pd.DataFrame:
    """Count sequences with a KL above 0.5 and 0.1, by model and codec, with worst over median, Sarle's coefficient of
    log KL (5/9: uniform; more: two modes) and its chance, and changed predictions whose exact one is ``second``."""
    rows = []
    for (model, codec), mine in table.groupby(["model", "codec"], sort=False):
        kl, changed = mine["kl"], 1 - mine["top1"]
        row = {"model": model, "codec": codec, "sequences": len(mine), "median": kl.median()}
        row |= {"broken": (kl > BROKEN).mean(), "over 0.1": (kl > DEFENSIBLE).mean()}
        row |= {"worst/median": kl.max() / kl.median(), **two_modes(np.log(kl.clip(lower=mine["kl_floor"])))}
        row |= {"changed": round((changed * mine["tokens"]).sum())}
        rows.append(row | {"second": (mine["top2"] - mine["top1"]).sum() / max(changed.sum(), 1e-9)})
    return pd.DataFrame(rows)


def two_modes(x: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Return Sarle's bimodality coefficient (Pfister et al. 2013), and ``p``, how often normal samples reach it."""
    draws = np.random.default_rng(seed).standard_normal((DRAWS, len(x)))
    coefficient, drawn = _sarle(np.asarray(x)[None]), _sarle(draws)
    return {"sarle": coefficient.item(), "p": (drawn >= coefficient).mean()}


def _sarle(x: np.ndarray) -> np.ndarray:
    """Compute the coefficient of samples (samples, n): (samples,)."""
    n = x.shape[1]
    most = 3 * (n - 1) ** 2 / ((n - 2) * (n - 3))
    return (skew(x, axis=1, bias=False) ** 2 + 1) / (kurtosis(x, axis=1, bias=False) + most)
