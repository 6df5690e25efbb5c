"""Notebook 07: claims of AQUA-KV's deck, and what it leaves open, each system beside another on the same tokens."""

import numpy as np
from scipy.stats import bootstrap

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.spill import CapturedTokens
from vqkv.study.experiments.common import by_window, calibrated, frame, subject
from vqkv.study.sweep import sweep

BESIDE = {
    "aqua higgs 2": "higgs 3",
    "aqua higgs 3": "higgs 4",
    "aqua higgs 2, window 0": "aqua higgs 2",
    "aqua higgs 2, window 32": "aqua higgs 2",
    "higgs 2, window 0": "higgs 2",
    "aqua higgs 2, no sinks": "aqua higgs 2",
    "aqua higgs 2, V from V-1+K-1": "aqua higgs 2",
    "aqua higgs 2, V from V-1": "aqua higgs 2",
    "minicache, 1 pair": "kvsharer, 1 pair",
    "minicache, 2 pairs": "kvsharer, 2 pairs",
    "minicache, 1 pair, none retained": "minicache, 1 pair",
}  # a system -> the one that it is compared with
FIXED = 1e-3  # the ridge's strength in AQUA-KV's code


def predictor_choices(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, prompt_len: int, step_size: int,
    batch_size: int, share_threshold: float, seed: int, dtype: str, device: str,
):  # fmt: skip
    """One row per model and system, ``snapshot`` protocol: ``prompt_len`` tokens are stored at once, the rest read and
    stored ``step_size`` at a time, so that all systems are scored on the same tokens whatever their recent window.

    HIGGS and AQUA-KV keep 4 sinks and the last 128 tokens exact, as there, unless the label says otherwise.
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
    higgs = {bits: presets.higgs(bits) for bits in (2, 3, 4)}
    return {
        **{f"higgs {bits}": preset for bits, preset in higgs.items()},
        **{f"aqua higgs {bits}": presets.aqua(higgs[bits]) for bits in (2, 3)},
        "higgs 2, window 0": presets.higgs(2, recent_window=0),
        **{f"aqua higgs 2, window {n}": presets.aqua(higgs[2], recent_window=n) for n in (0, 32)},
        "aqua higgs 2, no sinks": presets.aqua(higgs[2], sink_tokens=0),
        **{f"aqua higgs 2, V from {x}": presets.aqua(higgs[2], value_from=x) for x in ("V-1+K-1", "V-1")},
        **{
            f"{make.__name__}, {n} pair{'s' * (n > 1)}": make(n, *rest)
            for make, rest in ((presets.kvsharer, [share_threshold]), (presets.minicache, []))
            for n in (1, 2)
        },
        "minicache, 1 pair, none retained": presets.minicache(1, retained=0.0),
    }


def ridge_strengths(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, held_out: int, strengths: list[float],
    chunk_size: int, batch_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """What it pays to choose the ridge's strength on calibration text that is held out: 2-bit HIGGS behind predictors,
    no recent window, ``chunked`` protocol; a row per model and strength.

    ``kl_held_out``: on the last ``held_out`` of the ``train_seqs`` sequences, of which the others are learned from;
    ``chosen``: the least of them. The last row of a model learns from all with the strength that AQUA-KV's code has
    (``kl_held_out`` is NaN). ``kl_ratio``: KL on held-out text over that row's, as ``predictor_choices`` has it.
    """
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": who | {"dtype": dtype, "device": device},
        "held_out": held_out,
        "strengths": strengths,
        "batch_size": batch_size,
        "read": {"chunk_size": chunk_size},
    }
    return frame(*sweep(_strength_rows, [{"model": name} for name in models], settings, "strengths"))


def _strength_rows(model: str, who: dict, held_out: int, strengths: list[float], batch_size: int, read: dict):
    found, rows = subject(**who, name=model), []
    learned, held = found.train[:-held_out], found.train[-held_out:]
    for text, tried in ((learned, strengths), (found.train, [FIXED])):
        with CapturedTokens(found.model, text, batch_size, pre_rope=True, progress=False) as captured:
            for strength in tried:
                preset = presets.aqua(presets.higgs(2), recent_window=0, strength=strength).fitting(found.model)
                compressor = calibrate(found.model, text, preset, batch_size, progress=False, captured=captured)
                row = {"model": model, "strength": strength, "train_seqs": len(text)}
                row |= _scored(found, compressor, found.test, read)
                rows.append(row | {"kl_held_out": _scored(found, compressor, held, read)["kl_mean"]})
    rows[-1]["kl_held_out"] = float("nan")  # it has learned from that text
    least = min(row["kl_held_out"] for row in rows[:-1])
    fixed = rows[-1]["kl_each"]
    for row in rows:
        row |= {"chosen": row["kl_held_out"] == least} | _ratio(row.pop("kl_each"), fixed)
    return rows, found.sources


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
