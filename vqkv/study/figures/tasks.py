"""Figures of notebook 10."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, look


def tuning_dots(table):
    """What training gives back of what codes cost (``finetuning.given_back``), in percent: a panel for each number of
    codebooks, a row for each label and rate; small dots are seeds, bars run from the least to the most."""
    depths = sorted(table["num_quantizers"].unique())
    fig, axes = plt.subplots(1, len(depths), figsize=(10, 2.9), sharey=True, squeeze=False)
    for ax, depth in zip(axes[0], depths, strict=True):
        kinds = table[table["num_quantizers"] == depth].groupby(["label", "learning_rate"], sort=False)
        for y, (_, rows) in enumerate(kinds):
            share, colour = rows["given_back"], PALETTE["kivi" if "control" in rows["label"].iloc[0] else "vqllm"]
            spread = [[share.mean() - share.min()], [share.max() - share.mean()]]
            ax.errorbar([share.mean()], [y], xerr=spread, fmt="D", ms=8, color=colour, capsize=4)
            ax.plot(share, [y] * len(share), "o", ms=4, color=PALETTE["fp16"])
        ax.axvline(0, color=PALETTE["fp16"], linewidth=1)
        ax.set(title=f"{depth} codebooks", xlabel="of what codes cost, given back (%)", ylim=(len(kinds) - 0.5, -0.5))
        ax.set_yticks(range(len(kinds)), [f"{label}\n(rate {rate:g})" for label, rate in kinds.groups])
    return fig


def told_lines(table, num_facts: int, text_len: int, names: dict[tuple[str, float], str]):
    """Facts told by each way to store a cache, with the 95% interval of what it loses: left, ``num_facts`` of them in
    longer and longer texts; right, more and more of them in ``text_len`` tokens. ``names``: (system, nominal bits) ->
    label; the others are left out."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    facts = table[table["task"] == "facts"]
    panels = (("text_len", "num_facts", num_facts, "tokens of the text"), ("num_facts", "text_len", text_len, "facts"))
    for ax, (along, fixed, value, label) in zip(axes, panels, strict=True):
        mine = facts[facts[fixed] == value]
        for (system, bits), name in names.items():
            rows = mine[(mine["system"] == system) & (mine["nominal_bits"] == bits)].sort_values(along)
            error = [(rows["lost_high"] - rows["lost"]).clip(0), (rows["lost"] - rows["lost_low"]).clip(0)]
            style = {"color": PALETTE["fp16"], "marker": "o"} if system == "fp16" else look(system)
            ax.errorbar(rows[along], 100 * rows["told"], error, capsize=2, label=name, **style | {"ms": 6})
        ax.set(xscale="log", xlabel=label, ylim=(-4, 104))
        ax.set_xticks(sorted(set(mine[along])), [f"{x:,}" for x in sorted(set(mine[along]))], minor=False)
        ax.minorticks_off()
    axes[0].set(title=f"{num_facts} facts", ylabel="facts told (%)")
    axes[1].set(title=f"in {text_len} tokens")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return fig
