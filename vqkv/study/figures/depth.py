"""Figures of notebook 06."""

import itertools
import math

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, basename, by_model, interval, mark_floor

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
    """Each metric (column -> axis label) against stored bits, a line per codebook size and beam over depths; for KL
    with its 95% interval over sequences."""
    fig, axes = plt.subplots(1, len(metrics), figsize=(10, 3.9), squeeze=False)
    colours = _size_colours(table)
    for ax, (column, axis_label) in zip(axes[0], metrics.items(), strict=True):
        for (size, beam), rows in table.groupby(["codebook_size", "beam"]):
            rows = rows.sort_values("bits_per_value")
            style = "o-" if beam > 1 else "o:"
            error = interval(rows) if column == "kl_mean" else None
            look = {"fmt": style, "color": colours[size], "label": f"{size} codes, beam {beam}", "capsize": 2}
            ax.errorbar(rows["bits_per_value"], rows[column], error, **look)
        ax.set(xlabel="stored bits per value", ylabel=axis_label, yscale="log")
        if column == "kl_mean":
            mark_floor(ax, table)
    axes[0, -1].legend(fontsize=9)
    return fig


def _size_colours(table) -> dict[int, str]:
    return dict(zip(sorted(set(table["codebook_size"]), reverse=True), itertools.cycle(SIZE_COLOURS)))


def task_lines(table):
    """Points lost of each task against the number of codebooks, a line per codebook size with its 95% interval over
    sequences; a row of panels per model."""
    models, tasks = (list(dict.fromkeys(table[column])) for column in ("model", "task"))
    size, colours = (9.5, 1 + 2.3 * len(models)), _size_colours(table)
    fig, axes = plt.subplots(len(models), len(tasks), figsize=size, sharex=True, sharey="row", squeeze=False)
    for line, model in zip(axes, models, strict=True):
        for ax, task in zip(line, tasks, strict=True):
            mine = table[(table["model"] == model) & (table["task"] == task)]
            for i, (size, rows) in enumerate(mine.groupby("codebook_size")):
                error = [rows["lost"] - rows["low"], rows["high"] - rows["lost"]]
                place, look = rows["num_quantizers"] + 0.12 * i, {"color": colours[size], "label": f"{size:,} codes"}
                ax.errorbar(place, rows["lost"], error, fmt="os"[i % 2] + "-", capsize=3, **look)
            ax.axhline(0, color=PALETTE["fp16"], linewidth=1)
            ax.set_xticks(sorted(set(mine["num_quantizers"])))
        line[0].set_ylabel(f"{basename(model)}\nlost (points)")
    for ax, task in zip(axes[0], tasks, strict=True):
        ax.set_title(task)
    for ax in axes[-1]:
        ax.set_xlabel("codebooks")
    axes[0, -1].legend()
    return fig


SYSTEMS = {
    "quanto": ("quanto", "o"),
    "kivi": ("kivi", "^"),
    "kvquant": ("kvquant", "v"),
    "higgs": ("higgs", "D"),
    "vqllm": ("vqllm", "o"),
    "vqllm beam": ("vqllm", "*"),
}


def systems_plane(table):
    """KL, with its 95% interval over sequences, against stored bits; a line for each of ``SYSTEMS``, dotted with a
    beam. One panel per model."""
    fig, axes, panels = by_model(table, (10, 4.6))
    for ax, model, mine in panels:
        systems = mine["system"].where(~mine["label"].str.contains("beam"), "vqllm beam")
        for name, (colour, marker) in SYSTEMS.items():
            rows = mine[systems == name].sort_values("bits_per_value")
            style = {
                "fmt": marker + (":" if "beam" in name else "-"),
                "color": PALETTE[colour],
                "label": name.replace("vqllm", "residual VQ"),
            }
            ax.errorbar(rows["bits_per_value"], rows["kl_mean"], interval(rows), ms=9 if marker == "*" else 6, **style)
        ax.set(title=basename(model), xlabel="stored bits per value\n(side information apart)", yscale="log")
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL (nats)")
    axes[0, -1].legend()
    return fig
