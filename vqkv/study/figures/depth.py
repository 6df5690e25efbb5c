"""Figures of notebook 03."""

import itertools
import math

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, interval

SIZE_COLOURS = ("#bd1f01", "#ffa90e", "#3f90da")  # of codebooks, the largest first


def distance_to_bound(table):
    """Residual VQ of a Gaussian: decibels above the rate-distortion bound against bits; beams by line style. Line: mean
    over seeds."""
    fig, ax = plt.subplots(figsize=(7.5, 4))
    colours = _size_colours(table)
    for (size, beam), rows in table.groupby(["codebook_size", "beam"]):
        curve = rows.groupby("bits_per_value")["mse"].mean()
        gap = [10 * math.log10(mse * 4**bits) for bits, mse in curve.items()]
        style = "o-" if beam > 1 else "o:"
        ax.plot(curve.index, gap, style, color=colours[size], label=f"{size} codes, beam {beam}")
    ax.axhline(0, color=PALETTE["bound"], linewidth=1)
    ax.text(0.02, 0.05, "Shannon's bound", transform=ax.get_yaxis_transform(), va="bottom", fontsize=9)
    ax.set(xlabel="bits per value", ylabel="error above the bound (dB)", ylim=(0, None))
    ax.legend(ncols=2)
    return fig


def depth_curves(table, metrics: dict[str, str]):
    """Each metric (column -> axis label) against stored bits, a line per codebook size over depths; KL and facts with
    their 95% intervals; a metric that the table lacks is left out."""
    metrics = {column: label for column, label in metrics.items() if column in table}
    fig, axes = plt.subplots(1, len(metrics), figsize=(11, 3.9), squeeze=False)
    colours = _size_colours(table)
    for ax, (column, axis_label) in zip(axes[0], metrics.items(), strict=True):
        for size, rows in table.groupby("codebook_size"):
            rows = rows.sort_values("bits_per_value")
            look = {"fmt": "o-", "color": colours[size], "label": f"{size:,} codes", "capsize": 2}
            ax.errorbar(rows["bits_per_value"], rows[column], interval(rows, column), **look)
        ax.set(xlabel="stored bits per value", ylabel=axis_label, yscale="linear" if "lost" in column else "log")
    axes[0, -1].legend(fontsize=9)
    return fig


def _size_colours(table) -> dict[int, str]:
    return dict(zip(sorted(set(table["codebook_size"]), reverse=True), itertools.cycle(SIZE_COLOURS)))
