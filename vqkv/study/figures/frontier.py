"""Figures of pages 00, 11 and 12, and of ``vqkv compare``."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from vqkv.study.figures.style import PALETTE, basename, colour_of, interval, look, mark_floor, model_of, whiskers

FAMILIES = ("best", "live", "kvtc", "aqua higgs", "vqllm")  # all others are grey points
LABELS = {"best": "best (ours)", "live": "live (ours)", "kvtc": "KVTC", "aqua higgs": "AQUA-KV", "vqllm": "residual VQ"}
OWN = {"color": PALETTE["own"], "marker": "X", "ms": 9, "zorder": 5}
POINTS = (0, 1, 2, 5, 10, 20, 50, 100)
TELLING = (2, 10)  # points whose first loss the table names
PROXIES = {
    "kl_mean": "KL",
    "ppl_increase": "perplexity",
    "top1": "top-1 agreement",
    "attention_mse": "error of attention output",
    "unexplained": "1 - EVR",  # what a quantizer sees by itself: shaded
}
QUANTIZERS = {  # of a design -> palette key, marker and label of the search's figure
    "trellis": ("crossed 2", "o", "trellis or uniform"),
    "uniform": ("crossed 2", "o", "trellis or uniform"),
    "rvq": ("vqllm", "s", "residual VQ"),
    "grid": ("other", "D", "grid or affine"),
    "affine": ("other", "D", "grid or affine"),
}


def frontier(table, contexts: dict[str, str], families=FAMILIES, own: str = ""):
    """Draw KL against bits: a row of panels a model, a column for each of ``contexts`` (column of bits -> title).
    Points: means over seeds, bars: 95% intervals over windows. Grey: all systems but ``families`` and the reader's
    ``own``. ``table``: with the ``family`` of each system."""
    models, named = list(dict.fromkeys(table["model"])), table["family"].where(table["system"] != own, own)
    width = 5.6 if len(contexts) < 3 else 3.5
    table, size = table.assign(family=named), (width * len(contexts), 3.9 * len(models) + 0.6)
    fig, axes = plt.subplots(len(models), len(contexts), figsize=size, sharex=True, sharey="row", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        mine = table[table["model"] == model]
        for ax, (bits, title) in zip(row, contexts.items(), strict=True):
            _systems(ax, mine, bits, "kl_mean", families, own)
            ax.set(yscale="log", title=title if len(models) == 1 else f"{basename(model)}: {title}")
            mark_floor(ax, mine)
        row[0].set_ylabel("KL to the uncompressed cache (nats)")
    return _finished(fig, axes)


def overview(table, bits: str, families=FAMILIES):
    """Draw one model's systems at one column of bits: KL, and facts lost (linear up to 2; lines at 2 and 10)."""
    fig, axes = plt.subplots(1, 2, figsize=(11.2, 4), sharex=True, squeeze=False)
    left, right = axes[0]
    _systems(left, table, bits, "kl_mean", families)
    left.set(yscale="log", ylabel="KL to the uncompressed cache (nats)", title=model_of(table))
    mark_floor(left, table)
    _systems(right, table, bits, "facts_lost", families)
    right.set_yscale("symlog", linthresh=2)
    right.set(ylim=(-2, 110), title=model_of(table), ylabel="facts no longer told (points)")
    right.set_yticks(POINTS, map(str, POINTS))
    for points in TELLING:
        right.axhline(points, color=PALETTE["bound"], lw=0.8, ls=":")
    return _finished(fig, axes)


def _finished(fig, axes):
    for ax in axes[-1]:
        ax.set_xlabel("bits per value, with side information")
    axes[0, 0].set_xlim(0, 5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=6 if len(labels) == 6 else 4, fontsize=11)
    return fig


def _systems(ax, rows, bits: str, y: str, families, own: str = "") -> None:
    """Draw every system of one model, column ``y`` with its interval against a column of bits."""
    mean = rows.groupby(["family", "system", "nominal_bits"], sort=False).mean(numeric_only=True).reset_index()
    labels = {name: LABELS.get(name, name) for name in families} | ({own: f"yours: {own}"} if own else {})
    others = mean[~mean["family"].isin(labels)]
    if len(others):
        ax.plot(others[bits], others[y], "o", color=PALETTE["other"], ms=5, label="other systems")
    for family, label in labels.items():
        mine = mean[mean["family"] == family].sort_values(bits)
        style = OWN if family == own else look(family)
        ax.errorbar(mine[bits], mine[y], interval(mine, y), label=label, capsize=2, lw=2.2, **style)


def ablation_dots(pairs, contexts: dict[str, str]):
    """Draw equivalent bits that each part of a design saves, a dot for every pair of designs that differ in nothing
    else. ``pairs``: of ``experiments.paired_ablation``; ``contexts``: those it was asked for -> title of a panel."""
    parts = list(dict.fromkeys(pairs["part"]))
    size = 11, 1.4 + 0.5 * len(parts)
    fig, axes = plt.subplots(1, len(contexts), figsize=size, sharex=True, sharey=True, squeeze=False)
    for ax, (context, title) in zip(axes[0], contexts.items(), strict=True):
        for (part, quantizer), rows in pairs.groupby(["part", pairs["design"].str.split(",").str[0]], sort=False):
            colour, marker, label = QUANTIZERS[quantizer]
            position = parts.index(part) + 0.18 * (list(QUANTIZERS).index(quantizer) // 2 - 0.5)
            saved, offsets = rows[f"saved_{context}"], [position] * len(rows)
            ax.plot(saved, offsets, marker, color=PALETTE[colour], ms=8, mew=0, alpha=0.6, label=label)
        ax.axvline(0, color=PALETTE["bound"], linewidth=1)
        ax.set(title=title, xlabel="equivalent bits per value saved")
    axes[0, 0].set_yticks(range(len(parts)), parts)
    axes[0, 0].set_ylim(len(parts) - 0.5, -0.5)
    looks = dict.fromkeys(QUANTIZERS.values())
    handles = [Line2D([], [], ls="", color=PALETTE[c], marker=m, ms=9, label=label) for c, m, label in looks]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


def proxy_dots(correlations):
    """Draw Spearman's correlation of each proxy with what a task loses; shaded: the one that sees no model."""
    rows = correlations.set_index("proxy").loc[list(PROXIES)]
    (model,), positions = set(rows["model"]), np.arange(len(rows))
    fig, ax = plt.subplots(figsize=(6.4, 0.38 * len(rows) + 1.4))
    middle, label = rows["correlation"], basename(model)
    error = whiskers(middle, rows["low"], rows["high"])
    colour, at = colour_of(model), positions - 0.15
    ax.errorbar(middle, at, xerr=error, fmt="o", color=colour, label=label, ms=8, elinewidth=1.8)
    ax.axhspan(len(rows) - 1.5, len(rows) - 0.5, color=PALETTE["published"], alpha=0.12, lw=0)
    ax.set(title=f"facts in text, {rows['bits'].iloc[0]} ({rows['systems'].max()} systems)", xlim=(-0.1, 1))
    ax.set_yticks(positions, PROXIES.values())
    ax.invert_yaxis()
    ax.set_xlabel("rank correlation with what is lost")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


COLOURS = {  # verdict: from blue to red, then what says nothing about the source
    "holds": "#3f90da",
    "holds in part": "#ffa90e",
    "does not hold": "#bd1f01",
    "needs their model": "#c9c9c9",
}
KINDS = {"arithmetic": "arithmetic", "measured here": "measured here", "needs their model": "not tested"}


def verdict_bars(table):
    """Draw claims of each source by verdict: a panel for each kind of test, a bar for each source."""
    sources = list(dict.fromkeys(table["source"]))
    fig, axes = plt.subplots(1, len(KINDS), figsize=(11, 0.9 + 0.5 * len(sources)), sharex=True, sharey=True)
    for ax, (how, title) in zip(axes, KINDS.items(), strict=True):
        mine = table[table["how"] == how] if how != "needs their model" else table[table["verdict"] == how]
        counts = mine.groupby(["source", "verdict"]).size().unstack(fill_value=0)
        counts = counts.reindex(index=sources, columns=list(COLOURS), fill_value=0)
        left = 0 * counts.iloc[:, 0]
        for verdict, colour in COLOURS.items():
            if how != "needs their model" and verdict == "needs their model":
                continue
            bars = ax.barh(counts.index, counts[verdict], left=left, color=colour, edgecolor="white", label=verdict)
            ink = "black" if verdict in ("holds in part", "needs their model") else "white"
            ax.bar_label(bars, [n or "" for n in counts[verdict]], label_type="center", color=ink)
            left = left + counts[verdict]
        ax.grid(axis="y", visible=False)
        ax.set(title=title, xlabel="claims")
    axes[0].invert_yaxis()
    fig.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


PANELS = {  # column -> the ends of its interval, and what its axis says
    "bits_with_side": ((), "bits per value,\nside information included"),
    "kl": (("kl_low", "kl_high"), "KL to the\nuncompressed cache (nats)"),
    "facts_long_lost": (("facts_long_lost_low", "facts_long_lost_high"), "facts lost in the\nlong text (points)"),
    "slower": ((), "time of a token, times\nthe uncompressed cache's"),
}


def compared(table):
    """Draw a row for each system, the fewest bits at the top; whiskers are 95% intervals."""
    table = table.assign(slower=table["ms"] / table["ms_exact"]).sort_values("bits_with_side", ascending=False)
    fig, axes = plt.subplots(1, len(PANELS), figsize=(10, 0.8 + 0.4 * len(table)), sharey=True)
    for ax, (column, (ends, label)) in zip(axes, PANELS.items(), strict=True):
        for row in table.to_dict("records"):
            style = look(row["system"].lower().replace("-kv", "").replace("int4", "quanto"))
            error = [[row[column] - row[ends[0]]], [row[ends[1]] - row[column]]] if ends else None
            ax.errorbar([row[column]], [row["system"]], xerr=error, linestyle="none", capsize=3, **style)
        ax.set_xlabel(label)
        if column == "kl":
            ax.set_xscale("log")
        else:
            low, high = min(0.0, ax.get_xlim()[0]), ax.get_xlim()[1]
            ax.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        if column == "facts_long_lost" and not table["facts_long_exact"].any():
            ax.set_xlabel("facts: the model itself\nanswers none")
    return fig
