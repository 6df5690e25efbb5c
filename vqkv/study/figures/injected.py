"""Figure of page 07: KL by how strong a phenomenon is."""

import matplotlib.pyplot as plt

from vqkv.errors import DataError
from vqkv.study.figures.style import PALETTE, interval, look, mark_floor

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
    """KL against the size of each phenomenon of ``SHOWN`` that the model has, a line for each system; bars: 95%
    intervals over windows. Raises ``DataError`` if it has none of them."""
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
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
    return fig
