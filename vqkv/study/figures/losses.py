"""Figures of pages 05, 07 and 10: what fallback, phenomena and facts show of what caches lose."""

import matplotlib.pyplot as plt
import numpy as np

from vqkv.errors import DataError
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.figures.style import PALETTE, colour_of, interval, look, mark_floor, model_of, plain_numbers, whiskers

RATIOS = (1, 2, 4, 8, 16)
APART = "codebooks apart"
METHODS = {
    "vqq": ("VQ + fp16 fallback", "vqq", "o"),
    "vqq_product": ("product codes + fp16 fallback", "pq", "s"),
    "vq, 2": ("VQ of 2 values", "vq", "^"),
    "vq, 8": ("VQ of 8 values", "vq", "v"),
    "vq, 8, unscaled": ("... without per-head scale", "vq", "x"),
    "rvq2": ("2 residual stages", "vqllm", "D"),
}


def threshold_curves(table):
    """Draw KL against the measured ratio to the live fp16 cache: a line over thresholds, a point without fallback."""
    fig, ax = plt.subplots(figsize=(10, 4))
    for method, (label, colour, marker) in METHODS.items():
        rows = table[(table["method"] == method) & (table["threshold"] != 0)]  # 0: all of it in fp16
        each = rows.groupby(["ratio", "threshold"], dropna=False)["kl"].agg(list)
        kl, low, high = np.array([paired_ratio(kl, [1] * len(kl)) for kl in each]).T
        ratios, form = each.index.get_level_values("ratio"), f"{marker}-" if len(each) > 1 else marker
        bars, colour = whiskers(kl, low, high), PALETTE[colour]
        ax.errorbar(ratios, kl, bars, fmt=form, color=colour, label=label, elinewidth=1, capsize=2)
    ax.axvline(1, color=PALETTE["bound"], linewidth=1)
    ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
    ax.set(title=model_of(table), xlabel=f"times smaller than the live fp16 cache, {APART}", xscale="log", yscale="log")
    ax.set_xticks(RATIOS, map(str, RATIOS))
    plain_numbers(ax.yaxis)
    ax.text(5, 0.105, "KL 0.1: the source's limit of what is defensible", color=PALETTE["published"], fontsize=9)
    ax.set_ylabel("KL (nats), mean over sequences")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


def ratios_by_threshold(measured, claimed):
    """Draw the ratio by error threshold, a panel per denominator: as claimed, against every snapshot in fp32; and
    against the live fp16 cache, as measured (``measured``: columns ``threshold``, ``model``, ``ratio``) and as the
    source's own shares of blocks in fp16 leave it (``claimed``: ``threshold``, ``claimed_ratio``, ``claimed_live``)."""
    fig, (every, live) = plt.subplots(1, 2, figsize=(10, 3.8))
    measured, claimed = (table[table["threshold"] > 0] for table in (measured, claimed))
    look, (model,) = {"color": PALETTE["published"]}, set(measured["model"])
    every.plot(claimed["threshold"], claimed["claimed_ratio"], "o--", label="claimed (GPT-2)", **look)
    every.set(title="against every snapshot in fp32", ylabel="times smaller", ylim=(10, 2000))
    own = {"color": colour_of(model), "linewidth": 2.5, "label": f"measured: {model_of(measured)}"}
    live.plot(measured["threshold"], measured["ratio"], "o-", **own)
    live.plot(claimed["threshold"], claimed["claimed_live"], "s--", label="from the source's own shares", **look)
    live.axhline(1, color=PALETTE["bound"], linewidth=1)
    live.set(title=f"against the live fp16 cache, {APART}", ylim=(0.8, 20))
    ticks = [t for t in claimed["threshold"] if t != 0.08]
    for ax in (every, live):
        ax.set(xscale="log", yscale="log", xlabel="error threshold (share of the head's maximum)")
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=9)
        ax.minorticks_off()
        ax.legend(loc="upper left" if ax is live else "lower right")
    live.set_yticks(RATIOS, map(str, RATIOS))
    return fig


def ladder_bars(table, claimed: dict[str, float]):
    """Draw each tier's ratio to every snapshot in fp32 (marks: as claimed) and to the live fp16 cache."""
    rows, (model,) = table.set_index("tier"), set(table["model"])
    fig, axes = plt.subplots(1, 2, figsize=(10.5, 4.4), sharey=True, width_ratios=(3, 2))
    panels: list[tuple[str, str, float, int]] = [("every_fp32", "against every snapshot in fp32", 1, 4000)]
    panels += [("live_fp16", "against the live fp16 cache", 0.05, 10)]
    for ax, (name, title, low, high) in zip(axes, panels, strict=True):
        ratios = rows[f"ratio_{name}"]
        ax.barh(range(len(rows)), ratios - low, 0.36, left=low, color=colour_of(model), label=model_of(table))
        for position, ratio in enumerate(ratios):
            number = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
            ax.text(low * 1.1, position, number, va="center", fontsize=9, color="white")
        ax.set(xscale="log", xlim=(low, high), title=title, xlabel="times smaller (bytes on disk)")
    marks = [claimed.get(tier, float("nan")) for tier in rows.index]
    axes[0].plot(marks, range(len(rows)), "D", color=PALETTE["bound"], label="claimed")
    axes[1].axvline(1, color=PALETTE["bound"], linewidth=1)
    axes[0].set_yticks(range(len(rows)), [tier.replace("deltas", "deltas (our reading)") for tier in rows.index])
    axes[0].invert_yaxis()
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


def eviction_curves(table):
    """Draw KL against the share of tokens retained, by codec and rule."""
    fig, ax = plt.subplots(figsize=(10, 3.8))
    for (codec, rule), rows in table.groupby(["codec", "rule"], sort=False):
        style = {"heavy hitters": "o-", "SnapKV": "s--"}.get(rule, "x:")
        name = "residual VQ" if codec == "vqllm" else codec
        ax.plot(100 * rows["retain"], rows["kl_mean"], style, color=PALETTE[codec], label=f"{name}, {rule}")
    ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
    ax.set(title=model_of(table), xlabel="tokens retained (%)")
    ax.invert_xaxis()
    mark_floor(ax, table)
    ax.text(26, 0.105, "KL 0.1", color=PALETTE["published"], fontsize=9, ha="right")
    ax.set_ylabel("KL (nats)")
    ax.legend(fontsize=9)
    return fig


SHOWN = {  # phenomenon -> what its size is, and systems
    "outlier channels": (
        "outlier channels, times as loud",
        ["vqllm contiguous", "vqllm strided", "quanto 4", "higgs 2", "kivi 2", "Fisher-weighted PCA 2"],
    ),
    "key bias": (
        "constant in one channel of each head's keys",
        ["quanto 4", "turboquant 4", "higgs 4, mean kept", "higgs 4", "kivi 2", "live 2.25"],
    ),
}


def kl_by_size(table):
    """Draw KL against the size of each phenomenon of ``SHOWN``, a line a system, or raise ``DataError`` for none."""
    put = set(table.loc[table["size"] > 0, "phenomenon"])
    shown = {phenomenon: how for phenomenon, how in SHOWN.items() if phenomenon in put}
    if not shown:
        raise DataError(f"none of {', '.join(SHOWN)} was put into the model")
    fig, axes = plt.subplots(1, len(shown), figsize=(11, 5), sharey=True, squeeze=False)
    for ax, (phenomenon, (label, systems)) in zip(axes[0], shown.items(), strict=True):
        mine = table[table["phenomenon"] == phenomenon]
        for system in systems:
            rows = mine[mine["system"] == system].sort_values("size")
            style = look(system) | ({"ls": ":"} if "mean kept" in system else {})
            style |= {"color": PALETTE["contiguous"]} if "contiguous" in system else {}
            ax.errorbar(rows["size"], rows["kl_mean"], interval(rows), label=system, capsize=2, **style)
        sizes = sorted(set(mine["size"]))
        ax.set_xscale("symlog", linthresh=min(size for size in sizes if size))  # logarithmic, with 0
        ax.set(yscale="log", xlabel=label)
        ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
        ax.minorticks_off()
        ax.legend(loc="upper left", fontsize=9, ncols=2)
        ax.set_ylim(top=8 * table["kl_mean"].max())  # room for the legend
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL to the uncompressed cache (nats)")
    return fig


def tuning_dots(table):
    """Draw what training gives back (%), a panel for each number of codebooks, a row for each label and rate."""
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
    """Draw the facts told by each way to store a cache, with the 95% interval of its loss, by length of text and number
    of facts. ``names``: (system, nominal bits) -> label, the exact cache (dotted) first; others are left out."""
    cells = table[table["task"] == "facts"].set_index(["system", "nominal_bits"]).groupby(["text_len", "num_facts"])
    size, positions = (11, 1.1 + 0.3 * len(names)), range(len(names))
    fig, axes = plt.subplots(1, len(cells), figsize=size, sharex=True, sharey=True, squeeze=False)
    colours = [look(system)["color"] for system, _ in names]
    for ax, ((length, number), rows) in zip(axes[0], cells, strict=True):
        rows = rows.reindex([*names])
        recalled, error = 100 * rows["told"], whiskers(-rows["lost"], -rows["lost_high"], -rows["lost_low"])
        ax.barh(positions, recalled, 0.7, color=colours, xerr=error, error_kw={"elinewidth": 1, "capsize": 2})
        ax.axvline(recalled.iloc[0], color=PALETTE["fp16"], linestyle=":", linewidth=1)
        for position in np.flatnonzero(recalled.isna()):
            ax.text(4, position, "not measured", color=PALETTE["published"], fontsize=8, va="center")
        ax.set(title=f"{number} facts in\n{length:,} tokens", xlim=(0, 104), xticks=[0, 50, 100])
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(positions, names.values())
    axes[0, 0].invert_yaxis()
    fig.supxlabel("facts told (%)", fontsize=11)
    return fig
