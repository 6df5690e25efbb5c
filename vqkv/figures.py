"""How figures look, the colour that each system and role keeps everywhere, and ``save()`` beside a table."""

import io
import os
from pathlib import Path

import matplotlib.pyplot as plt

from vqkv.errors import DataError
from vqkv.tables import record_figures, write_atomically

PALETTE = {
    # systems
    "fp16": "#222222",
    "vqllm": "#3f90da",
    "quanto": "#ffa90e",
    "hqq": "#bd1f01",
    "kivi": "#94a4a2",
    "kvquant": "#832db6",
    "higgs": "#a96b59",
    "vq": "#e76300",
    "vqq": "#b9ac70",
    "pq": "#717581",
    "aqua": "#92dadd",
    # what is stored, and how its channels are grouped
    "key": "#3f90da",
    "value": "#ffa90e",
    "key_post_rope": "#832db6",
    "key+value": "#832db6",
    "contiguous": "#bd1f01",
    "strided": "#3f90da",
    "random": "#94a4a2",
    # where codebooks start, and where numbers come from
    "kmeans": "#3f90da",
    "published": "#717581",
    "bound": "#222222",
    "llama-mini": "#3f90da",
    "gpt2-mini": "#e76300",
}

STYLE = {
    "figure.figsize": (8, 4),
    "figure.dpi": 120,
    "savefig.dpi": 120,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same glyphs on every machine
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "vqkv",
}

# What a file says about its making would make two equal figures differ.
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def use_style() -> None:
    """Set the study's style for every figure drawn from here on."""
    plt.style.use(["petroff10", STYLE])


def save(fig, name: str, table) -> None:
    """Write ``figures/NAME.svg`` and ``.png`` beside ``table``'s results and record their sha256 in its provenance.

    ``table`` comes from ``vqkv.tables.table``. Existing files are left alone when the table was merely loaded from the
    repository, so that reading a page never rewrites what is committed. Raises ``DataError`` for any other DataFrame.
    """
    origin = table.attrs.get("vqkv")
    if not origin:
        raise DataError(f"figure {name!r}: only a table from vqkv.tables.table says where to save it")
    root = Path(origin["root"])
    paths = [root / "figures" / f"{name}.{kind}" for kind in METADATA]
    if _may_write(origin, root, paths):
        hashes = {path.name: write_atomically(path, render(fig, path.suffix[1:])) for path in paths}
        record_figures(root, origin["name"], hashes)


def render(fig, kind: str) -> bytes:
    """The figure as a file of ``kind`` ``svg`` or ``png``: equal figures give equal bytes."""
    buffer = io.BytesIO()
    with plt.rc_context({key: STYLE[key] for key in ("svg.fonttype", "svg.hashsalt")}):
        fig.savefig(buffer, format=kind, metadata=METADATA[kind])
    return buffer.getvalue()


def _may_write(origin: dict, root: Path, paths: list[Path]) -> bool:
    asked = bool(os.environ.get("VQKV_OUT")) or origin["fresh"] or root.parent.name == "runs"
    return asked or not all(path.is_file() for path in paths)


ROLE_NAMES = {"key": "keys before RoPE", "key_post_rope": "keys after RoPE", "value": "values"}


def magnitude_boxes(table, published):
    """Per-head max|v| of each model by role, beside the published median, p90 and largest of its counterpart.

    ``published``: bundled model name -> (published model's name, {statistic: value}).
    """
    models = list(dict.fromkeys(table["model"]))
    fig, axes = plt.subplots(1, len(models), figsize=(10, 3.8), sharey=True, squeeze=False)
    for ax, model in zip(axes[0], models, strict=True):
        mine = table[table["model"] == model]
        roles = [role for role in ROLE_NAMES if (mine["role"] == role).any()]
        for i, role in enumerate(roles):
            values = mine.loc[mine["role"] == role, "max_abs"]
            box = ax.boxplot(values, positions=[i], widths=0.6, whis=(0, 100), patch_artist=True)
            box["boxes"][0].set(facecolor=PALETTE[role], alpha=0.8)
            box["medians"][0].set(color="black")
        ax.set_xticks(range(len(roles)), [ROLE_NAMES[role].replace(" ", "\n", 1) for role in roles])
        ax.set_title(f"{model}: {len(mine) // len(roles)} KV heads")
        if model in published:
            _published_marks(ax, len(roles), *published[model])
    axes[0, 0].set_ylabel("largest |value| of a head")
    axes[0, 0].set_ylim(bottom=0)
    return fig


def _published_marks(ax, x: float, name: str, numbers: dict[str, float]) -> None:
    for (statistic, value), marker in zip(numbers.items(), "ov^s", strict=False):
        ax.plot(x, value, marker, color=PALETTE["published"])
        ax.annotate(f"{statistic} {value:g}", (x, value), (6, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_xticks([*ax.get_xticks(), x], [*[t.get_text() for t in ax.get_xticklabels()], f"{name}\n(published)"])
    ax.set_xlim(-0.6, x + 1.1)


def channel_ratios(table):
    """By layer, how much larger a head's loudest channel is than its median channel; a point per head."""
    models = list(dict.fromkeys(table["model"]))
    fig, axes = plt.subplots(1, len(models), figsize=(8.5, 3.4), sharey=True, squeeze=False)
    for ax, model in zip(axes[0], models, strict=True):
        for offset, role in ((-0.2, "key"), (0, "key_post_rope"), (0.2, "value")):
            mine = table[(table["model"] == model) & (table["role"] == role)]
            ax.plot(
                mine["layer"] + offset,
                mine["channel_ratio"],
                "o",
                color=PALETTE[role],
                label=ROLE_NAMES[role],
                alpha=0.8,
            )
        ax.axhline(1, color=PALETTE["bound"], linewidth=1)
        ax.set(title=model, xlabel="layer", xticks=sorted(set(table["layer"])), yscale="log")
    axes[0, 0].set_ylabel("loudest channel / median channel\n(mean |value|)")
    axes[0, 0].legend()
    return fig


def recall_bars(table, chance: float, prefix: str = "recall accuracy, ", suffix: str = " tokens back"):
    """Key-value recall accuracy of each model by distance, and what guessing (``chance``) would give."""
    rows = table[table["quantity"].str.startswith(prefix)]
    distances = [q.removeprefix(prefix).removesuffix(suffix) for q in dict.fromkeys(rows["quantity"])]
    models = list(dict.fromkeys(rows["model"]))
    fig, ax = plt.subplots(figsize=(7, 3))
    for i, model in enumerate(models):
        mine = rows[rows["model"] == model].set_index("quantity")["value"]
        heights = [100 * mine.get(f"{prefix}{d}{suffix}", float("nan")) for d in distances]
        positions = [x + (i - (len(models) - 1) / 2) * 0.4 for x in range(len(distances))]
        ax.bar(positions, heights, 0.38, color=PALETTE[_short(model)], label=model)
    ax.axhline(
        100 * chance, color=PALETTE["bound"], linestyle="--", linewidth=1, label=f"guessing: {100 * chance:.1f}%"
    )
    ax.set(xticks=range(len(distances)), xticklabels=distances, ylim=(0, 100))
    ax.set(xlabel="tokens between a value and the query for it", ylabel="recall accuracy (%)")
    ax.legend(loc="upper right")
    return fig


def learning_curves(table, groups: dict[str, list[tuple[str, dict]]], top: float | None = None):
    """Held-out loss after the last stage against moving-average steps; line: mean over seeds, band: their range.

    ``groups``: panel title -> [(label, {column: value}), ...]; ``top`` cuts the axis, where a start is far above it.
    """
    last = table[table["stage"] == table["stage"].max()]
    fig, axes = plt.subplots(1, len(groups), figsize=(9, 3.6), sharey=True, squeeze=False)
    for ax, (title, variants) in zip(axes[0], groups.items(), strict=True):
        for i, (label, where) in enumerate(variants):
            curves = _where(last, where).groupby("step")["loss"].agg(["mean", "min", "max"])
            line = ax.plot(curves.index, curves["mean"], label=label, color=f"C{i}")[0]
            ax.fill_between(curves.index, curves["min"], curves["max"], color=line.get_color(), alpha=0.25, linewidth=0)
        ax.axvline(50, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.text(52, 0.98, '"50 steps"', color=PALETTE["published"], va="top", transform=ax.get_xaxis_transform())
        ax.set(title=title, xlabel="moving-average steps", yscale="log")
        ax.legend(loc="upper right")
    axes[0, 0].set_ylabel("held-out relative MSE")
    axes[0, 0].set_ylim(top=top)
    return fig


def code_usage(table, variants: list[tuple[str, dict]], codebook_size: int):
    """After the last step, per stage: codes in effective use, and the share of codes that no held-out vector chose."""
    last = table[table["step"] == table["step"].max()]
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for i, (label, where) in enumerate(variants):
        stages = _where(last, where).groupby("stage")[["perplexity", "unused"]].agg(["mean", "min", "max"])
        for ax, column, scale in ((axes[0], "perplexity", 1), (axes[1], "unused", 100)):
            mean, low, high = (scale * stages[column][kind] for kind in ("mean", "min", "max"))
            ax.errorbar(stages.index, mean, [mean - low, high - mean], fmt="o-", color=f"C{i}", label=label, capsize=3)
    axes[0].axhline(codebook_size, color=PALETTE["bound"], linewidth=1)
    axes[0].set(ylabel="code perplexity", xlabel="stage", ylim=(0, 1.05 * codebook_size))
    axes[0].set_title(f"codes in effective use, of {codebook_size} (line)")
    axes[1].set(ylabel="unused codes (%)", xlabel="stage", ylim=(0, None))
    axes[1].set_title("codes that no held-out vector chose")
    axes[0].legend()
    return fig


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
            if ax in axes[-1]:
                ax.set_xlabel(label)
        line[0].invert_yaxis()
        line[0].set_title(model, loc="left")
    return fig


def _where(table, conditions: dict):
    for column, value in conditions.items():
        table = table[table[column] == value]
    return table


def _short(model: str) -> str:
    name = model.split("/")[-1]
    return name if name in PALETTE else "llama-mini"
