"""Figure of notebook 02: calibration on other text and on little text."""

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.style import PALETTE, basename, look, whiskers

FILLS = ("full", "none", "left")  # of the markers of the calibrations


def other_calibrations(against: pd.DataFrame, names: dict[str, str]):
    """What each other calibration (marker) does to each system (row): times of KL with the paired 95% interval on the
    left, stored bits more on the right. ``against``: of ``experiments.against_own``, of at most three calibrations;
    ``names``: short ones of systems."""
    systems, kinds = list(dict.fromkeys(against["system"])), ["train_corpus", "train_seqs", "test_corpus"]
    fig, (times, bits) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.5 * len(systems)), sharey=True, width_ratios=[2, 1])
    calibrations = against.groupby(kinds, sort=False)
    for number, (fill, ((corpus, size, read), rows)) in enumerate(zip(FILLS, calibrations)):
        _calibration(times, bits, rows, systems, 0.25 * (number - 1), fill)
        style = {"fillstyle": fill, "markerfacecoloralt": "white", "color": PALETTE["published"], "ms": 8}
        times.plot([], [], "o", label=f"{size} of {basename(corpus)}, reads {basename(read)}", **style)
    for ax, nothing in ((times, 1), (bits, 0)):
        ax.axvline(nothing, color=PALETTE["bound"], linewidth=1)
    times.set(xlabel="times the KL of its own calibration")
    bits.set(xlabel="stored bits more")
    times.set_yticks(range(len(systems)), [names.get(system, system) for system in systems])
    times.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _calibration(times, bits, rows: pd.DataFrame, systems: list[str], below: float, fill: str) -> None:
    for row in rows.itertuples():
        place, style = systems.index(row.system) + below, look(row.system)
        if pd.isna(row.ratio):
            times.text(1, place, "  refuses", color=style["color"], va="center", fontsize=9)
            continue
        style |= {"ls": "", "fillstyle": fill, "markerfacecoloralt": "white"}
        times.errorbar(row.ratio, place, xerr=whiskers(row.ratio, row.low, row.high), capsize=3, elinewidth=1, **style)
        bits.plot(row.more_bits, place, **style)
