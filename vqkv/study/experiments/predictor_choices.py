"""Notebook 06: further claims of AQUA-KV's deck, each system beside another on the same tokens."""

import math

from vqkv import presets
from vqkv.study.experiments.common import by_window, calibrated, frame, subject
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.sweep import sweep

SYSTEMS = {
    "aqua higgs 2": presets.aqua(presets.higgs(2)),
    "aqua higgs 2, window 0": presets.aqua(presets.higgs(2), recent_window=0),
    "kvsharer, 1 pair": presets.kvsharer(1),
    "kvsharer, 2 pairs": presets.kvsharer(2),
}
BESIDE = {  # a system -> the one that it is compared with
    "aqua higgs 2, window 0": "aqua higgs 2",
    "kvsharer, 1 pair": "aqua higgs 2",
    "kvsharer, 2 pairs": "kvsharer, 1 pair",
}


def predictor_choices(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, prompt_len: int, step_size: int,
    batch_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """One row per model and system, ``snapshot`` protocol: ``prompt_len`` tokens are stored at once, the rest read and
    stored ``step_size`` at a time, so that all systems are scored on the same tokens whatever their recent window.

    AQUA-KV keeps 4 sinks and the last 128 tokens exact, as there, unless the label says otherwise.
    ``kl_ratio``: mean KL over that of the system ``beside`` ("none": NaN), with the ends of a 95% interval over
    bootstrap draws of sequences, the same for both.
    """
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": who | {"dtype": dtype, "device": device},
        "batch_size": batch_size,
        "read": {"protocol": "snapshot", "prompt_len": prompt_len, "step_size": step_size},
    }
    cases = [{"model": name, "label": label} for name in models for label in SYSTEMS]
    rows, sources = sweep(_choice_row, cases, settings, "choices")
    known = {(row["model"], row["label"]): row["kl_each"].split() for row in rows}
    for row in rows:
        beside = BESIDE.get(row["label"], "none")
        pair = [known[row["model"], label] for label in (row["label"], beside)] if beside != "none" else None
        ratios = paired_ratio(*pair) if pair else [math.nan] * 3
        row |= {"beside": beside} | dict(zip(("kl_ratio", "kl_ratio_low", "kl_ratio_high"), ratios, strict=True))
    return frame(rows, sources)


def _choice_row(model: str, label: str, who: dict, batch_size: int, read: dict):
    who = who | {"name": model}
    found = subject(**who)
    compressor = calibrated(SYSTEMS[label], who, batch_size)
    row = by_window(found, compressor, found.test, reconstruction=False, **read)
    return [{"model": model, "label": label} | row], found.sources
