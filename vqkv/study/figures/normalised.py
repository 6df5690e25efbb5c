"""Figures of notebook 17."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, basename, interval, short

CODECS = {  # colour and marker
    "2 codes of 8 values": ("other", "s"),
    "VQ of 8 values": ("vq", "v"),
    "... without per-head scale": ("vq", "x"),
    "VQ of 2 values": ("vq", "^"),
}


def architecture_dots(table):
    """KL of each codec by model, with 95% intervals over sequences, beside the source's limit and its hope."""
    models = list(dict.fromkeys(table["model"]))[::-1]
    fig, ax = plt.subplots(figsize=(8.5, 3.8))
    for i, (codec, (colour, marker)) in enumerate(CODECS.items()):
        rows = table[table["codec"] == codec].set_index("model").loc[models]
        places = [y + 0.12 * (1.5 - i) for y in range(len(models))]
        look = {"color": PALETTE[colour], "capsize": 2, "linewidth": 1}
        ax.errorbar(rows["kl_mean"], places, xerr=interval(rows), fmt=marker, label=codec, **look)
    for kl, words, side in ((0.1, '"defensible" 0.1', "left"), (0.03, "expected of normed K and V: 0.03", "right")):
        ax.axvline(kl, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.text(kl, len(models) - 0.45, words, color=PALETTE["published"], fontsize=9, ha=side, va="bottom")
    ax.set_yticks(range(len(models)), models)
    ax.set(xscale="log", xlabel="KL (nats), prompt read from the codec", ylim=(-0.5, len(models) - 0.5))
    fig.legend(loc="outside right center", fontsize=9)
    return fig


def product_lines(gaps):
    """Product codes' error over two residual stages' by number of codes: a line per data, a band from the least to the
    most of the seeds."""
    fig, ax = plt.subplots(figsize=(7.5, 3.6))
    for data, rows in gaps.groupby("data", sort=False):
        model, _, role = data.rpartition(" ")
        real = role in ("keys", "values")
        colour = PALETTE[short(model)] if real else PALETTE["bound"]
        line = {"keys": "o-", "values": "s:"}.get(role, "D--")
        ax.plot(rows["codebook_size"], rows["mean"], line, color=colour, label=basename(data))
        ax.fill_between(rows["codebook_size"], rows["min"], rows["max"], color=colour, alpha=0.15, lw=0)
    ax.axhline(1, color=PALETTE["bound"], linewidth=1)
    sizes = sorted(set(gaps["codebook_size"]))
    ax.set(xscale="log", yscale="log", xlabel="codes in a codebook (two codes a block of 8 values)", ylim=(0.8, 2.7))
    ax.set(ylabel="product codes' error\nover residual stages'")
    ax.set_yticks([0.9, 1, 1.25, 1.5, 2, 2.5], ["0.9", "1", "1.25", "1.5", "2", "2.5"])
    ax.set_xticks(sizes, [f"{size}" for size in sizes])
    ax.minorticks_off()
    fig.legend(loc="outside right center", fontsize=9)
    return fig
