"""Figures of notebook 10."""

import itertools

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.frontier import OURS
from vqkv.study.figures.style import PALETTE

NOTHING = "#f2f2f2"
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


def change_grid(published: pd.DataFrame, ours: pd.DataFrame, names: dict[str, str], here: str):
    """Two grids, systems by tasks: the change of accuracy from the exact cache in points, published and here.

    ``published`` has a row for each system and a column for each task; ``ours`` is a table of changes with columns
    label, task, change, error; both without the exact row. ``names``: what to call tasks; ``here``: our model. A cell
    of ours whose change is within one standard error is grey. Colours stop at 10 points.
    """
    wide = [ours.pivot(index="label", columns="task", values=column) for column in ("change", "error")]
    order = (ours["label"].unique(), [task for task in names if task in set(ours["task"])])
    change, error = (table.loc[order[0], order[1]] for table in wide)
    fig, axes = plt.subplots(
        1, 2, figsize=(10, 1.6 + 0.42 * len(change)), width_ratios=[published.shape[1], change.shape[1]]
    )
    _grid(axes[0], published.reindex(change.index).rename(columns=NAMES), None)
    _grid(axes[1], change.rename(columns=names), error)
    axes[0].set_title("published: Llama-3-8B", loc="left")
    axes[1].set_title(f"here: {here}", loc="left")
    axes[1].set_yticklabels([])
    return fig


def _grid(ax, change: pd.DataFrame, error: pd.DataFrame | None) -> None:
    ax.imshow(change, cmap="RdBu", vmin=-10, vmax=10, aspect="auto")
    for y in range(change.shape[0]):
        for x in range(change.shape[1]):
            _cell(ax, x, y, change.iat[y, x], None if error is None else error.iat[y, x])
    ax.set_xticks(range(change.shape[1]), change.columns, rotation=25, ha="right")
    ax.set_yticks(range(change.shape[0]), change.index)
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _cell(ax, x: int, y: int, change: float, error: float | None) -> None:
    if pd.isna(change):
        ax.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color="white"))
        return
    unclear = error is not None and abs(change) <= error
    if unclear:
        ax.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=NOTHING))
    text = f"{change:+.1f}" + ("" if error is None else f"\n±{error:.1f}")
    dark = not unclear and abs(change) > 6
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222", linespacing=0.9)


def perplexity_dots(table: pd.DataFrame, exact: float):
    """Held-out perplexity (columns label, num_quantizers, value) against that of the exact cache: a panel for each
    number of codebooks; models that read exact keys and values are black."""
    depths = sorted(table["num_quantizers"].unique(), reverse=True)
    rows = [table[table["num_quantizers"] == depth] for depth in depths]
    heights = [len(mine) for mine in rows]
    fig, axes = plt.subplots(
        len(rows), 1, figsize=(8, 1.3 + 0.45 * sum(heights)), height_ratios=heights, sharex=True, squeeze=False
    )
    for ax, mine, depth in zip(axes[:, 0], rows, depths):
        _dots(ax, mine, exact)
        ax.set_title(f"{depth} codebook{'s' if depth > 1 else ''}", loc="left")
        ax.margins(x=0.12, y=0.25 if len(mine) < 4 else 0.12)
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel(f"perplexity of held-out text (dashed: exact cache, not trained, {exact:.1f})")
    return fig


def _dots(ax, rows: pd.DataFrame, exact: float) -> None:
    ax.axvline(exact, color=PALETTE["bound"], linestyle="--", linewidth=1.2)
    for y, (label, value) in enumerate(zip(rows["label"], rows["value"])):
        colour = PALETTE["fp16"] if "without" in label else PALETTE["vqllm"]
        ax.plot([exact, value], [y, y], color=colour, linewidth=1.2)
        ax.plot(value, y, "o", color=colour)
        side = 1 if value >= exact else -1
        at = {"xytext": (8 * side, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        ax.annotate(f"{value:.1f}", (value, y), ha="left" if side > 0 else "right", **at)
    ax.set_yticks(range(len(rows)), rows["label"])


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
