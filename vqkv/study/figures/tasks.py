"""Figures of notebook 10."""

import itertools

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.frontier import OURS
from vqkv.study.figures.style import PALETTE

ROLES = {  # of Table 1 without training -> palette key and marker
    "key (contiguous)": ("contiguous", "o"),
    "key (strided)": ("strided", "s"),
    "value": ("value", "^"),
    "key + value": ("key+value", "D"),
}
PUBLISHED = {
    "quanto": ("quanto", "o"),
    "kivi": ("kivi", "^"),
    "kvquant": ("kvquant", "v"),
    "vqq product": ("pq", "p"),
    "higgs": ("higgs", "D"),
    "vqllm": ("vqllm", "s"),
    "aqua": ("aqua", "h"),
}
NAMES = {
    "arc_25": "ARC-c", "hellaswag_10": "HellaSwag", "mmlu_5": "MMLU", "truthfulqa_0": "TruthfulQA",
    "winogrande_5": "WinoGrande", "gsm8k_5": "GSM8K",
}  # fmt: skip


def change_dots(published: pd.DataFrame, ours: pd.DataFrame, names: dict[str, str], here: str):
    """The change of accuracy from the exact cache in points, a dot for each of ``ROLES`` and task: published and here.

    ``published`` has a row for each system and a column for each task; ``ours`` is a table of changes with columns
    label, task, change, error; both without the exact row. ``names``: what to call tasks; ``here``: our model. Bars:
    one standard error.
    """
    change, error = (ours.pivot(index="label", columns="task", values=column) for column in ("change", "error"))
    tasks = [*ours["task"].unique()]
    widths = [published.shape[1], len(tasks)]
    fig, axes = plt.subplots(1, 2, figsize=(10, 4), width_ratios=widths, sharey=True)
    _dots(axes[0], published.rename(columns=NAMES), None)
    _dots(axes[1], change[tasks].rename(columns=names), error[tasks])
    axes[0].set(title="published: Llama-3-8B", ylabel="change of accuracy (points)")
    axes[1].set_title(f"here: {here} (bars: standard error)")
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=len(ROLES))
    return fig


def _dots(ax, change: pd.DataFrame, error: pd.DataFrame | None) -> None:
    ax.axhline(0, color=PALETTE["fp16"], linewidth=1)
    for i, (role, (colour, marker)) in enumerate(ROLES.items()):
        place = [x + 0.18 * (i - (len(ROLES) - 1) / 2) for x in range(change.shape[1])]
        bars = None if error is None else error.loc[role]
        ax.errorbar(place, change.loc[role], bars, fmt=marker, color=PALETTE[colour], label=role, capsize=2)
    ax.set_xticks(range(change.shape[1]), change.columns, rotation=25, ha="right")
    ax.grid(axis="x", visible=False)


def tuning_dots(table: pd.DataFrame):
    """What training gives back of what codes cost (``tasks.given_back``), in percent: a panel for each number of
    codebooks, a row for each label and rate; small dots are seeds, bars run from the least to the most."""
    depths = sorted(table["num_quantizers"].unique())
    fig, axes = plt.subplots(1, len(depths), figsize=(10, 2.9), sharey=True, squeeze=False)
    for ax, depth in zip(axes[0], depths, strict=True):
        kinds = table[table["num_quantizers"] == depth].groupby(["label", "learning_rate"], sort=False)
        for y, (_, rows) in enumerate(kinds):
            share, colour = rows["given_back"], PALETTE["kivi" if "control" in rows["label"].iloc[0] else "vqllm"]
            spread = [[share.mean() - share.min()], [share.max() - share.mean()]]
            ax.errorbar([share.mean()], [y], xerr=spread, fmt="D", ms=8, color=colour, capsize=4)
            ax.plot(share, [y] * len(share), "o", ms=4, color=PALETTE["fp16"])
        ax.axvline(0, color=PALETTE["fp16"], linewidth=1)
        ax.set(title=f"{depth} codebooks", xlabel="of what codes cost, given back (%)", ylim=(len(kinds) - 0.5, -0.5))
        ax.set_yticks(range(len(kinds)), [f"{label}\n(rate {rate:g})" for label, rate in kinds.groups])
    return fig


def depth_lines(published: pd.DataFrame, ours: pd.DataFrame, here: str):
    """Table 2: what is lost against the number of codebooks, a line for each codebook size. Published: mean accuracy
    over the six tasks, in points; here: perplexity, in percent. Both frames: num_quantizers, codebook_size, change."""
    sizes = sorted({*published["codebook_size"], *ours["codebook_size"]})
    colours = dict(zip(sizes, itertools.cycle(PALETTE[name] for name in ("kivi", "vqllm", "kvquant", "vq"))))
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for ax, rows, marker in zip(axes, (published, ours), "os"):
        for size in sorted(rows["codebook_size"].unique()):
            colour = colours[size]
            mine = rows[rows["codebook_size"] == size].sort_values("num_quantizers")
            ax.plot(mine["num_quantizers"], mine["change"], marker=marker, color=colour, label=f"{size:g} codes")
        ax.axhline(0, color=PALETTE["bound"], linewidth=0.8)
        ax.set_xticks(sorted(rows["num_quantizers"].unique()))
        ax.set_xlabel("codebooks")
        ax.legend()
    axes[0].set_title("published: Llama-3-8B", loc="left")
    axes[0].set_ylabel("mean accuracy of six tasks,\nchange (points)")
    axes[1].set_title(f"here: {here}", loc="left")
    axes[1].set_ylabel("perplexity,\nchange (%)")
    return fig


def recall_planes(table, episodes: list[tuple[int, int]], designs=(), names=()):
    """Key-value recall against stored bits, a line for each family of systems with the 95% interval of what it loses;
    black is the exact cache. A row of panels for each of ``episodes`` (pairs, tokens in between), a column for each
    model. ``designs``, called ``names``, come last."""
    models = list(dict.fromkeys(table["model"]))
    looks = {name: (PALETTE[colour], marker, name) for name, (colour, marker) in PUBLISHED.items()}
    titles = [f"{name}: {design}" for name, design in zip(names, designs)] or designs
    looks |= {name: (PALETTE[colour], style[0], title) for name, title, (colour, style) in zip(designs, titles, OURS)}
    size, share = (11, 1 + 3.1 * len(episodes)), {"sharex": True, "sharey": True, "squeeze": False}
    fig, axes = plt.subplots(len(episodes), len(models), figsize=size, **share)
    for line, (pairs, gap) in zip(axes, episodes):
        asked = table[(table["pairs"] == pairs) & (table["gap"] == gap)]
        for ax, model in zip(line, models):
            _recall_plane(ax, asked[asked["model"] == model], looks)
        line[0].set_ylabel(f"recall of {pairs} pairs" + f"\nbehind {gap} tokens" * (gap > 0) + " (%)")
    for ax, model in zip(axes[0], models):
        ax.set(title=model, xlim=(0, 5), ylim=(0, 103))
    for ax in axes[-1]:
        ax.set_xlabel("stored bits per value (side information apart)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return fig


def _recall_plane(ax, rows, looks: dict) -> None:
    ax.axhline(100 * rows["recall_exact"].max(), color=PALETTE["fp16"], linewidth=1, label="exact cache")
    for name, (colour, marker, title) in looks.items():
        mine = rows[rows["system"].str.startswith(name)].sort_values("bits_per_value")
        error = [(mine["high"] - mine["lost"]).clip(0), (mine["lost"] - mine["low"]).clip(0)]
        style = {"fmt": marker + "-", "color": colour, "capsize": 2, "label": title}
        ax.errorbar(mine["bits_per_value"], 100 * mine["recall"], error, **style)
