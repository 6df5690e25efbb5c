"""Figures of notebook 06."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, basename, by_model, interval, mark_floor, short

FAMILIES = {"higgs": ("higgs", "D"), "quanto": ("quanto", "o"), "vqllm": ("vqllm", "s")}
KINDS = {"aqua higgs 2": "linear", "aqua higgs 2, GPTQ 4 bits": "GPTQ, 4 bits", "aqua higgs 2, MLP": "MLP"}
KIND_STYLES = ("-", "--", ":")
VALUES_OF_EVR = {
    "evr_exact": ("fitted on exact, reads exact", "o:", "bound"),
    "evr_mismatched": ("fitted on exact, reads restored", "s--", "published"),
    "evr": ("fitted on restored, reads restored (AQUA-KV)", "D-", "aqua"),
}


def predicted_plane(table):
    """KL, with its 95% interval over sequences, against stored bits: every quantizer alone (hollow) and with linear
    predictors (filled). One panel per model."""
    fig, axes, panels = by_model(table[table["block"] == "backbone"], (8, 4.2))
    for ax, model, mine in panels:
        for family, (colour, marker) in FAMILIES.items():
            rows = mine[mine["label"].str.contains(family)]
            for predicted, curve in rows.sort_values("bits_per_value").groupby("predicted"):
                face = PALETTE[colour] if predicted else "white"
                error = interval(curve)
                label = family if predicted else "_"
                style = {"fmt": marker + ("-" if predicted else ":"), "color": PALETTE[colour], "mfc": face, "ms": 7}
                ax.errorbar(curve["bits_per_value"], curve["kl_mean"], error, label=label, **style)
        ax.set(title=basename(model), xlabel="stored bits per value (side information apart)", yscale="log")
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL (nats)")
    for face, line, label in (("white", ":", "alone"), (PALETTE["published"], "-", "with predictors")):
        axes[0, -1].plot([], [], "o" + line, color=PALETTE["published"], mfc=face, ms=7, label=label)
    axes[0, -1].legend()
    return fig


def context_costs(table):
    """Bits with the predictors' own bytes against the tokens that share them (curves), and what HIGGS needs for the
    same KL without them (level lines): where they cross, the predictors have paid for themselves."""
    fig, axes, panels = by_model(table, (8, 4.2))
    tokens = np.geomspace(256, 131072, 200)
    for ax, model, mine in panels:
        for (label, name), style in zip(KINDS.items(), KIND_STYLES, strict=True):
            row = mine[mine["label"] == label].iloc[0]
            values = 8 * row["side_bytes"] / (row["bits_128k"] - row["bits_per_value"]) / 131072
            total = row["bits_per_value"] + 8 * row["side_bytes"] / (values * tokens)
            ax.plot(tokens, total, style, color=PALETTE["aqua"], label=f"AQUA-KV, {name}")
            ax.axhline(row["plain_bits"], linestyle=style, color=PALETTE["higgs"], linewidth=1)
            if row["pays_from"] >= tokens[0]:
                ax.plot(row["pays_from"], row["plain_bits"], "o", color=PALETTE["bound"])
                note = {"xytext": (0, -22), "textcoords": "offset points", "ha": "center", "fontsize": 9}
                about = float(f"{row['pays_from']:.2g}")
                ax.annotate(f"{about:,.0f}", (row["pays_from"], row["plain_bits"]), **note)
        ax.set(title=basename(model), xscale="log", xlabel="tokens that share the predictors (context x batch)")
        ax.set_ylim(0, 2 * table["plain_bits"].max())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes[0, -1].plot([], [], color=PALETTE["higgs"], linewidth=1, label="HIGGS at the same KL")
    axes[0, 0].set_ylabel("bits per value, side information included")
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def choice_dots(ratios, default: str, without: str):
    """KL of each choice over that of ``default`` with its paired 95% interval (``experiments.over_default``), by block;
    a line marks ``without``."""
    line = ratios.set_index("label").loc[without, "ratio"]
    rows = ratios[ratios["label"].str.startswith(f"{default}, ")]
    fig, ax = plt.subplots(figsize=(8, 4.2))
    names = [_bar_label(label, default) for label in rows["label"]]
    error = [rows["ratio"] - rows["low"], rows["high"] - rows["ratio"]]
    ax.errorbar(rows["ratio"], range(len(rows)), xerr=error, fmt="o", ms=7, color=PALETTE["bound"], capsize=3)
    ax.axvline(1, color=PALETTE["bound"], linewidth=1)
    ax.axvline(line, color=PALETTE["higgs"], linestyle=":", label=f"{without} alone")
    ax.set(xscale="log", xlabel=f"KL over that of {default} (1: no change)")
    ax.set_yticks(range(len(rows)), names)
    plain_numbers(ax.xaxis)
    ax.invert_yaxis()
    ax.legend(loc="upper center")
    return fig


def _bar_label(label: str, default: str) -> str:
    """The difference from the default, with a unit where it is a number."""
    found = label.removeprefix(default + ", ")
    return f"{found} bits" if found[-1:].isdigit() and found.startswith("first layer") else found


def propagation(table, bits: int):
    """The variance of a layer that its predictor leaves, 1 - EVR, by layer: keys above, values below, a column per
    model."""
    models, roles = list(dict.fromkeys(table["model"])), ("key", "value")
    fig, axes = plt.subplots(2, len(models), figsize=(11, 5.6), sharex="col", sharey="row", squeeze=False)
    for (i, role), (j, model) in ((a, b) for a in enumerate(roles) for b in enumerate(models)):
        rows = table[(table["model"] == model) & (table["role"] == role) & (table["bits"] == bits)]
        for column, (label, style, colour) in VALUES_OF_EVR.items():
            axes[i, j].plot(rows["layer"], 1 - rows[column], style, color=PALETTE[colour], label=label)
        axes[i, j].set(yscale="log", title=f"{short(model)}, {role}s")
        plain_numbers(axes[i, j].yaxis)
        axes[i, j].xaxis.get_major_locator().set_params(integer=True)
    for ax in axes[-1]:
        ax.set_xlabel("layer")
    for ax in axes[:, 0]:
        ax.set_ylabel("variance left, 1 - EVR")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig
