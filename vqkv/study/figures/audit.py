"""The figure of notebook 12."""

import matplotlib.pyplot as plt

COLOURS = {  # verdict: from blue to red, then what says nothing about the source
    "holds": "#3f90da",
    "holds in part": "#ffa90e",
    "does not hold": "#bd1f01",
    "not testable here": "#c9c9c9",
}


def verdict_bars(table):
    """Claims of each source by verdict, a bar a source; our own re-baselinings are not among them. ``table``: from
    ``claims_audit``."""
    counts = table.groupby(["source", "verdict"], sort=False).size().unstack(fill_value=0)
    counts = counts.reindex(columns=list(COLOURS), fill_value=0)
    fig, ax = plt.subplots(figsize=(8, 0.8 + 0.5 * len(counts)))
    left = 0 * counts.iloc[:, 0]
    for verdict, colour in COLOURS.items():
        bars = ax.barh(counts.index, counts[verdict], left=left, color=colour, edgecolor="white", label=verdict)
        ink = "black" if verdict in ("holds in part", "not testable here") else "white"
        ax.bar_label(bars, [n or "" for n in counts[verdict]], label_type="center", color=ink)
        left = left + counts[verdict]
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("claims")
    fig.legend(loc="outside upper center", ncols=4, frameon=False)
    return fig
