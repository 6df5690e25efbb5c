"""Figures of notebook 07: injected phenomena."""

import matplotlib.pyplot as plt
import numpy as np

from vqkv.study.figures.style import PALETTE, by_model, interval, mark_floor, short, where

CLAIMED = (2, 3)  # codes of a quiet head: VQ quality framework, section 2.2
LOOKS = {  # palette key and marker
    "vqllm contiguous": ("contiguous", "s"),
    "vqllm strided": ("strided", "o"),
    "quanto 4": ("quanto", "v"),
    "turboquant 4": ("turboquant", "P"),
    "higgs 2": ("higgs", "D"),
    "higgs 4, mean kept": ("higgs", "D"),  # dotted
    "higgs 4": ("higgs", "D"),
    "kivi 2": ("kivi", "^"),
    "steps 2, weighted": ("crossed", "*"),
}
SHOWN = {  # phenomenon -> what its size is, and systems
    "outlier channels": (
        "outlier channels, times as loud",
        ["vqllm contiguous", "vqllm strided", "quanto 4", "higgs 2", "kivi 2", "steps 2, weighted"],
    ),
    "key bias": (
        "constant in one channel of each head's keys",
        ["quanto 4", "turboquant 4", "higgs 4, mean kept", "higgs 4", "kivi 2", "steps 2, weighted"],
    ),
}


def kl_by_size(table, phenomenon: str):
    """KL against how strong a phenomenon is, a line for each system, a panel for each model. Bars: range over seeds or,
    of a system without, the 95% interval over sequences."""
    label, systems = SHOWN[phenomenon]
    fig, axes, panels = by_model(where(table, {"phenomenon": phenomenon}), (11, 4.6))
    for ax, model, mine in panels:
        for system in systems:
            colour, marker = LOOKS[system]
            look = {"color": PALETTE[colour], "marker": marker, "ms": 9 if marker == "*" else 5}
            look["ls"] = ":" if "mean kept" in system else "-"
            ax.errorbar(*_means(mine[mine["system"] == system]), label=system, capsize=2, **look)
        ax.set_xscale("symlog", linthresh=mine.loc[mine["size"] > 0, "size"].min())  # logarithmic, and 0 beside it
        ax.set(yscale="log", title=short(model), xlabel=label)
        _ticks(ax, mine)
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return fig


def _ticks(ax, rows) -> None:
    sizes = sorted(set(rows["size"]))
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.minorticks_off()


def _means(rows):
    """Sizes, mean KL over seeds, and lengths of error bars (2, sizes)."""
    by_size = rows.groupby("size")["kl_mean"]
    means = by_size.mean()
    spread = np.stack([means - by_size.min(), by_size.max() - means]).clip(0)
    return means.index, means, spread if rows["seed"].nunique() > 1 else interval(rows.sort_values("size"))


def quiet_heads(table):
    """Codes in effective use by the quiet heads (left) and their relative squared error (right) against how loud one
    head of their layer is: one codebook for all values as they are (solid) and after division by each head's maximum
    (dotted). Mean and range over seeds."""
    rows = where(table, {"phenomenon": "loud heads"})
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.2))
    for (model, system), mine in rows[rows["system"] != "vqq 0.1"].groupby(["model", "system"], sort=False):
        look = {"color": PALETTE[short(model)], "ls": "-" if system == "vq unscaled" else ":", "marker": "o"}
        how = "as they are" if system == "vq unscaled" else "divided by the maximum"
        for ax, column in zip(axes, ("quiet_effective", "quiet_error"), strict=True):
            found = mine.groupby("size")[column].agg(["mean", "min", "max"])
            bars = np.stack([found["mean"] - found["min"], found["max"] - found["mean"]]).clip(0)
            ax.errorbar(found.index, found["mean"], bars, capsize=2, label=f"{short(model)}, {how}", **look)
    axes[0].axhspan(*CLAIMED, color=PALETTE["published"], lw=0)
    axes[0].text(1, CLAIMED[1] + 3, "claimed", color=PALETTE["published"], fontsize=10)
    for ax, label in zip(
        axes, ("effective codes of quiet heads", "relative squared error of quiet heads"), strict=True
    ):
        ax.set(xscale="log", xlabel="loud heads, times as loud", ylabel=label, ylim=(0, 1.08 * ax.get_ylim()[1]))
        _ticks(ax, rows)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
