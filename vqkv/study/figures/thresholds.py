"""Figures of notebook 05."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, basename, by_model, mark_floor, short

METHODS = {
    "vqq": ("VQ + fp16 fallback", "vqq", "o"),
    "vqq_product": ("product codes + fp16 fallback", "pq", "s"),
    "vq, 2": ("VQ of 2 values", "vq", "^"),
    "vq, 8": ("VQ of 8 values", "vq", "v"),
    "vq, 8, unscaled": ("... without per-head scale", "vq", "x"),
    "rvq2": ("2 residual stages", "vqllm", "D"),
}


def threshold_curves(table):
    """KL against the measured ratio to the live fp16 cache: a line over thresholds for each method with fallback, a
    point for each without; one panel per model."""
    fig, axes, panels = by_model(table, (10, 4))
    for ax, model, mine in panels:
        for method, (label, colour, marker) in METHODS.items():
            rows = mine[(mine["method"] == method) & (mine["threshold"] != 0)]  # 0: all of it in fp16
            points = rows.groupby(["threshold", "ratio"], dropna=False)["kl"].mean().reset_index().sort_values("ratio")
            line = f"{marker}-" if len(points) > 1 else marker
            ax.plot(points["ratio"], points["kl"], line, color=PALETTE[colour], label=label)
        ax.axvline(1, color=PALETTE["bound"], linewidth=1)
        ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.set(title=basename(model), xlabel="times smaller than the live fp16 cache", xscale="log", yscale="log")
        ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        plain_numbers(ax.yaxis)
    axes[0, 0].text(1.05, 0.11, '"defensible": KL 0.1', color=PALETTE["published"], fontsize=9)
    axes[0, 0].set_ylabel("KL (nats), mean over sequences")
    axes[0, -1].legend(loc="lower right")
    return fig


def ratios_by_threshold(measured, claimed):
    """Ratio by error threshold, a panel per denominator: as claimed, against every snapshot in fp32; and against the
    live fp16 cache, as measured (``measured``: columns ``threshold``, ``model``, ``ratio``) and as the source's own
    shares of blocks in fp16 leave it (``claimed``: ``threshold``, ``claimed_ratio``, ``claimed_live``)."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    measured, claimed = (table[table["threshold"] > 0] for table in (measured, claimed))
    look = {"color": PALETTE["published"]}
    axes[0].plot(claimed["threshold"], claimed["claimed_ratio"], "o--", label="claimed (GPT-2)", **look)
    axes[0].set(title="against every snapshot in fp32", ylabel="times smaller", ylim=(10, 2000))
    for (model, rows), line in zip(measured.groupby("model", sort=False), ("-", ":"), strict=False):
        look_of_model = {"color": PALETTE[short(model)], "linewidth": 2.5}
        axes[1].plot(
            rows["threshold"], rows["ratio"], f"o{line}", label=f"measured ({basename(model)})", **look_of_model
        )
    axes[1].plot(claimed["threshold"], claimed["claimed_live"], "s--", label="from the source's own shares", **look)
    axes[1].axhline(1, color=PALETTE["bound"], linewidth=1)
    axes[1].set(title="against the live fp16 cache", ylim=(0.8, 20))
    axes[1].set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ticks = [t for t in claimed["threshold"] if t != 0.08]
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlabel="error threshold (share of the head's maximum)")
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=9)
        ax.minorticks_off()
        ax.legend(loc="upper left" if ax is axes[1] else "lower right")
    axes[1].set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    return fig


def ladder_bars(table, claimed: dict[str, float]):
    """Each tier's file, a bar per model: ratio to every snapshot in fp32 (left, with the published claim as a mark) and
    to the live fp16 cache (right; left of 1: larger than the live cache)."""
    tiers, models = (list(dict.fromkeys(table[column])) for column in ("tier", "model"))
    fig, axes = plt.subplots(1, 2, figsize=(10.5, 4.4), sharey=True, width_ratios=(3, 2))
    panels = [("every_fp32", "against every snapshot in fp32", 1, 4000)]
    panels += [("live_fp16", "against the live fp16 cache", 0.05, 10)]
    for ax, (name, title, low, high) in zip(axes, panels, strict=True):
        for i, model in enumerate(models):
            ratios = table[table["model"] == model].set_index("tier").loc[tiers, f"ratio_{name}"]
            places = [y + 0.38 * (i - (len(models) - 1) / 2) for y in range(len(tiers))]
            ax.barh(places, ratios - low, 0.36, left=low, color=PALETTE[short(model)], label=basename(model))
            for y, ratio in zip(places, ratios, strict=True):
                ax.text(
                    low * 1.1,
                    y,
                    f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}",
                    va="center",
                    fontsize=9,
                    color="white",
                )
        ax.set(xscale="log", xlim=(low, high), title=title, xlabel="times smaller (bytes on disk)")
    marks = [claimed.get(tier, float("nan")) for tier in tiers]
    axes[0].plot(marks, range(len(tiers)), "D", color=PALETTE["bound"], label="claimed")
    axes[1].axvline(1, color=PALETTE["bound"], linewidth=1)
    axes[0].set_yticks(range(len(tiers)), [tier.replace("deltas", "deltas (our reading)") for tier in tiers])
    axes[0].invert_yaxis()
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


NAMES = {"fp16": "fp16", "vqllm": "residual VQ"}


def eviction_curves(table):
    """KL against the share of tokens retained, by codec and rule; a panel per model."""
    fig, axes, panels = by_model(table, (10, 3.8))
    for ax, model, mine in panels:
        for (codec, rule), rows in mine.groupby(["codec", "rule"], sort=False):
            style = {"heavy hitters": "o-", "SnapKV": "s--"}.get(rule, "x:")
            ax.plot(100 * rows["retain"], rows["kl_mean"], style, color=PALETTE[codec], label=f"{NAMES[codec]}, {rule}")
        ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.set(title=basename(model), xlabel="tokens retained (%)")
        ax.invert_xaxis()
        mark_floor(ax, mine)
    axes[0, 0].text(26, 0.105, "KL 0.1", color=PALETTE["published"], fontsize=9, ha="right")
    axes[0, 0].set_ylabel("KL (nats)")
    axes[0, 0].legend(fontsize=9)
    return fig
