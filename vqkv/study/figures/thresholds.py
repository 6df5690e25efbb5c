"""Figures of notebook 05."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, by_model, mark_floor, short

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
            rows = mine[(mine["method"] == method) & (mine["kl"] > 0)]
            points = rows.groupby(["threshold", "ratio"], dropna=False)["kl"].mean().reset_index().sort_values("ratio")
            ax.plot(points["ratio"], points["kl"], f"{marker}-", color=PALETTE[colour], label=label)
        ax.axvline(1, color=PALETTE["bound"], linewidth=1)
        ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.set(title=model, xlabel="times smaller than the live fp16 cache", xscale="log", yscale="log")
        ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        mark_floor(ax, mine)
    axes[0, 0].text(1.05, 0.105, 'the source\'s "defensible" KL 0.1', color=PALETTE["published"], fontsize=9)
    axes[0, 0].set_ylabel("KL (nats), mean over sequences")
    axes[0, -1].legend(loc="lower right")
    return fig


def ratios_by_threshold(measured, claimed):
    """Ratio by error threshold: as claimed, and as measured against the live fp16 cache (``measured``: columns
    ``threshold``, ``model``, ``ratio``; ``claimed``: ``threshold``, ``claimed_ratio``)."""
    fig, ax = plt.subplots(figsize=(7.5, 3.8))
    claimed = claimed[claimed["threshold"] > 0]
    ax.plot(claimed["threshold"], claimed["claimed_ratio"], "o--", color=PALETTE["published"], label="claimed (GPT-2)")
    for model, rows in measured[measured["threshold"] > 0].groupby("model", sort=False):
        ax.plot(rows["threshold"], rows["ratio"], "o-", color=PALETTE[short(model)], label=f"measured ({model})")
    ax.axhline(1, color=PALETTE["bound"], linewidth=1)
    ax.text(1, 1.08, "as large as the live fp16 cache", fontsize=9, ha="right")
    ax.set(xscale="log", yscale="log", xlabel="error threshold (share of the head's maximum)")
    ax.set(
        ylabel="compression ratio", xticks=claimed["threshold"], xticklabels=[f"{t:g}" for t in claimed["threshold"]]
    )
    ax.minorticks_off()
    ax.legend()
    return fig


def sequence_spread(table, chosen: list[tuple[str, str, float | None]]):
    """KL of every single sequence, a dot each, and their mean, for (label, method, threshold) by model."""
    fig, axes, panels = by_model(table, (10, 3.4))
    for ax, model, mine in panels:
        for x, (_, method, threshold) in enumerate(chosen):
            rows = mine[mine["method"] == method]
            rows = rows if threshold is None else rows[rows["threshold"] == threshold]
            colour = PALETTE[METHODS[method][1]]
            offsets = x + 0.3 * (rows["sequence"] / max(1, rows["sequence"].max()) - 0.5)
            ax.plot(offsets, rows["kl"], "o", color=colour, alpha=0.7)
            ax.plot([x - 0.3, x + 0.3], [rows["kl"].mean()] * 2, color=PALETTE["bound"])
        ax.axhline(0.1, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.set_xticks(range(len(chosen)), [label for label, *_ in chosen], rotation=20, ha="right")
        ax.set(title=model, yscale="log")
        mark_floor(ax, mine)
    axes[0, 0].text(0.6, 0.115, "KL 0.1", color=PALETTE["published"], fontsize=9)
    axes[0, 0].set_ylabel("KL of a sequence (nats)")
    return fig


def ladder_bars(table, claimed: dict[str, float]):
    """Each tier's file: ratio to every snapshot in fp32 (bar, with the published claim as a mark) and to the live fp16
    cache (narrow bar; left of 1: larger than the live cache). Mean over models."""
    rows = table.groupby("tier", sort=False)[["ratio_every_fp32", "ratio_live_fp16", "kl_mean"]].mean()
    fig, ax = plt.subplots(figsize=(9.5, 4.4))
    for y, (tier, row) in enumerate(rows.iterrows()):
        ax.barh(y - 0.18, row["ratio_every_fp32"] - 0.05, 0.34, left=0.05, color=PALETTE["vqq"])
        ax.barh(y + 0.2, row["ratio_live_fp16"] - 0.05, 0.34, left=0.05, color=PALETTE["vq"])
        ax.text(1.15, y - 0.18, f"{row['ratio_every_fp32']:.0f}x", va="center", fontsize=9)
        ax.text(
            max(1.15, row["ratio_live_fp16"] * 1.1), y + 0.2, f"{row['ratio_live_fp16']:.2g}x", va="center", fontsize=9
        )
        ax.plot(claimed.get(tier, float("nan")), y - 0.18, "D", color=PALETTE["bound"], label="_" if y else "claimed")
    ax.axvline(1, color=PALETTE["bound"], linewidth=1)
    ax.barh(0, 0, color=PALETTE["vqq"], label="against every snapshot in fp32")
    ax.barh(0, 0, color=PALETTE["vq"], label="against the live fp16 cache")
    labels = [f"{tier}\nKL {kl:.1g}" for tier, kl in rows["kl_mean"].items()]
    ax.set_yticks(range(len(rows)), labels, fontsize=9)
    ax.set(xscale="log", xlabel="times smaller (bytes on disk)", xlim=(0.05, 4000))
    ax.invert_yaxis()
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    return fig


CODERS = {"by_stage": "a table per stage", "by_place": "a table per place in a token"}


def entropy_bars(table):
    """Factors by which ANS makes the codes smaller, by codec and role, with three kinds of tables; a panel per
    model."""
    codecs = list(dict.fromkeys(table["codec"]))
    fig, axes, panels = by_model(table, (10, 4.2))
    for ax, model, mine in panels:
        mine = mine.groupby(["codec", "role"], sort=False)[["packed", *CODERS]].mean()
        places = [(codec, role) for codec in codecs for role in ("key", "value")]
        for i, (coder, label) in enumerate(CODERS.items()):
            gains = [mine.loc[place, "packed"] / mine.loc[place, coder] for place in places]
            heights = [gain - 1 for gain in gains]
            ax.bar([x + 0.27 * (i - 1) for x in range(len(places))], heights, 0.25, 1, color=f"C{i}", label=label)
        ax.axhline(1, color=PALETTE["bound"], linewidth=1)
        ax.axhspan(1.2, 1.5, color=PALETTE["published"], alpha=0.25, label="guessed by the source", zorder=0)
        labels = [f"{codec}, {role}s" for codec, role in places]
        ax.set_xticks(range(len(places)), labels, fontsize=9, rotation=25, ha="right")
        ax.set(title=model, ylim=(0.98, None))
    axes[0, 0].set_ylabel("times smaller than packed codes")
    axes[0, -1].legend(fontsize=9)
    return fig


def eviction_curves(table):
    """KL against the share of tokens retained, by codec and rule; a panel per model."""
    fig, axes, panels = by_model(table, (10, 3.6))
    for ax, model, mine in panels:
        for (codec, rule), rows in mine.groupby(["codec", "rule"], sort=False):
            style = "o-" if rule == "heavy hitters" else "x:"
            ax.plot(100 * rows["retain"], rows["kl_mean"], style, color=PALETTE[codec], label=f"{codec}, {rule}")
        ax.set(title=model, xlabel="tokens retained (%)", yscale="log")
        ax.invert_xaxis()
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL (nats)")
    axes[0, -1].legend(fontsize=9)
    return fig
