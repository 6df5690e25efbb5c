"""Figures of notebook 06."""

import math

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, by_model, interval, mark_floor

SIZE_COLOURS = {0: "#3f90da", 1: "#ffa90e", 2: "#bd1f01"}


def distance_to_bound(table):
    """Residual VQ of a Gaussian: decibels above the rate-distortion bound against bits; beams by line style. Line: mean
    over seeds."""
    fig, ax = plt.subplots(figsize=(7.5, 4))
    sizes = sorted(set(table["codebook_size"]))
    for (size, beam), rows in table.groupby(["codebook_size", "beam"]):
        curve = rows.groupby("bits_per_value")["mse"].mean()
        gap = [10 * math.log10(mse * 4**bits) for bits, mse in curve.items()]
        style = "o-" if beam > 1 else "o:"
        ax.plot(curve.index, gap, style, color=SIZE_COLOURS[sizes.index(size) % 3], label=f"{size} codes, beam {beam}")
    ax.axhline(0, color=PALETTE["bound"], linewidth=1)
    ax.text(0.02, 0.05, "Shannon's bound", transform=ax.get_yaxis_transform(), va="bottom", fontsize=9)
    ax.set(xlabel="bits per value", ylabel="error above the bound (dB)", ylim=(0, None))
    ax.legend(ncols=2)
    return fig


def depth_curves(table, metrics: dict[str, str]):
    """Each metric (column -> axis label) against stored bits, a line per codebook size and beam over depths; for KL
    with its 95% interval over sequences."""
    fig, axes = plt.subplots(1, len(metrics), figsize=(10, 3.9), squeeze=False)
    sizes = sorted(set(table["codebook_size"]))
    for ax, (column, axis_label) in zip(axes[0], metrics.items(), strict=True):
        for (size, beam), rows in table.groupby(["codebook_size", "beam"]):
            rows = rows.sort_values("bits_per_value")
            style = "o-" if beam > 1 else "o:"
            colour = SIZE_COLOURS[sizes.index(size) % 3]
            error = interval(rows) if column == "kl_mean" else None
            label = f"{size} codes, beam {beam}"
            ax.errorbar(rows["bits_per_value"], rows[column], error, fmt=style, color=colour, label=label, capsize=2)
        ax.set(xlabel="stored bits per value", ylabel=axis_label, yscale="log")
        if column == "kl_mean":
            mark_floor(ax, table)
    axes[0, -1].legend(fontsize=9)
    return fig


SYSTEMS = {
    "quanto": ("quanto", "o"),
    "hqq": ("hqq", "s"),
    "kivi": ("kivi", "^"),
    "kvquant": ("kvquant", "v"),
    "higgs": ("higgs", "D"),
    "vq": ("vq", "P"),
    "rvq2": ("vq", "X"),
    "vqq_product": ("pq", "p"),
    "vqllm": ("vqllm", "o"),
    "vqllm beam": ("vqllm", "*"),
    "transformers-quanto": ("quanto", "+"),
    "transformers-hqq": ("hqq", "x"),
}


def systems_plane(table):
    """KL, with its 95% interval over sequences, against stored bits; a line per system, crosses for transformers' own
    cache. One panel per model."""
    fig, axes, panels = by_model(table, (11, 4.8))
    for ax, model, mine in panels:
        systems = mine["system"].where(~mine["label"].str.contains("beam"), "vqllm beam")
        for name, (colour, marker) in SYSTEMS.items():
            rows = mine[systems == name].sort_values("bits_per_value")
            line = "" if name.startswith("transformers") else "-"
            size = 10 if marker in "*+x" else 5
            style = {"fmt": marker + line, "ms": size, "color": PALETTE[colour], "label": name}
            ax.errorbar(rows["bits_per_value"], rows["kl_mean"], interval(rows), **style)
        ax.set(title=model, xlabel="stored bits per value (side information apart)", yscale="log")
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL (nats)")
    axes[0, -1].legend(fontsize=8, ncols=2)
    return fig
