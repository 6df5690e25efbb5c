"""Notebook 07: further claims of AQUA-KV's deck, each system beside another on the same tokens."""

import numpy as np
from scipy.stats import bootstrap

from vqkv import presets
from vqkv.study.experiments.common import by_window, calibrated, frame, subject
from vqkv.study.sweep import sweep

BESIDE = {  # a system -> the one that it is compared with
    "aqua higgs 2, window 0": "aqua higgs 2",
    "kvsharer, 2 pairs": "kvsharer, 1 pair",
}


def predictor_choices(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, prompt_len: int, step_size: int,
    batch_size: int, share_threshold: float, seed: int, dtype: str, device: str,
):  # fmt: skip
    """One row per model and system, ``snapshot`` protocol: ``prompt_len`` tokens are stored at once, the rest read and
    stored ``step_size`` at a time, so that all systems are scored on the same tokens whatever their recent window.

    AQUA-KV keeps 4 sinks and the last 128 tokens exact, as there, unless the label says otherwise.
    ``kl_ratio``: KL over that of the system ``beside`` ("none": NaN), with the ends of a 95% interval over bootstrap
    draws of sequences, the same for both.
    """
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": who | {"dtype": dtype, "device": device},
        "batch_size": batch_size,
        "share_threshold": share_threshold,
        "read": {"protocol": "snapshot", "prompt_len": prompt_len, "step_size": step_size},
    }
    cases = [{"model": name, "label": label} for name in models for label in _systems(share_threshold)]
    rows, sources = sweep(_choice_row, cases, settings, "choices")
    known = {(row["model"], row["label"]): row.pop("kl_each") for row in rows}
    for row in rows:
        beside = BESIDE.get(row["label"], "none")
        row |= {"beside": beside} | _ratio(known[row["model"], row["label"]], known.get((row["model"], beside)))
    return frame(rows, sources)


def _choice_row(model: str, label: str, who: dict, batch_size: int, share_threshold: float, read: dict):
    who = who | {"name": model}
    found = subject(**who)
    compressor = calibrated(_systems(share_threshold)[label], who, batch_size)
    return [{"model": model, "label": label} | _scored(found, compressor, found.test, read)], found.sources


def _scored(found, compressor, tokens, read: dict) -> dict:
    return by_window(found, compressor, tokens, reconstruction=False, **read)


def _systems(share_threshold: float) -> dict[str, presets.Preset]:
    return {
        "aqua higgs 2": presets.aqua(presets.higgs(2)),
        "aqua higgs 2, window 0": presets.aqua(presets.higgs(2), recent_window=0),
        "kvsharer, 1 pair": presets.kvsharer(1, share_threshold),
        "kvsharer, 2 pairs": presets.kvsharer(2, share_threshold),
    }


def _ratio(ours: str, theirs: str | None) -> dict:
    """Of mean KLs, ``written`` by sequence; NaN without another to compare with."""
    if theirs is None:
        return dict.fromkeys(("kl_ratio", "kl_ratio_low", "kl_ratio_high"), float("nan"))
    pair = [np.array(each.split(), float) for each in (ours, theirs)]
    ratio = pair[0].mean() / pair[1].mean()
    if len(pair[0]) < 2 or ours == theirs:
        return {"kl_ratio": ratio, "kl_ratio_low": float("nan"), "kl_ratio_high": float("nan")}
    draws = bootstrap(pair, _of_means, paired=True, n_resamples=2000, method="percentile", rng=0)
    low, high = draws.confidence_interval
    return {"kl_ratio": ratio, "kl_ratio_low": low, "kl_ratio_high": high}


def _of_means(ours, theirs, axis: int = 0):
    return ours.mean(axis=axis) / theirs.mean(axis=axis)
