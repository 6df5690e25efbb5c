"""Figure of page 07: KL by how strong a phenomenon is."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, interval, mark_floor

LOOKS = {  # palette key, marker and line
    "vqllm contiguous": ("contiguous", "s", "-"),
    "vqllm strided": ("strided", "o", "-"),
    "transformers int4": ("quanto", "v", ":"),
    "quanto 4": ("quanto", "v", "-"),
    "turboquant 4": ("turboquant", "P", "-"),
    "higgs 2": ("higgs", "D", "-"),
    "higgs 4, mean kept": ("higgs", "D", ":"),
    "higgs 4": ("higgs", "D", "-"),
    "kivi 2": ("kivi", "^", "-"),
    "Fisher-weighted PCA 2": ("crossed", "*", "-"),
    "live 2.25": ("live", "d", "-"),
}
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
    """KL against the size of each phenomenon of ``SHOWN``, a line for each system; bars: 95% intervals over windows."""
    fig, axes = plt.subplots(1, len(SHOWN), figsize=(11, 5), sharey=True)
    for ax, (phenomenon, (label, systems)) in zip(axes, SHOWN.items(), strict=True):
        mine = table[table["phenomenon"] == phenomenon]
        for system in systems:
            colour, marker, line = LOOKS[system]
            rows = mine[mine["system"] == system].sort_values("size")
            look = {"color": PALETTE[colour], "marker": marker, "ls": line, "ms": 10 if marker == "*" else 6}
            ax.errorbar(rows["size"], rows["kl_mean"], interval(rows), label=system, capsize=2, **look)
        sizes = sorted(set(mine["size"]))
        ax.set_xscale("symlog", linthresh=min(size for size in sizes if size))  # logarithmic, with 0
        ax.set(yscale="log", xlabel=label)
        ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
        ax.minorticks_off()
        ax.legend(loc="upper left", fontsize=9, ncols=2)
        ax.set_ylim(top=8 * table["kl_mean"].max())  # room for the legend
        mark_floor(ax, mine)
    axes[0].set_ylabel("KL to the exact cache (nats)")
    return fig
