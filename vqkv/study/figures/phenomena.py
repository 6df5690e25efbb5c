"""Figure of notebook 01."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE

ROLE_NAMES = {"key": "keys before RoPE", "key_post_rope": "keys after RoPE", "value": "values"}


def magnitudes_by_layer(table, published: dict[str, float]):
    """Left: each head's largest |value| by layer, a point per head, and ``published`` medians of other models as lines.
    Right: how much larger the head's loudest channel is than its median channel."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for offset, (role, name) in zip((-0.2, 0, 0.2), ROLE_NAMES.items(), strict=True):
        rows, look = table[table["role"] == role], {"color": PALETTE[role], "label": name, "ms": 4.5}
        left.plot(rows["layer"] + offset, rows["max_abs"], "o", **look)
        right.plot(rows["layer"] + offset, rows["channel_ratio"], "o", **look)
    for style, (model, median) in zip(("--", ":"), published.items(), strict=True):
        left.axhline(median, color=PALETTE["published"], linestyle=style, label=f"{model}'s median head (published)")
    right.axhline(1, color=PALETTE["bound"], linewidth=1)
    left.set(xlabel="layer", ylabel="largest |value| of a head", yscale="log")
    right.set(xlabel="layer", ylabel="loudest channel / median channel\n(mean |value|)", yscale="log")
    for ax in (left, right):
        plain_numbers(ax.yaxis)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    return fig
