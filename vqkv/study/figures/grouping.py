"""Figures of notebook 03."""

import matplotlib.pyplot as plt

from vqkv.study.figures.style import PALETTE, mark_floor

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
            for y, (row, colour) in enumerate(GROUPING_COLOURS.items()):
                values = mine.loc[mine["quantised"] == row, column]
                mean = values.mean()
                # equal values have a mean that rounding may put outside their range
                spread = [[max(0.0, mean - values.min())], [max(0.0, values.max() - mean)]]
                ax.barh(y, mean, 0.7, xerr=spread, color=PALETTE[colour], error_kw={"capsize": 3})
            ax.set_yticks(range(len(GROUPING_COLOURS)), list(GROUPING_COLOURS))
            ax.locator_params(axis="x", nbins=4)
            if column == "kl_mean":
                mark_floor(ax, mine, across=False)
            if ax in axes[-1]:
                ax.set_xlabel(label)
        line[0].invert_yaxis()
        line[0].set_title(model, loc="left")
    return fig
