"""Figures of notebook 01."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import name_ends, plain_numbers
from vqkv.study.figures.style import PALETTE, basename, by_model, short

ROLE_NAMES = {"key": "keys before RoPE", "key_post_rope": "keys after RoPE", "value": "values"}


LEARNED = {  # quantity -> title, times what, axis
    "recall of 32 pairs": ("recall of 32 pairs", 100, "accuracy (%)"),
    "recall behind 500 tokens": ("recall of 8 pairs behind 500 tokens", 100, "accuracy (%)"),
    "bits_per_byte": ("held-out text", 1, "bits per byte"),
}


def magnitude_boxes(table, published):
    """Per-head max|v| of each model by role, beside what was published of its counterpart: line from the least to the
    largest, with median and 90th percentile.

    ``published``: bundled model name -> (published model's name, {statistic: number or, if larger than that, ">25"}).
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
        ax.set(title=f"{basename(model)}: {len(mine) // len(roles)} KV heads", yscale="log")
        if model in published:
            _published_marks(ax, len(roles), *published[model])
    axes[0, 0].set_ylabel("largest |value| of a head")
    plain_numbers(axes[0, 0].yaxis)
    return fig


def _published_marks(ax, x: float, name: str, numbers: dict) -> None:
    places = [float(str(number).strip(">")) for number in numbers.values()]
    ax.plot([x] * len(places), places, "o-", color=PALETTE["published"], ms=7)
    for (statistic, number), place in zip(numbers.items(), places, strict=True):
        ax.annotate(f"{statistic} {number}", (x, place), (9, 0), textcoords="offset points", va="center", fontsize=11)
    ax.set_xticks([*ax.get_xticks(), x], [*[t.get_text() for t in ax.get_xticklabels()], f"{name}\n(published)"])
    ax.set_xlim(-0.6, x + 1.1)


def channel_ratios(table):
    """By layer, how much larger a head's loudest channel is than its median channel; a point per head."""
    fig, axes, panels = by_model(table, (9, 3.8))
    for ax, model, mine in panels:
        for offset, role in ((-0.2, "key"), (0, "key_post_rope"), (0.2, "value")):
            rows, look = mine[mine["role"] == role], {"color": PALETTE[role], "label": ROLE_NAMES[role], "ms": 7}
            ax.plot(rows["layer"] + offset, rows["channel_ratio"], "o", **look)
        ax.axhline(1, color=PALETTE["bound"], linewidth=1)
        ax.set(title=basename(model), xlabel="layer", xticks=sorted(set(table["layer"])), yscale="log")
    plain_numbers(axes[0, 0].yaxis)
    axes[0, 0].set_ylabel("loudest channel / median channel\n(mean |value|)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


def recall_lines(table, chance: float):
    """Key-value recall of each model behind more and more tokens of text, and what guessing (``chance``) would give."""
    rows = table[table["quantity"].str.contains("behind")]
    rows = rows.assign(gap=rows["quantity"].str.extract(r"behind (\d+) tokens", expand=False).astype(int))
    fig, ax = plt.subplots(figsize=(7, 3.6))
    for model, mine in rows.groupby("model", sort=False):
        look = {"color": PALETTE[short(model)], "label": basename(model), "lw": 2.5, "ms": 8}
        ax.plot(mine["gap"], 100 * mine["value"], "o-", **look)
    ax.plot([0, rows["gap"].max()], [100 * chance] * 2, "--", color=PALETTE["published"], label="guessing")
    ax.set(xticks=sorted(set(rows["gap"])), ylim=(-4, 104), xlabel="tokens of text between the pairs and the question")
    ax.set_ylabel("values recalled (%)")
    name_ends(ax)
    return fig


def emergence(table):
    """What each model could do (``LEARNED``, a panel each) after so many training tokens."""
    fig, axes = plt.subplots(1, len(LEARNED), figsize=(12, 3.6), sharex=True)
    for ax, (quantity, (title, scale, label)) in zip(axes, LEARNED.items(), strict=True):
        for model, mine in table.groupby("model", sort=False):
            curve = mine[mine["quantity"] == quantity].dropna()
            look = {"color": PALETTE[short(model)], "label": basename(model)}
            ax.plot(curve["tokens"] / 1e6, scale * curve["value"], lw=2.5, **look)
        ax.set(title=title, ylabel=label, xlabel="training tokens (millions)", ylim=(0, 104 if scale > 1 else None))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
