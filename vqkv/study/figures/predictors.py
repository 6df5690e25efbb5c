"""Figures of notebook 06."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, interval, look, mark_floor, model_of, whiskers

FAMILIES = {"higgs": "HIGGS", "quanto": "int2 (quanto)", "vqllm": "residual VQ"}
LABELS = {"aqua higgs 2": "AQUA-KV, HIGGS 2", "higgs 2": "HIGGS 2"}
KINDS = {"aqua higgs 2": "linear", "aqua higgs 2, GPTQ 4 bits": "GPTQ, 4 bits", "aqua higgs 2, MLP": "MLP"}


def predicted_plane(table):
    """Draw KL, with its 95% interval over sequences, against stored bits: every quantizer alone (hollow) and with
    linear predictors (filled)."""
    fig, ax = plt.subplots(figsize=(8, 4.2))
    mine = table[table["block"] == "backbone"].sort_values("bits_per_value")
    for family, name in FAMILIES.items():
        for predicted, curve in mine[mine["label"].str.contains(family)].groupby("predicted"):
            style = look(family) | ({"ls": "-", "label": name} if predicted else {"ls": ":", "mfc": "white"})
            ax.errorbar(curve["bits_per_value"], curve["kl_mean"], interval(curve), **style)
    ax.set(title=model_of(mine), xlabel="stored bits per value (side information apart)", yscale="log")
    mark_floor(ax, mine)
    ax.set_ylabel("KL (nats)")
    for face, line, label in (("white", ":", "alone"), (PALETTE["published"], "-", "with predictors")):
        ax.plot([], [], "o" + line, color=PALETTE["published"], mfc=face, ms=7, label=label)
    ax.legend()
    return fig


def context_costs(table):
    """Draw bits with the predictors' own bytes against the tokens that share them (curves), and what HIGGS needs for
    the same KL without them (level lines): where they cross, the predictors have paid for themselves."""
    fig, ax = plt.subplots(figsize=(8, 4.2))
    tokens = np.geomspace(256, 131072, 200)
    for (label, name), style in zip(KINDS.items(), ("-", "--", ":"), strict=True):
        row = table[table["label"] == label].iloc[0]
        values = 8 * row["side_bytes"] / (row["bits_128k"] - row["bits_per_value"]) / 131072
        total = row["bits_per_value"] + 8 * row["side_bytes"] / (values * tokens)
        ax.plot(tokens, total, style, color=PALETTE["aqua"], label=f"AQUA-KV, {name}")
        ax.axhline(row["plain_bits"], linestyle=style, color=PALETTE["higgs"], linewidth=1)
        if row["pays_from"] >= tokens[0]:
            ax.plot(row["pays_from"], row["plain_bits"], "o", color=PALETTE["bound"])
            note = {"xytext": (0, -22), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            about = float(f"{row['pays_from']:.2g}")
            ax.annotate(f"{about:,.0f}", (row["pays_from"], row["plain_bits"]), **note)
    ax.set(title=model_of(table), xscale="log", xlabel="tokens that share the predictors (context x batch)")
    most = table["plain_bits"].max()  # NaN if every system is worse than HIGGS of 2 bits
    ax.set(ylim=(0, 2 * most if most > 0 else None), ylabel="bits per value, side information included")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.plot([], [], color=PALETTE["higgs"], linewidth=1, label="HIGGS at the same KL")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def choice_dots(ratios, default: str, without: str):
    """KL of each choice over that of ``default`` with its paired 95% interval (``experiments.over_default``), by block;
    a line marks ``without``."""
    line = ratios.set_index("label").loc[without, "ratio"]
    rows = ratios[ratios["label"].str.startswith(f"{default}, ")]
    fig, ax = plt.subplots(figsize=(8, 4.2))
    names = [_bar_label(label, default) for label in rows["label"]]
    error = whiskers(rows["ratio"], rows["low"], rows["high"])
    ax.errorbar(rows["ratio"], range(len(rows)), xerr=error, fmt="o", ms=7, color=PALETTE["bound"], capsize=3)
    ax.axvline(1, color=PALETTE["bound"], linewidth=1)
    ax.axvline(line, color=PALETTE["higgs"], linestyle=":", label=f"{LABELS.get(without, without)} alone")
    ax.set(xscale="log", xlabel=f"KL over that of {LABELS.get(default, default)} (1: no change)")
    ax.set_yticks(range(len(rows)), names)
    plain_numbers(ax.xaxis)
    ax.invert_yaxis()
    ax.legend(loc="upper center")
    return fig


def _bar_label(label: str, default: str) -> str:
    """The difference from the default, with a unit where it is a number."""
    found = label.removeprefix(default + ", ")
    return f"{found} bits" if found[-1:].isdigit() and found.startswith("first layer") else found
