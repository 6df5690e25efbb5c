"""The figure of ``vqkv compare``."""

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.style import look

PANELS = {  # column -> the ends of its interval, and what its axis says
    "bits_with_side": ((), "bits per value,\nside information included"),
    "kl": (("kl_low", "kl_high"), "KL to the\nuncompressed cache (nats)"),
    "facts_long_lost": (("facts_long_lost_low", "facts_long_lost_high"), "facts lost in the\nlong text (points)"),
    "slower": ((), "time of a token, times\nthe uncompressed cache's"),
}


def compared(table: pd.DataFrame):
    """A row for each system, the fewest bits at the top; whiskers are 95% intervals."""
    table = table.assign(slower=table["ms"] / table["ms_exact"]).sort_values("bits_with_side", ascending=False)
    fig, axes = plt.subplots(1, len(PANELS), figsize=(10, 0.8 + 0.4 * len(table)), sharey=True)
    for ax, (column, (ends, label)) in zip(axes, PANELS.items(), strict=True):
        for row in table.to_dict("records"):
            style = look(row["system"].lower().replace("-kv", "").replace("int4", "quanto"))
            error = [[row[column] - row[ends[0]]], [row[ends[1]] - row[column]]] if ends else None
            ax.errorbar([row[column]], [row["system"]], xerr=error, linestyle="none", capsize=3, **style)
        ax.set_xlabel(label)
        if column == "kl":
            ax.set_xscale("log")
        else:
            low, high = min(0.0, ax.get_xlim()[0]), ax.get_xlim()[1]
            ax.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        if column == "facts_long_lost" and not table["facts_long_exact"].any():
            ax.set_xlabel("facts: the model itself\nanswers none")
    return fig
