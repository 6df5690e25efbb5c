"""Figures of notebook 10."""

import matplotlib.pyplot as plt
import numpy as np

from vqkv.study.figures.style import PALETTE, look, whiskers


def tuning_dots(table):
    """What training gives back of what codes cost (``finetuning.given_back``), in percent: a panel for each number of
    codebooks, a row for each label and rate; small dots are seeds, bars run from the least to the most."""
    depths = sorted(table["num_quantizers"].unique())
    fig, axes = plt.subplots(1, len(depths), figsize=(10, 2.9), sharey=True, squeeze=False)
    for ax, depth in zip(axes[0], depths, strict=True):
        kinds = table[table["num_quantizers"] == depth].groupby(["label", "learning_rate"], sort=False)
        for y, (_, rows) in enumerate(kinds):
            share, colour = rows["given_back"], PALETTE["kivi" if "control" in rows["label"].iloc[0] else "vqllm"]
            spread = whiskers(share.mean(), share.min(), share.max())
            ax.errorbar([share.mean()], [y], xerr=spread, fmt="D", ms=8, color=colour, capsize=4)
            ax.plot(share, [y] * len(share), "o", ms=4, color=PALETTE["fp16"])
        ax.axvline(0, color=PALETTE["fp16"], linewidth=1)
        ax.set(title=f"{depth} codebooks", xlabel="of what codes cost, given back (%)", ylim=(len(kinds) - 0.5, -0.5))
        ax.set_yticks(range(len(kinds)), [f"{label}\n(rate {rate:g})" for label, rate in kinds.groups])
    return fig


def told_bars(table, names: dict[tuple[str, float], str]):
    """Draw the facts told by each way to store a cache, with the 95% interval of what it loses to the exact cache: a
    panel for each length of text and number of facts. ``names``: (system, nominal bits) -> label, the exact cache
    (dotted line) first; others are left out."""
    cells = table[table["task"] == "facts"].set_index(["system", "nominal_bits"]).groupby(["text_len", "num_facts"])
    size, places = (11, 1.1 + 0.3 * len(names)), range(len(names))
    fig, axes = plt.subplots(1, len(cells), figsize=size, sharex=True, sharey=True, squeeze=False)
    colours = [look(system)["color"] for system, _ in names]
    for ax, ((length, number), rows) in zip(axes[0], cells, strict=True):
        rows = rows.reindex([*names])
        told, error = 100 * rows["told"], whiskers(-rows["lost"], -rows["lost_high"], -rows["lost_low"])
        ax.barh(places, told, 0.7, color=colours, xerr=error, error_kw={"elinewidth": 1, "capsize": 2})
        ax.axvline(told.iloc[0], color=PALETTE["fp16"], linestyle=":", linewidth=1)
        for place in np.flatnonzero(told.isna()):
            ax.text(4, place, "not measured", color=PALETTE["published"], fontsize=8, va="center")
        ax.set(title=f"{number} facts in\n{length:,} tokens", xlim=(0, 104), xticks=[0, 50, 100])
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(places, names.values())
    axes[0, 0].invert_yaxis()
    fig.supxlabel("facts told (%)", fontsize=11)
    return fig
