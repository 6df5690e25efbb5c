"""Notebook 06: further claims of AQUA-KV's deck, each system beside another on the same tokens."""

import math

from vqkv import presets
from vqkv.study.experiments.common import by_window
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

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


def _beside(rows: list[dict]) -> list[dict]:
    """The rows with the ratio to the system that each is compared with."""
    known = {row["label"]: row["kl_each"].split() for row in rows}
    for row in rows:
        beside = BESIDE.get(row["label"], "none")
        ratios = paired_ratio(known[row["label"]], known[beside]) if beside != "none" else [math.nan] * 3
        row |= {"beside": beside} | dict(zip(("kl_ratio", "kl_ratio_low", "kl_ratio_high"), ratios, strict=True))
    return rows


@experiment(lambda: product(label=SYSTEMS), finish=_beside)
def predictor_choices(subject: Subject, label: str, prompt_len: int, step_size: int, batch_size: int) -> dict:
    """One row per system, ``snapshot`` protocol: ``prompt_len`` tokens are stored at once, the rest read and stored
    ``step_size`` at a time, so that all systems are scored on the same tokens whatever their recent window.

    AQUA-KV keeps 4 sinks and the last 128 tokens exact, as there, unless the label says otherwise.
    ``kl_ratio``: mean KL over that of the system ``beside`` ("none": NaN), with the ends of a 95% interval over
    bootstrap draws of sequences, the same for both.
    """
    compressor = subject.calibrated(SYSTEMS[label], batch_size)
    read = {"protocol": "snapshot", "prompt_len": prompt_len, "step_size": step_size, "reconstruction": False}
    return {"model": subject.name, "label": label} | by_window(subject, compressor, **read)
