"""The figure of notebook 12."""

import matplotlib.pyplot as plt

VERDICTS = {  # colour and marker
    "yes": ("#3f90da", "o"),
    "partly": ("#ffa90e", "D"),
    "no": ("#bd1f01", "X"),
}
COLUMNS = (("residual VQ", "AQUA-KV"), ("transformers blog", "VQ framework"))  # panels, top to bottom


def claim_dots(table):
    """Recomputed over published, a row per claim and a panel per source; colour and marker say whether it holds, hollow
    ones are measured. Claims without a number are left out. ``table``: from ``claims_audit``."""
    table = table[table["recomputed"].notna()].assign(ratio=table["recomputed"] / table["published"])
    present = [[name for name in column if (table["source"] == name).any()] for column in COLUMNS]
    counts = [[int((table["source"] == name).sum()) for name in column] for column in present]
    fig = plt.figure(figsize=(14, 1.6 + 0.2 * max(map(sum, counts))))
    drawable = table.loc[table["ratio"] > 0, "ratio"]
    limits = 0.5 * drawable.min(), 2 * drawable.max()
    table = table.assign(ratio=table["ratio"].clip(lower=limits[0]))  # zero: at the edge
    outer = fig.add_gridspec(1, len(present))
    for place, (names, sizes) in enumerate(zip(present, counts, strict=True)):
        spare = max(map(sum, counts)) - sum(sizes)  # rows of the other column: all rows are equally high
        grid = outer[place].subgridspec(len(names) + 1, 1, height_ratios=[*(size + 1.5 for size in sizes), spare + 0.1])
        for i, name in enumerate(names):
            _panel(fig.add_subplot(grid[i]), table[table["source"] == name], name, limits, last=i == len(names) - 1)
    _legend(fig)
    return fig


def _panel(ax, rows, name: str, limits: tuple[float, float], last: bool) -> None:
    ax.axvline(1, color="#222222", linewidth=1)
    for y, row in enumerate(rows.itertuples()):
        colour, marker = VERDICTS[row.holds]
        ax.plot([1, row.ratio], [y, y], color=colour, linewidth=1)
        face = "white" if row.how.startswith("measured") else colour
        ax.plot(row.ratio, y, marker, color=colour, markerfacecolor=face, markersize=6)
    ax.set_yticks(range(len(rows)), list(rows["claim"]), fontsize=8.5)
    ax.set(xscale="log", xlim=limits, ylim=(len(rows) - 0.5, -0.7))
    counts = ", ".join(f"{(rows['holds'] == verdict).sum()} {verdict}" for verdict in VERDICTS)
    ax.set_title(f"{name}: {counts}", loc="left", fontsize=11)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.tick_params(axis="x", labelbottom=last)
    ax.grid(axis="y", visible=False)
    if last:
        ax.set_xlabel("recomputed / published")


def _legend(fig) -> None:
    """Verdicts, and what hollow means."""
    style = {"linestyle": "", "markersize": 7}
    handles = [
        plt.Line2D([], [], marker=marker, color=colour, label=f"holds: {verdict}", **style)
        for verdict, (colour, marker) in VERDICTS.items()
    ]
    hollow = {"color": "#222222", "markerfacecolor": "white", "label": "hollow: measured here"}
    fig.legend(
        handles=[*handles, plt.Line2D([], [], marker="o", **hollow, **style)], loc="outside upper center", ncols=4
    )
