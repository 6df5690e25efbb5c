"""Figures of pages 04 and 06: what predicts keys and values, and what predictors save."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from vqkv.study.figures.style import PALETTE, colour_of, interval, look, mark_floor, model_of, plain_numbers, whiskers

ROLES = {"K": "keys", "V": "values"}
OPEN_QUESTIONS = {("V", "V-1+K"), ("V", "K-1+V-1")}  # what the AQUA-KV deck asks for and does not answer
CLOSE_TO_ONE = 0.9995


def evr_bars(table, quantizers):
    """Draw mean EVR by source, trained (bar) and with random weights (diamond), and its worth in bits.

    Stars mark the source's open questions. ``quantizers`` (bits, explained_variance) are lines.
    """
    (model,) = set(table["model"])
    fig, axes = plt.subplots(1, len(ROLES), figsize=(11.5, 5.2))
    for ax, target in zip(axes, ROLES, strict=True):
        rows = table[table["target"] == target]
        groups = rows.groupby("sources")["group"].first().reindex(_chosen(target)).dropna()
        positions = _places(groups)
        _bars(ax, rows, positions, colour_of(model))
        for group in dict.fromkeys(groups):
            top = min(position for position, name in zip(positions.values(), groups, strict=True) if name == group)
            ax.text(0, top - 0.45, group, fontsize=10, style="italic", va="bottom", clip_on=False)
        for bits, evr in zip(quantizers["bits"], quantizers["explained_variance"], strict=True):
            ax.axvline(evr, color=PALETTE["bound"], linestyle=":", linewidth=1.2)
            ax.annotate(f"{bits}-bit", (evr, 1), (0, 3), ("data", "axes fraction"), "offset points", ha="center")
        ax.annotate("worth", (1, 1), (12, 3), "axes fraction", "offset points")
        ax.set_yticks(list(positions.values()), [_label(sources, target) for sources in positions], fontsize=11)
        lowest = max(positions.values()) + 0.5
        ax.set(xlim=(0, 1), ylim=(lowest, -1), xlabel="explained variance ratio (mean over layers)")
        ax.set_title(f"{ROLES[target]} predicted from", loc="left")
        ax.grid(axis="y", visible=False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour_of(model), label=f"{model_of(table)}, trained")]
    handles += axes[0].plot([], [], "D", color="w", mec="k", label="same shape, random weights (range over seeds)")
    handles += axes[0].plot([], [], ":", color=PALETTE["bound"], label="a quantizer, as published")
    handles += axes[0].plot([], [], "*", color="k", ms=9, label="open question of the source")
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _places(groups) -> dict[str, float]:
    """Place sources on the axis, with room for a heading above every group."""
    headings = {group: i + 1 for i, group in enumerate(dict.fromkeys(groups))}
    return {sources: i + 0.7 * (headings[group] - 1) for i, (sources, group) in enumerate(groups.items())}


def _bars(ax, rows, positions: dict[str, float], colour: str) -> None:
    trained = rows[rows["variant"] == "trained"].groupby("sources")[["evr", "bits"]].mean()
    random = rows[rows["variant"] == "untrained"].groupby(["sources", "seed"])["evr"].mean()
    random = random.groupby("sources").agg(["min", "mean", "max"])
    for sources, position in positions.items():
        evr, bits = trained.loc[sources]
        ax.barh(position, evr, 0.36, color=colour)
        worth = "exact" if evr > CLOSE_TO_ONE else f"{bits:.1f} bits"
        ax.text(1.03, position, worth, color=colour, fontsize=9, va="center", clip_on=False)
        if sources in random.index:
            low, mean, high = random.loc[sources]
            ax.plot([low, high], [position] * 2, color="k", linewidth=1.2)
            ax.plot(mean, position, "D", color="w", mec="k", ms=5.5, clip_on=False)


def evr_by_layer(table, sources: dict[str, list[str]]):
    """Draw explained variance in a trained model by layer: a panel per target, a line for each of its ``sources``."""
    rows = table[table["variant"] == "trained"]
    fig, axes = plt.subplots(1, len(sources), figsize=(11, 3.6), sharey=True)
    for ax, (target, wanted) in zip(axes, sources.items(), strict=True):
        for name, colour in zip(wanted, ("key", "value", "key+value")):
            mine = rows[(rows["target"] == target) & (rows["sources"] == name)]
            ax.plot(mine["layer"], mine["evr"], "o-", color=PALETTE[colour], label=_label(name, target))
        ax.set(title=f"{ROLES[target]} predicted from", xlabel="layer", ylim=(0, 1))
        ax.legend(loc="lower right", ncols=len(wanted))
    axes[0].set_ylabel("explained variance ratio")
    return fig


QUANTISED = {"V-1+K": ("key+value", "D"), "K": ("key", "o"), "K-1+V-1": ("value", "s")}
BIT_TICKS = (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3)


def quantised_inputs(table):
    """Draw the mean EVR of values by the precision of their sources; right axis: its worth in bits."""
    inputs = list(dict.fromkeys(table["inputs"]))
    fig, ax = plt.subplots(figsize=(10.5, 4))
    for sources, (colour, marker) in QUANTISED.items():
        rows = table[(table["target"] == "V") & (table["sources"] == sources)]
        means = rows.groupby("inputs", sort=False)["evr"].mean().loc[inputs]
        ax.plot(range(len(inputs)), means, f"{marker}-", color=PALETTE[colour], label=_label(sources, "V"), ms=7)
    ax.set_xticks(range(len(inputs)), inputs)
    ax.set(title=model_of(table), xlabel="precision of the sources (keys and values through HIGGS)")
    ax.set_ylabel("explained variance ratio of values")
    ax.legend(title="predicted from")
    right = ax.secondary_yaxis("right")
    right.set_yticks([1 - 4.0**-bits for bits in BIT_TICKS], [f"{bits:g}" for bits in BIT_TICKS])
    right.set_ylabel("1/2 log2 1/(1 - EVR), bits a value")
    return fig


def _chosen(target: str) -> list[str]:
    """Return the sources that the figures show, in order."""
    other = "V" if target == "K" else "K"
    return [
        f"{target}-1", f"{other}-1", "K-1+V-1", "K-1+V-1+K-2+V-2+K-3+V-3", f"{target}@T-1", "K@T-1+V@T-1",
        f"{target}@T-1+{target}@T-2+{target}@T-3", other, f"{target}-1+{other}", f"K-1+V-1+{other}",
        f"{target}-1+{target}@T-1",
    ]  # fmt: skip


def _label(sources: str, target: str) -> str:
    """Write ``V-1+K`` as a reader would."""
    star = "  ★" if (target, sources) in OPEN_QUESTIONS else ""
    names = sources.split("+")
    if len(names) > 4:
        return rf"$[K;V]_{{L-1}}\ldots[K;V]_{{L-{names[-1][2:]}}}$"
    parts = [name.partition("@") for name in names]
    symbols = "; ".join(f"{role[0]}_{{{lag or 'L' + role[1:]}}}" for role, _, lag in parts)
    return f"${symbols}${star}"


FAMILIES = {"higgs": "HIGGS", "quanto": "int2 (quanto)", "vqllm": "residual VQ"}
LABELS = {"aqua higgs 2": "AQUA-KV, HIGGS 2", "higgs 2": "HIGGS 2"}
KINDS = {"aqua higgs 2": "linear", "aqua higgs 2, GPTQ 4 bits": "GPTQ, 4 bits", "aqua higgs 2, MLP": "MLP"}


def predicted_plane(table):
    """Draw KL against marginal bits: every quantizer alone (hollow) and with linear predictors (filled)."""
    fig, ax = plt.subplots(figsize=(8, 4.2))
    mine = table[table["block"] == "backbone"].sort_values("bits_per_value")
    for family, name in FAMILIES.items():
        for predicted, curve in mine[mine["label"].str.contains(family)].groupby("predicted"):
            style = look(family) | ({"ls": "-", "label": name} if predicted else {"ls": ":", "mfc": "white"})
            ax.errorbar(curve["bits_per_value"], curve["kl_mean"], interval(curve), **style)
    ax.set(title=model_of(mine), xlabel="marginal bits a value", yscale="log")
    mark_floor(ax, mine)
    ax.set_ylabel("KL (nats)")
    for face, line, label in (("white", ":", "alone"), (PALETTE["published"], "-", "with predictors")):
        ax.plot([], [], "o" + line, color=PALETTE["published"], mfc=face, ms=7, label=label)
    ax.legend()
    return fig


def context_costs(table):
    """Draw bits with predictors' bytes against the tokens that share them, and HIGGS' bits at equal KL (level)."""
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
            about, point = float(f"{row['pays_from']:.2g}"), (row["pays_from"], row["plain_bits"])
            ax.annotate(f"{about:,.0f}", point, (0, -22), textcoords="offset points", ha="center", fontsize=9)
    ax.set(title=model_of(table), xscale="log", xlabel="tokens that share the predictors (context x batch)")
    most = table["plain_bits"].max()  # NaN if every system is worse than HIGGS of 2 bits
    ax.set(ylim=(0, 2 * most if most > 0 else None), ylabel="bits per value, side information included")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.plot([], [], color=PALETTE["higgs"], linewidth=1, label="HIGGS at the same KL")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def choice_dots(ratios, default: str, without: str):
    """Draw KL of each choice over that of ``default``, with its paired 95% interval; a line marks ``without``."""
    line = ratios.set_index("label").loc[without, "ratio"]
    rows = ratios[ratios["label"].str.startswith(f"{default}, ")]
    fig, ax = plt.subplots(figsize=(8, 4.2))
    names = rows["label"].str.removeprefix(f"{default}, ").str.replace(r"(first layer \d)$", r"\1 bits", regex=True)
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
