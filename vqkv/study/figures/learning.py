"""Figures of notebook 02."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, where


def learning_curves(table, groups: dict[str, list[tuple[str, dict]]], top: float | None = None):
    """Held-out loss after the last stage against moving-average steps; line: mean over seeds, band: their range.

    ``groups``: panel title -> [(label, {column: value}), ...]; ``top`` cuts the axis, where a start is far above it.
    """
    last = table[table["stage"] == table["stage"].max()]
    fig, axes = plt.subplots(1, len(groups), figsize=(9, 3.6), sharey=True, squeeze=False)
    for ax, (title, variants) in zip(axes[0], groups.items(), strict=True):
        for i, (label, chosen) in enumerate(variants):
            curves = where(last, chosen).groupby("step")["loss"].agg(["mean", "min", "max"])
            line = ax.plot(curves.index, curves["mean"], label=label, color=f"C{i}")[0]
            ax.fill_between(curves.index, curves["min"], curves["max"], color=line.get_color(), alpha=0.25, linewidth=0)
        ax.axvline(50, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.text(52, 0.98, '"50 steps"', color=PALETTE["published"], va="top", transform=ax.get_xaxis_transform())
        ax.set(title=title, xlabel="moving-average steps", yscale="log")
        ax.legend(loc="upper right")
    axes[0, 0].set_ylabel("held-out relative MSE")
    axes[0, 0].set_ylim(top=top)
    return fig


def code_usage(table, variants: list[tuple[str, dict]], codebook_size: int):
    """After the last step, per stage: codes in effective use, and the share of codes that no held-out vector chose."""
    last = table[table["step"] == table["step"].max()]
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for i, (label, chosen) in enumerate(variants):
        stages = where(last, chosen).groupby("stage")[["perplexity", "unused"]].agg(["mean", "min", "max"])
        for ax, column, scale in ((axes[0], "perplexity", 1), (axes[1], "unused", 100)):
            mean, low, high = (scale * stages[column][kind] for kind in ("mean", "min", "max"))
            ax.errorbar(stages.index, mean, [mean - low, high - mean], fmt="o-", color=f"C{i}", label=label, capsize=3)
    axes[0].axhline(codebook_size, color=PALETTE["bound"], linewidth=1)
    axes[0].set(ylabel="code perplexity", xlabel="stage", ylim=(0, 1.05 * codebook_size))
    axes[0].set_title(f"codes in effective use, of {codebook_size} (line)")
    axes[1].set(ylabel="unused codes (%)", xlabel="stage", ylim=(0, None))
    axes[1].set_title("codes that no held-out vector chose")
    axes[0].legend()
    return fig
