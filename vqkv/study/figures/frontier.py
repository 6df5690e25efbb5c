"""Figures of notebook 11."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from vqkv.study.figures.style import PALETTE, mark_floor, short

LINES = {  # beginning of a system's name -> colour, marker and line; all others are grey points
    "kvtc": ("kvtc", "p-"),
    "cachegen": ("cachegen", "<-"),
    "higgs": ("higgs", "D-"),
    "aqua higgs": ("aqua", "h-"),
    "vqllm": ("vqllm", "s-"),
}
APART = (", window", ", rANS", ", as published", "rank")  # variants that are grey points, too
OURS = (("crossed", "*-"), ("crossed 2", "P-"))
LOSSES = {"recall": "recall lost (points)", "copied": "copying lost (points)"}
TELLING = (2, 10)  # points whose first loss the table names
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
TASKS = {"cloze": "next token", "recall": "recall", "copied": "copying"}


def frontier(table, designs, contexts: dict[str, str], names):
    """KL against bits, a row of panels for each model, a column for each of ``contexts`` (column of bits -> title).
    Points: means over seeds, bars: least to largest; ``names``: of ``designs``, for the legend. Grey: all other
    systems."""
    fig, axes = _grid(table, list(contexts), (12.5, 4.1), sharey="row")
    for row, model in zip(axes, dict.fromkeys(table["model"]), strict=True):
        mine = table[table["model"] == model]
        for ax, (bits, title) in zip(row, contexts.items(), strict=True):
            _systems(ax, mine, designs, names, bits, mine["kl_mean"])
            ax.set(yscale="log", title=f"{short(model)}: {title}")
            mark_floor(ax, mine)
        row[0].set_ylabel("KL to the exact cache (nats)")
    return _finished(fig, axes)


def lost(table, designs, contexts: dict[str, str], names):
    """As ``frontier``, but points of ``LOSSES``, a column for each context and task; lines: 2 and 10 points."""
    columns = [(task, bits) for task in LOSSES for bits in contexts]
    fig, axes = _grid(table, columns, (15, 3.8), sharey=True)
    for row, model in zip(axes, dict.fromkeys(table["model"]), strict=True):
        mine = table[table["model"] == model]
        for ax, (task, bits) in zip(row, columns, strict=True):
            _systems(ax, mine, designs, names, bits, 100 * (mine[f"{task}_exact"] - mine[task]))
            ax.set_yscale("symlog", linthresh=1)
            ax.set(ylim=(-1, 100), title=f"{short(model)}: {contexts[bits]}", ylabel=LOSSES[task])
            ax.set_yticks([-1, 0, 1, 2, 5, 10, 20, 50], ["-1", "0", "1", "2", "5", "10", "20", "50"])
            for points in TELLING:
                ax.axhline(points, color=PALETTE["bound"], lw=0.8, ls=":")
    return _finished(fig, axes)


def _grid(table, columns: list, size: tuple[float, float], sharey):
    models = list(dict.fromkeys(table["model"]))
    size = size[0], size[1] * len(models) + 0.5
    return plt.subplots(len(models), len(columns), figsize=size, sharex=True, sharey=sharey, squeeze=False)


def _finished(fig, axes):
    for ax in axes[-1]:
        ax.set_xlabel("bits per value")
    for ax in axes.flat:
        ax.set_xlim(0, 6)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=10)
    return fig


def _systems(ax, rows, designs, names, bits: str, y) -> None:
    """Every system of one model, ``y`` (a series like its rows) against a column of bits."""
    known = pd.DataFrame({"system": rows["system"], "nominal": rows["nominal_bits"], "x": rows[bits], "y": y})
    groups = known.groupby(["system", "nominal"], sort=False)
    mean = groups[["x", "y"]].mean().assign(low=groups["y"].min(), high=groups["y"].max()).reset_index()
    variants = mean["system"].map(lambda name: any(part in name for part in APART))
    drawn = {name: mean["system"].str.startswith(name) & ~variants for name in LINES}
    drawn["higgs"] &= ~mean["system"].str.startswith("aqua")
    named = dict(zip(names, (mean["system"] == design for design in designs)))
    other = ~variants & ~mean["system"].isin(designs)
    for mask in drawn.values():
        other &= ~mask
    ax.plot(mean["x"][other | variants], mean["y"][other | variants], "o", color=PALETTE["other"], ms=4, label="others")
    for (name, mask), (colour, style) in zip(drawn.items(), LINES.values(), strict=True):
        _points(ax, mean[mask], name, PALETTE[colour], style)
    for (name, mask), (colour, style) in zip(named.items(), OURS):
        _points(ax, mean[mask], f"ours, {name}", PALETTE[colour], style, ms=9)


def _points(ax, mean, label: str, colour: str, style: str, **more) -> None:
    mean = mean.sort_values("x")
    error = [(mean["y"] - mean["low"]).clip(0), (mean["high"] - mean["y"]).clip(0)]
    ax.errorbar(mean["x"], mean["y"], error, fmt=style, color=colour, label=label, capsize=2, **more)


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


def proxy_dots(correlations):
    """Spearman's correlation of each proxy with what a task loses, with its 95% interval: a row of panels for each band
    of bits, a column for each task; 1 is a proxy that ranks systems as the task does."""
    bands, tasks = (list(dict.fromkeys(correlations[column])) for column in ("bits", "task"))
    known = [proxy for proxy in PROXIES if proxy in set(correlations["proxy"])]
    size = (4.2 * len(tasks) + 1.5, 0.4 * len(known) * len(bands) + 1.2)
    fig, axes = plt.subplots(len(bands), len(tasks), figsize=size, sharex=True, sharey=True, squeeze=False)
    for (i, band), (j, task) in itertools.product(enumerate(bands), enumerate(tasks)):
        ax, mine = axes[i, j], correlations[(correlations["bits"] == band) & (correlations["task"] == task)]
        for k, (model, rows) in enumerate(mine.groupby("model", sort=False)):
            rows = rows.set_index("proxy").loc[known]
            places = np.arange(len(known)) + 0.24 * (k - 0.5)
            error = [(rows["correlation"] - rows["low"]).clip(0), (rows["high"] - rows["correlation"]).clip(0)]
            colour = PALETTE["llama-mini" if "llama" in model else "gpt2-mini"]
            ax.errorbar(rows["correlation"], places, xerr=error, fmt="o", color=colour, label=short(model), capsize=2)
        ax.axvline(0, color=PALETTE["bound"], linewidth=0.8)
        counts = f"{mine['systems'].max()} systems"
        ax.set(title=f"{TASKS[task]}, {band} ({counts})", xlim=(-0.4, 1.05))
        ax.set_yticks(range(len(known)), [PROXIES[proxy] for proxy in known])
    axes[0, 0].invert_yaxis()
    for ax in axes[-1]:
        ax.set_xlabel("rank correlation with what the score loses")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
