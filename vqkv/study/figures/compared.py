"""The figure of ``vqkv compare``."""

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.style import PALETTE, interval, look


def compared(table: pd.DataFrame):
    """KL and facts lost of each system against its bits with side information; the figure."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True)
    lost = 100 * (table["facts_long_exact"] - table["facts_long"])
    ends = table.rename(columns={"kl": "kl_mean"})
    for ax, height, bars in ((left, table["kl"], interval(ends)), (right, lost, None)):
        for i, (system, x, y) in enumerate(zip(table["system"], table["bits_with_side"], height, strict=True)):
            style = look(system.lower().replace("-kv", "").replace("int4", "quanto"))
            error = None if bars is None else bars[:, i : i + 1]
            ax.errorbar([x], [y], error, linestyle="none", capsize=3, **style)
            ax.annotate(system, (x, y), (6, 6), textcoords="offset points", fontsize=8, color=style["color"])
        ax.set_xlabel("bits per value, side information included")
    floor = table["kl_floor"].max()
    left.axhspan(0, floor, color=PALETTE["published"], alpha=0.2, lw=0)
    left.set(yscale="log", ylabel="KL to the uncompressed cache (nats)")
    right.set(ylabel="facts lost (points)")
    return fig
