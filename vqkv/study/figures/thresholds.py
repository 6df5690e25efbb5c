"""Figures of notebook 05."""

import matplotlib.pyplot as plt
import numpy as np

from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, basename, mark_floor, model_colour, model_of, whiskers

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
    """Draw KL, with its 95% interval over sequences, against the measured ratio to the live fp16 cache: a line over
    thresholds for each method with fallback, a point for each without."""
    fig, ax = plt.subplots(figsize=(10, 4))
    for method, (label, colour, marker) in METHODS.items():
        rows = table[(table["method"] == method) & (table["threshold"] != 0)]  # 0: all of it in fp16
        each = rows.groupby(["ratio", "threshold"], dropna=False)["kl"].agg(list)
        kl, low, high = np.array([paired_ratio(kl, [1] * len(kl)) for kl in each]).T
        style = {"fmt": f"{marker}-" if len(each) > 1 else marker, "elinewidth": 1, "capsize": 2}
        ratios = each.index.get_level_values("ratio")
        ax.errorbar(ratios, kl, whiskers(kl, low, high), color=PALETTE[colour], label=label, **style)
    ax.axvline(1, color=PALETTE["bound"], linewidth=1)
    ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
    ax.set(title=model_of(table), xlabel=f"times smaller than the live fp16 cache, {APART}", xscale="log", yscale="log")
    ax.set_xticks(RATIOS, map(str, RATIOS))
    plain_numbers(ax.yaxis)
    ax.text(1.05, 0.11, '"defensible": KL 0.1', color=PALETTE["published"], fontsize=9)
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
    own = {"color": model_colour(model), "linewidth": 2.5, "label": f"measured: {basename(model)}"}
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
    """Draw each tier's file: its ratio to every snapshot in fp32 (left, with the published claim as a mark) and to the
    live fp16 cache (right; left of 1: larger than the live cache)."""
    rows, (model,) = table.set_index("tier"), set(table["model"])
    fig, axes = plt.subplots(1, 2, figsize=(10.5, 4.4), sharey=True, width_ratios=(3, 2))
    panels = [("every_fp32", "against every snapshot in fp32", 1, 4000)]
    panels += [("live_fp16", "against the live fp16 cache", 0.05, 10)]
    for ax, (name, title, low, high) in zip(axes, panels, strict=True):
        ratios = rows[f"ratio_{name}"]
        ax.barh(range(len(rows)), ratios - low, 0.36, left=low, color=model_colour(model), label=basename(model))
        for place, ratio in enumerate(ratios):
            number = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
            ax.text(low * 1.1, place, number, va="center", fontsize=9, color="white")
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
