"""Figures of notebook 03."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, interval, mark_floor, model_of

GROUPING_COLOURS = {
    "key (contiguous)": "contiguous",
    "key (strided)": "strided",
    "key (random)": "random",
    "value": "value",
    "key (strided) + value": "key+value",
}
PANELS = {"kl_mean": "KL (nats)", "facts_lost": "facts lost (points)", "stored_mse": "relative MSE of what is stored"}


def grouping_bars(table):
    """Draw a bar per row of Table 1, a panel per measure: KL and facts lost with 95% intervals over windows and texts,
    and the error of the role that is stored."""
    rows = table.set_index("quantised").loc[[name for name in GROUPING_COLOURS if name in set(table["quantised"])]]
    rows["stored_mse"] = rows["key_mse"].where(rows.index != "value", rows["value_mse"])
    rows.loc[rows.index.str.contains("+", regex=False), "stored_mse"] = float("nan")
    shown = {column: label for column, label in PANELS.items() if column in rows}
    fig, axes = plt.subplots(1, len(shown), figsize=(11, 2.8), sharey=True)
    colours = [PALETTE[GROUPING_COLOURS[name]] for name in rows.index]
    for ax, (column, label) in zip(axes, shown.items(), strict=True):
        error = interval(rows, column)
        ax.barh(rows.index, rows[column], 0.7, xerr=error, color=colours, error_kw={"capsize": 3})
        ax.set_xlabel(label)
    axes[0].invert_yaxis()
    return fig


def group_size_lines(table, num_quantizers: int):
    """Draw KL of shared codebooks against the channels of a group, 95% intervals over windows: a line for
    ``num_quantizers`` codebooks, with their bits, and one for the bits that they make in some other groups as well."""
    fig, ax = plt.subplots(figsize=(7, 4.1))
    rows = table[table["codebooks"] == "shared"].sort_values("group_size")
    bits = rows["bits_per_value"].mode()[0]
    usual = rows[rows["num_quantizers"] == num_quantizers]
    for colour, mine, label in (
        ("contiguous", usual, f"{num_quantizers} codebooks (numbers: bits per value)"),
        ("bound", rows[rows["bits_per_value"] == bits], f"{bits:g} bits per value (codebooks in proportion)"),
    ):
        look = {"fmt": "o-", "color": PALETTE[colour], "label": label, "capsize": 3}
        ax.errorbar(mine["group_size"], mine["kl_mean"], interval(mine), **look)
    for (size, rate), kl in usual.groupby(["group_size", "bits_per_value"])["kl_mean"].max().items():
        ax.annotate(f"{rate:g}", (size, kl), (8, -11), textcoords="offset points", fontsize=9)
    ax.set(title=model_of(rows), xlabel="channels of a group", ylabel="KL (nats)", xscale="log", yscale="log")
    ax.set_xticks(sorted(set(rows["group_size"])), sorted(set(rows["group_size"])))
    ax.xaxis.minorticks_off()
    plain_numbers(ax.yaxis)
    ax.margins(y=0.12)
    mark_floor(ax, rows)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
