"""The figure of page 12."""

import matplotlib.pyplot as plt

COLOURS = {  # verdict: from blue to red, then what says nothing about the source
    "holds": "#3f90da",
    "holds in part": "#ffa90e",
    "does not hold": "#bd1f01",
    "needs their model": "#c9c9c9",
}
KINDS = {"arithmetic": "arithmetic", "measured here": "measured here", "needs their model": "not tested"}


def verdict_bars(table):
    """Draw claims of each source by verdict: a panel for each kind of test, a bar for each source."""
    sources = list(dict.fromkeys(table["source"]))
    fig, axes = plt.subplots(1, len(KINDS), figsize=(11, 0.9 + 0.5 * len(sources)), sharex=True, sharey=True)
    for ax, (how, title) in zip(axes, KINDS.items(), strict=True):
        mine = table[table["how"] == how] if how != "needs their model" else table[table["verdict"] == how]
        counts = mine.groupby(["source", "verdict"]).size().unstack(fill_value=0)
        counts = counts.reindex(index=sources, columns=list(COLOURS), fill_value=0)
        left = 0 * counts.iloc[:, 0]
        for verdict, colour in COLOURS.items():
            if how != "needs their model" and verdict == "needs their model":
                continue
            bars = ax.barh(counts.index, counts[verdict], left=left, color=colour, edgecolor="white", label=verdict)
            ink = "black" if verdict in ("holds in part", "needs their model") else "white"
            ax.bar_label(bars, [n or "" for n in counts[verdict]], label_type="center", color=ink)
            left = left + counts[verdict]
        ax.grid(axis="y", visible=False)
        ax.set(title=title, xlabel="claims")
    axes[0].invert_yaxis()
    fig.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig
