"""Figures of notebook 11."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from vqkv.study.figures.style import PALETTE, by_model, mark_floor

PUBLISHED = {
    "quanto": ("quanto", "o"),
    "kivi": ("kivi", "^"),
    "kvquant": ("kvquant", "v"),
    "vqq product": ("pq", "p"),
    "higgs": ("higgs", "D"),
    "vqllm": ("vqllm", "s"),
    "aqua": ("aqua", "h"),
}
OURS = (("crossed", "*", "-"), ("crossed 2", "P", "-"), ("crossed 3", "X", "-"))
STEP_LOSS = np.log2(np.pi * np.e / 6) / 2  # bits a value that uniform steps lose against Shannon's bound at high rates
BOUND = "the best with perfect quantizers (0.25 bit less)"
ROTATION_COLOURS = {"none": "kivi", "hadamard": "higgs", "principal": "vqllm", "weighted": "kvquant"}
PROXIES = {
    "kl_mean": "KL",
    "ppl_increase": "perplexity",
    "attention_mse": "error of attention output",
    "value_mse": "relative MSE of V",
    "key_mse": "relative MSE of K",
    "unexplained": "1 - EVR",
    "top1": "top-1 agreement",
}
TASKS = {"cloze": "next-token cloze on held-out text", "recall": "key-value recall"}


def frontier(table, designs, names=()):
    """KL against stored bits, every system in one panel per model. Points: mean over seeds; bars: least to largest.
    ``names``: short ones of the designs, for the legend. Dotted: what would be left if the best design's uniform steps
    were perfect quantizers (0.25 bit a value)."""
    labels = [f"{name}: {design}" if name else design for name, design in itertools.zip_longest(names, designs)]
    fig, axes, panels = by_model(table, (11, 5))
    for ax, model, mine in panels:
        evicted = mine["system"].str.contains("h2o")
        for name, (colour, marker) in PUBLISHED.items():
            rows = _over_seeds(mine[mine["system"].str.startswith(name) & ~evicted])
            line = "-" if name in ("higgs", "vqllm", "quanto") else ""
            _points(ax, rows, name, PALETTE[colour], marker + line)
            if name == "aqua":
                _named(ax, rows)
        rows = _over_seeds(mine[evicted])
        _points(ax, rows, "vqllm, half of the tokens evicted", PALETTE["vqllm"], "s", mfc="white")
        for design, name, (colour, marker, line) in zip(designs, labels, OURS):
            rows = _over_seeds(mine[mine["system"] == design])
            _points(ax, rows, name, PALETTE[colour], marker + line, ms=9)
        best = mine[mine["system"].isin(designs)].groupby("system")["kl_mean"].mean().nsmallest(1)
        rows = _over_seeds(mine[mine["system"].isin(best.index)])  # none where the model takes none of the designs
        ax.plot(rows["bits_per_value"] - STEP_LOSS, rows["kl_mean"], ":", color=PALETTE["bound"], label=BOUND)
        ax.set(title=model, xlabel="stored bits per value", yscale="log", xlim=(0, 5))
        mark_floor(ax, mine)
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return fig


def _over_seeds(rows):
    """Means by system and nominal bits, and how far the least and the largest KL are from them; fewest bits first."""
    groups = rows.groupby(["system", "nominal_bits"], sort=False)
    found = groups[["bits_per_value", "kl_mean"]].mean()
    found["below"] = found["kl_mean"] - groups["kl_mean"].min()
    found["above"] = groups["kl_mean"].max() - found["kl_mean"]
    return found.sort_values("bits_per_value")


def _points(ax, rows, label: str, colour: str, style: str, **more) -> None:
    error = rows[["below", "above"]].clip(0).to_numpy().T
    ax.errorbar(rows["bits_per_value"], rows["kl_mean"], error, fmt=style, color=colour, label=label, capsize=2, **more)


def _named(ax, rows) -> None:
    """Write the rest of each system's name, after its first word, beside its point."""
    for (system, _), row in rows.iterrows():
        label, place = system.split(" ", 1)[1], (row["bits_per_value"], row["kl_mean"])
        ax.annotate(label, place, xytext=(4, -9), textcoords="offset points", fontsize=6.5)


def contexts(table, designs, contexts: dict[str, str]):
    """KL against bits with side information: the lower envelope of all published systems and that of the ``designs``, a
    column for each context (column of bits -> title), a row for each model. Bands: least to largest over seeds."""
    models = list(dict.fromkeys(table["model"]))
    fig, axes = plt.subplots(len(models), len(contexts), figsize=(11, 5.6), sharex=True, sharey="row", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        mine = table[(table["model"] == model) & ~table["system"].str.contains("h2o")]
        ours = mine["system"].isin(designs)
        for ax, (bits, title) in zip(row, contexts.items(), strict=True):
            for rows, label, colour in (
                (mine[~ours], "published systems", "published"),
                (mine[ours], "crosses", "crossed"),
            ):
                _envelope(ax, rows, bits, label, PALETTE[colour])
            ax.set(yscale="log", xlim=(0, 6), title=f"{model.split('/')[-1]}, {title}")
            mark_floor(ax, mine)
        row[0].set_ylabel("lowest KL (nats)")
    for ax in axes[-1]:
        ax.set_xlabel("bits per value, all told")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return fig


def _envelope(ax, rows, bits: str, label: str, colour: str) -> None:
    """The lowest KL that so many bits buy: mean over seeds, and a band from the least to the largest."""
    grid = np.linspace(0.25, 6, 116)
    each = [
        [seed.loc[seed[bits] <= most, "kl_mean"].min() for most in grid] for _, seed in rows.groupby("seed", sort=False)
    ]
    each = np.array(each, float)
    known = ~np.isnan(each).any(0)
    ax.step(grid[known], each[:, known].mean(0), where="post", color=colour, label=label)
    ax.fill_between(
        grid[known], each[:, known].min(0), each[:, known].max(0), step="post", color=colour, alpha=0.25, lw=0
    )


def search_dots(search, context: str = "32k"):
    """The first rung: equivalent bits of every design at a context (further left is better), a line per quantizer and
    whether it has predictors; colour: rotation; filled: bits split among layers; square: each head rotated by itself;
    ringed: went on to the next rung."""
    rows = search[search["rung"] == 1]
    quantizers = list(dict.fromkeys(rows["design"].str.split(",").str[0]))
    fig, ax = plt.subplots(figsize=(9, 4.2))
    lines = [(name, predicted) for name in quantizers for predicted in (False, True)]
    for place, (name, predicted) in enumerate(lines):
        parts = rows["design"].str.split(", ")
        mine = rows[(parts.str[0] == name) & (rows["design"].str.contains("predicted") == predicted)]
        for row in mine.itertuples():
            rotation = next((r for r in ROTATION_COLOURS if r in row.design), "none")
            colour = PALETTE[ROTATION_COLOURS[rotation]]
            face = colour if "mixed" in row.design else "white"
            x = getattr(row, f"equivalent_bits_{context}")
            ax.plot(x, place, "s" if "by head" in row.design else "o", color=colour, mfc=face, ms=7)
            if row.kept:
                ax.plot(x, place, "o", color=PALETTE["bound"], mfc="none", ms=12)
    ax.yaxis.set_major_locator(FixedLocator(range(len(lines))))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticklabels([name + (", predicted" if predicted else "") for name, predicted in lines])
    ax.invert_yaxis()
    ax.set_xlabel(f"equivalent bits per value at {context} tokens: stored bits + log2(KL) / 2 (left is better)")
    looks = [{"color": PALETTE[colour], "label": name} for name, colour in ROTATION_COLOURS.items()]
    looks.append({"color": PALETTE["published"], "label": "filled: bits split among layers"})
    looks.append({"color": PALETTE["published"], "label": "square: by head", "marker": "s"})
    looks.append({"color": PALETTE["bound"], "label": "ringed: kept", "mfc": "none", "ms": 11})
    handles = [Line2D([], [], ls="", **{"marker": "o"} | look) for look in looks]
    fig.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8)
    return fig


def proxy_bars(correlations):
    """Spearman's correlation of each proxy with each task over all systems: how well it ranks them. A panel per task, a
    bar per model; 1 is a proxy that ranks systems as the task does. Grey: where 95 of 100 worthless proxies lie."""
    tasks = list(dict.fromkeys(correlations["task"]))
    fig, axes = plt.subplots(1, len(tasks), figsize=(11, 3.8), sharey=True, squeeze=False)
    for ax, task in zip(axes[0], tasks, strict=True):
        wide = correlations[correlations["task"] == task].pivot(index="proxy", columns="model", values="correlation")
        wide = wide.loc[[proxy for proxy in PROXIES if proxy in wide.index]]
        places = np.arange(len(wide))
        for i, model in enumerate(wide):
            colour = PALETTE["llama-mini" if "llama" in model else "gpt2-mini"]
            ax.barh(places + 0.38 * (i - (len(wide.columns) - 1) / 2), wide[model], 0.36, color=colour, label=model)
        chance = 1.96 / np.sqrt(correlations["systems"].max() - 1)
        ax.axvspan(-chance, chance, color=PALETTE["bound"], alpha=0.12, lw=0)
        ax.axvline(0, color=PALETTE["bound"], linewidth=0.8)
        title = TASKS[task] + ("" if wide.notna().any(axis=None) else ": no system changes it")
        ax.set(title=title, xlabel="rank correlation with what the score loses", xlim=(-1, 1))
        ax.set_yticks(places, [PROXIES[proxy] for proxy in wide.index])
    axes[0, 0].invert_yaxis()
    axes[0, -1].legend(fontsize=9)
    return fig
