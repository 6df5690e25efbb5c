"""The figure of notebook 08's capacity table."""

import math

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from vqkv.study.figures.style import PALETTE


def context_dots(table):
    """The longest context with every preset, a row each: a dot for every ``memory_gb``, the largest filled, and its
    ratio to fp16's. One panel per model, whose own limit is a dashed line. ``table``: from ``capacity_table``."""
    models, sizes = list(dict.fromkeys(table["model"])), sorted(set(table["memory_gb"]))
    labels = list(dict.fromkeys(table["label"]))
    columns = min(2, len(models))
    lines = math.ceil(len(models) / columns)
    size = (5.5 * columns, 1 + 3.1 * lines)
    fig, axes = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat[len(models) :]:
        ax.remove()
    for ax, model in zip(axes.flat, models, strict=False):
        mine = table[table["model"] == model].set_index(["label", "memory_gb"])
        for place, label in enumerate(labels):
            _dots(ax, place, mine.loc[label].loc[sizes])
        limit = mine["model_limit"].iloc[0]
        ax.axvline(limit, color=PALETTE["bound"], linestyle="--", linewidth=1)
        ax.set(title=f"{model} (made for {limit:,.0f} tokens)", xscale="log")
        ax.xaxis.set_major_formatter(FuncFormatter(_thousands))
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_yticks(range(len(labels)), labels)
    axes[0, 0].set_xlim(None, 2.2 * table["context"].max())  # room for the ratios
    axes[0, 0].invert_yaxis()
    for ax in axes.flat[len(models) - columns : len(models)]:
        ax.tick_params(labelbottom=True)
        ax.set_xlabel(f"longest context (tokens); times fp16's in {sizes[-1]:g} GB")
    _legend(fig, sizes)
    return fig


def _thousands(x: float, _) -> str:
    return next((f"{x / unit:g}{name}" for unit, name in ((10**6, "M"), (10**3, "K")) if x >= unit), f"{x:g}")


def _dots(ax, place: int, rows) -> None:
    """One preset's dots, least memory first, joined by a line."""
    colour = PALETTE[rows["system"].iloc[0].split("-")[0]]
    contexts = list(rows["context"])
    ax.plot(contexts, [place] * len(contexts), color=colour, linewidth=1)
    for context in contexts[:-1]:
        ax.plot(context, place, "o", color=colour, markerfacecolor="white", markersize=7)
    ax.plot(contexts[-1], place, "o", color=colour, markersize=7)
    note = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    ax.annotate(f"{rows['ratio'].iloc[-1]:.1f}x", (contexts[-1], place), **note)


def _legend(fig, sizes) -> None:
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color=PALETTE["bound"], markersize=7, label=f"{size:g} GB",
                   markerfacecolor=PALETTE["bound"] if size == sizes[-1] else "white")
        for size in sizes
    ]  # fmt: skip
    limit = plt.Line2D([], [], linestyle="--", linewidth=1, color=PALETTE["bound"], label="what the model was made for")
    fig.legend(handles=[*handles, limit], loc="outside lower center", ncols=len(sizes) + 1)
