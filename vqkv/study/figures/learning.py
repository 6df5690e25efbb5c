"""Figures of notebook 02."""

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.labels import name_ends
from vqkv.study.figures.style import PALETTE, whiskers


def learning_curves(table, groups: dict[str, list[tuple[str, dict]]], top: float | None = None):
    """Held-out loss after the last stage against moving-average steps; line: mean over seeds, band: their range.

    ``groups``: panel title -> [(label, {column: value}), ...], the first the same everywhere; ``top`` cuts the axis,
    where a start is far above it, unless an end is too.
    """
    last = table[table["stage"] == table["stage"].max()]
    if top is not None and last[last["step"] == last["step"].max()]["loss"].max() > top:
        top = None
    fig, axes = plt.subplots(1, len(groups), figsize=(11, 3.8), sharey=True, squeeze=False)
    for number, (ax, (title, variants)) in enumerate(zip(axes[0], groups.items(), strict=True)):
        for i, (label, chosen) in enumerate(variants):
            curves = _where(last, chosen).groupby("step")["loss"].agg(["mean", "min", "max"])
            colour = f"C{i}" if number == 0 or i == 0 else f"C{i + 2}"
            ax.plot(curves.index, curves["mean"], label=label, color=colour, lw=2.5)
            ax.fill_between(curves.index, curves["min"], curves["max"], color=colour, alpha=0.25, linewidth=0)
        ax.axvline(50, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.text(52, 0.98, '"50 steps"', color=PALETTE["published"], va="top", transform=ax.get_xaxis_transform())
        ax.set(title=title, xlabel="moving-average steps", ylim=(0, top))
    for ax in axes[0]:
        name_ends(ax)
    axes[0, 0].set_ylabel("held-out relative MSE")
    return fig


def unused_codes(table, variants: list[tuple[str, dict]]):
    """After the last step, per stage: the share of codes that no held-out vector chose; mean over seeds and range."""
    last = table[table["step"] == table["step"].max()]
    fig, ax = plt.subplots(figsize=(7, 3.6))
    for i, (label, chosen) in enumerate(variants):
        stages = 100 * _where(last, chosen).groupby("stage")["unused"].agg(["mean", "min", "max"])
        error = whiskers(stages["mean"], stages["min"], stages["max"])
        ax.errorbar(stages.index, stages["mean"], error, fmt="o-", color=f"C{i}", label=label, capsize=3, lw=2.5, ms=7)
    ax.set(ylabel="codes that no vector chose (%)", xlabel="stage", ylim=(0, None))
    ax.legend()
    return fig


def _where(table, chosen: dict):
    """Return the rows in which every column has its chosen value."""
    return table[(table[[*chosen]] == pd.Series(chosen)).all(axis=1)]
