"""Figures of notebook 01."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, by_model, short

ROLE_NAMES = {"key": "keys before RoPE", "key_post_rope": "keys after RoPE", "value": "values"}


def magnitude_boxes(table, published):
    """Per-head max|v| of each model by role, beside the published median, p90 and largest of its counterpart.

    ``published``: bundled model name -> (published model's name, {statistic: value}).
    """
    fig, axes, panels = by_model(table, (10, 3.8))
    for ax, model, mine in panels:
        roles = [role for role in ROLE_NAMES if (mine["role"] == role).any()]
        for i, role in enumerate(roles):
            values = mine.loc[mine["role"] == role, "max_abs"]
            box = ax.boxplot(values, positions=[i], widths=0.6, whis=(0, 100), patch_artist=True)
            box["boxes"][0].set(facecolor=PALETTE[role], alpha=0.8)
            box["medians"][0].set(color="black")
        ax.set_xticks(range(len(roles)), [ROLE_NAMES[role].replace(" ", "\n", 1) for role in roles])
        ax.set_title(f"{model}: {len(mine) // len(roles)} KV heads")
        if model in published:
            _published_marks(ax, len(roles), *published[model])
    axes[0, 0].set_ylabel("largest |value| of a head")
    axes[0, 0].set_ylim(bottom=0)
    return fig


def _published_marks(ax, x: float, name: str, numbers: dict[str, float]) -> None:
    for (statistic, value), marker in zip(numbers.items(), "ov^s", strict=False):
        ax.plot(x, value, marker, color=PALETTE["published"])
        ax.annotate(f"{statistic} {value:g}", (x, value), (6, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_xticks([*ax.get_xticks(), x], [*[t.get_text() for t in ax.get_xticklabels()], f"{name}\n(published)"])
    ax.set_xlim(-0.6, x + 1.1)


def channel_ratios(table):
    """By layer, how much larger a head's loudest channel is than its median channel; a point per head."""
    fig, axes, panels = by_model(table, (8.5, 3.4))
    for ax, model, mine in panels:
        for offset, role in ((-0.2, "key"), (0, "key_post_rope"), (0.2, "value")):
            rows, look = mine[mine["role"] == role], {"color": PALETTE[role], "label": ROLE_NAMES[role], "alpha": 0.8}
            ax.plot(rows["layer"] + offset, rows["channel_ratio"], "o", **look)
        ax.axhline(1, color=PALETTE["bound"], linewidth=1)
        ax.set(title=model, xlabel="layer", xticks=sorted(set(table["layer"])), yscale="log")
    axes[0, 0].set_ylabel("loudest channel / median channel\n(mean |value|)")
    axes[0, 0].legend()
    return fig


def recall_bars(table, chance: float):
    """Key-value recall of each model behind more and more tokens of text, and what guessing (``chance``) would give."""
    rows = table[table["quantity"].str.contains("behind")]
    gaps = rows["quantity"].str.extract(r"behind (\d+) tokens")[0]
    heights = rows.assign(gap=gaps.astype(int)).pivot(index="gap", columns="model", values="value")
    fig, ax = plt.subplots(figsize=(7, 3))
    for i, model in enumerate(dict.fromkeys(rows["model"])):
        places = [x + (i - (heights.shape[1] - 1) / 2) * 0.4 for x in range(len(heights))]
        ax.bar(places, 100 * heights[model], 0.38, color=PALETTE[short(model)], label=model)
    guessing = {"color": PALETTE["bound"], "linestyle": "--", "linewidth": 1}
    ax.axhline(100 * chance, **guessing, label=f"guessing: {100 * chance:.1f}%")
    ax.set(xticks=range(len(heights)), xticklabels=heights.index, ylim=(0, 120), yticks=range(0, 101, 20))
    ax.set(xlabel="tokens of text between the pairs and the queries", ylabel="recall accuracy (%)")
    ax.legend(loc="upper center", ncols=3)
    return fig


def emergence(table):
    """Recall by number of pairs, induction and bits per byte of each model against its training tokens."""
    fig, axes, panels = by_model(table, (10, 3.8))
    for ax, model, mine in panels:
        wanted = ["induction", "bits_per_byte", *(f"recall of {pairs} pairs" for pairs in ("4", "16", "32"))]
        curves = mine.pivot(index="tokens", columns="quantity", values="value").reindex(columns=wanted)
        shades = {"4": 0.4, "16": 0.7, "32": 1.0}
        for pairs, alpha in shades.items():
            look = {"color": PALETTE[short(model)], "alpha": alpha, "label": f"recall of {pairs} pairs"}
            ax.plot(curves.index / 1e6, 100 * curves[f"recall of {pairs} pairs"], **look)
        ax.plot(curves.index / 1e6, 100 * curves["induction"], "--", color=PALETTE["bound"], label="induction score")
        ax.set(title=model, xlabel="training tokens (millions)", ylim=(0, 102))
        bits = ax.twinx()
        known = curves["bits_per_byte"].dropna()
        bits.plot(known.index / 1e6, known, ":", color=PALETTE["published"], label="bits per byte (right)")
        bits.set(ylim=(1, 4), ylabel="bits per byte, held-out text" if ax is axes[0, -1] else "")
        bits.grid(False)
        bits.spines["right"].set_visible(True)
        lines = [*ax.get_lines(), *bits.get_lines()]
        ax.legend(lines, [line.get_label() for line in lines], loc="center right")
    axes[0, 0].set_ylabel("accuracy, attention (%)")
    return fig
