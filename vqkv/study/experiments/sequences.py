"""Notebook 05: the KL of every single sequence, whether it has two modes, and what becomes of changed predictions."""

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kurtosis, skew

from vqkv.evaluation.evaluate import evaluate
from vqkv.study.eviction import H2O
from vqkv.study.experiments.common import FRAMEWORK, exact_compressor
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

BROKEN, DEFENSIBLE = 0.5, 0.1  # nats: the source's words
DRAWS = 5000
CODECS = ("VQ of 8 values", "VQ of 2 values", "VQ of 8, threshold 0.07", "product codes, threshold 0.10")


@experiment(lambda retain: product(codec=[*CODECS, f"H2O, {100 * retain:.0f}% retained"]))
def sequence_damage(
    subject: Subject, codec: str, prompt_len: int, retain: float, recent: float, codebook_size: int
) -> list[dict]:
    """Measure KL of many sequences after ``prompt_len`` stored tokens, ``snapshot`` protocol; a row per codec and
    sequence.

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
    """Of each model and codec: shares of sequences with a KL above 0.5 and 0.1, worst over median, Sarle's coefficient
    of log KL (5/9: uniform; more: perhaps two modes) with the chance that as many normal draws reach it, and the share
    of changed predictions whose exact one is second."""
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
    """Return Sarle's bimodality coefficient (SAS/STAT; Pfister et al. 2013), and ``p``, how often normal samples reach
    it."""
    draws = np.random.default_rng(seed).standard_normal((DRAWS, len(x)))
    coefficient, drawn = _sarle(np.asarray(x)[None]), _sarle(draws)
    return {"sarle": coefficient.item(), "p": (drawn >= coefficient).mean()}


def _sarle(x: np.ndarray) -> np.ndarray:
    """(samples, n) -> (samples,)."""
    n = x.shape[1]
    most = 3 * (n - 1) ** 2 / ((n - 2) * (n - 3))
    return (skew(x, axis=1, bias=False) ** 2 + 1) / (kurtosis(x, axis=1, bias=False) + most)
