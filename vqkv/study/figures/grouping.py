"""Figures of notebook 03."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, basename, by_model, mark_floor

GROUPING_COLOURS = {
    "key (contiguous)": "contiguous",
    "key (strided)": "strided",
    "key (random)": "random",
    "value": "value",
    "key (strided) + value": "key+value",
}


def grouping_bars(table, metrics: dict[str, str]):
    """One panel per metric (column -> axis label), one bar per row of Table 1 and model: mean and range over seeds."""
    models = list(dict.fromkeys(table["model"]))
    fig, axes = plt.subplots(
        len(models), len(metrics), figsize=(9.5, 1.4 + 1.9 * len(models)), squeeze=False, sharey="row"
    )
    for model, line in zip(models, axes, strict=True):
        mine = table[table["model"] == model]
        for ax, (column, label) in zip(line, metrics.items(), strict=True):
            _bars(ax, {row: mine.loc[mine["quantised"] == row, column] for row in GROUPING_COLOURS})
            if ax in axes[-1]:
                ax.set_xlabel(label)
        line[0].invert_yaxis()
        line[0].set_title(f"{basename(model)} (KL of an fp16 cache: {mine['kl_floor'].max():.0e})", loc="left")
    return fig


def grouping_errors(table):
    """Relative MSE of what each row of Table 1 stores, keys or values: mean and range over seeds, a panel per model."""
    fig, axes, panels = by_model(table, (9.5, 2.6))
    for ax, model, mine in panels:
        stored = {row: "value_mse" if row == "value" else "key_mse" for row in GROUPING_COLOURS if "+" not in row}
        _bars(ax, {row: mine.loc[mine["quantised"] == row, column] for row, column in stored.items()})
        ax.set(title=basename(model), xlabel="relative MSE of what is stored")
    axes[0, 0].invert_yaxis()
    return fig


def _bars(ax, rows: dict) -> None:
    """A bar for each row's values."""
    for y, (row, values) in enumerate(rows.items()):
        mean = values.mean()
        # equal values have a mean that rounding may put outside their range
        spread = [[max(0.0, mean - values.min())], [max(0.0, values.max() - mean)]]
        ax.barh(y, mean, 0.7, xerr=spread, color=PALETTE[GROUPING_COLOURS[row]], error_kw={"capsize": 3})
    ax.set_yticks(range(len(rows)), list(rows))
    ax.locator_params(axis="x", nbins=4)


def group_size_lines(table, num_quantizers: int):
    """KL of shared codebooks against the channels of a group, mean and range over seeds, a panel per model: a line for
    ``num_quantizers`` codebooks, with their bits, and one for the bits that they make in some other groups as well."""
    fig, axes, panels = by_model(table[table["codebooks"] == "shared"], (9.5, 4.1))
    for ax, model, mine in panels:
        bits = mine["bits_per_value"].mode()[0]
        usual = mine[mine["num_quantizers"] == num_quantizers]
        _line(ax, usual, "contiguous", f"{num_quantizers} codebooks (numbers: bits per value)")
        _line(ax, mine[mine["bits_per_value"] == bits], "bound", f"{bits:g} bits per value (codebooks in proportion)")
        for (size, rate), kl in usual.groupby(["group_size", "bits_per_value"])["kl_mean"].max().items():
            ax.annotate(f"{rate:g}", (size, kl), (0, 7), textcoords="offset points", ha="center", fontsize=9)
        ax.set(title=basename(model), xlabel="channels of a group", xscale="log", yscale="log")
        ax.set_xticks(sorted(set(mine["group_size"])), sorted(set(mine["group_size"])))
        ax.minorticks_off()
        ax.margins(y=0.12)
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL (nats)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def _line(ax, rows, colour: str, label: str) -> None:
    kl = rows.groupby("group_size")["kl_mean"].agg(["mean", "min", "max"])
    error = [kl["mean"] - kl["min"], kl["max"] - kl["mean"]]
    ax.errorbar(kl.index, kl["mean"], error, fmt="o-", color=PALETTE[colour], label=label, capsize=3)
