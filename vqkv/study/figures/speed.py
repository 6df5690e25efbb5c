"""Figures of notebook 09."""

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from vqkv.study.figures.style import PALETTE, plain_numbers, whiskers
from vqkv.study.tables import with_numbers

LOOKS = {  # start of an implementation's name -> palette key, marker, label
    "vqkv": ("vqkv", "o", "vqkv"),
    "plain torch": ("plain", "^", "plain torch"),
    "vector-quantize": ("vector-quantize", "s", "vector-quantize-pytorch"),
    "faiss": ("faiss", "D", "faiss"),
    "quanto": ("quanto", "P", "quanto"),
    "hqq": ("hqq", "X", "hqq"),
    "matrix products": ("bound", "|", "matrix products alone"),
    "constriction": ("constriction", "<", "constriction"),
    "torch": ("plain", "^", "plain torch"),
}
FORMATS = {  # start of a format -> palette key of the system that has it, marker
    "fp16": ("fp16", ""),
    "int2": ("quanto", "v"),
    "int4": ("quanto", "o"),
    "int8": ("quanto", "^"),
    "grid": ("higgs", "D"),
    "product": ("pq", "p"),
    "residual 3": ("vq", "s"),
    "residual 8": ("vqllm", "o"),
    "live": ("live", "*"),
}
WRITING = {  # operation, start of its format -> how a row of the figure names it
    ("rvq_encode", "residual"): "residual VQ",
    ("product_encode", "product"): "product codes",
    ("grid_encode", "grid 256"): "Gaussian grid",
    ("affine_encode", "int4"): "int4",
    ("rans_encode", "2.5 bits"): "entropy-coded streams",
    ("rvq_statistics", "residual"): "codebook learning's sums",
}
READING = {
    ("residual_decode", "residual 8"): "residual VQ",
    ("product_decode", "product"): "product codes",
    ("grid_decode", "grid 256"): "Gaussian grid",
    ("affine_decode", "int4"): "int4",
    ("rans_decode", "2.5 bits"): "entropy-coded streams",
    ("best_decode", "by head, whole"): "best-short, all stages",
    ("best_decode", "predicted, whole"): "best-long, all stages",
}
LIBRARIES = ("faiss", "quanto", "hqq", "vector-quantize", "constriction")


def bound_dots(table):
    """Draw the share of the bound that we, plain torch and the fastest other library reach in writing and reading."""
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharex=True)
    for ax, (title, names) in zip(axes, (("writing a cache", WRITING), ("reading a cache", READING)), strict=True):
        for position, (operation, start) in enumerate(names):
            rows = table[(table["operation"] == operation) & table["format"].str.startswith(start)]
            _bound_row(ax, position, rows[rows["bound_ms"] == rows["bound_ms"].max()])
        ax.axvline(1, color=PALETTE["bound"], linewidth=1.5, linestyle=":")
        ax.set_yticks(range(len(names)), names.values())
        ax.set(title=title, xscale="log", xlabel="share of the machine's bound", ylim=(len(names) - 0.5, -0.5))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    axes[0].set_xlim(left=axes[0].get_xlim()[0] / 2)  # room for names
    handles = []
    for name in ("vqkv", "plain torch", "faiss"):
        colour, marker, label = look_of(name)
        label = "fastest other library (named)" if name == "faiss" else label
        handles.append(Line2D([], [], ls="", ms=9, color=colour, marker=marker, label=label))
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _bound_row(ax, position: int, rows) -> None:
    names = rows.sort_values("median")["implementation"]
    others = names[names.str.startswith(LIBRARIES)].head(1)
    ours = names[names.str.startswith(("vqkv", "plain torch"))]
    for row in rows.loc[[*ours.index, *others.index]].itertuples():
        library, share = row.implementation.startswith(LIBRARIES), row.ratio_to_bound
        colour, marker, name = look_of("faiss" if library else row.implementation)
        ends = whiskers(share, row.bound_ms / row.max, row.bound_ms / row.min)
        ax.errorbar(share, position, xerr=ends, fmt=marker, color=colour, ms=10 if name == "vqkv" else 8, elinewidth=1)
        if library:
            name = look_of(row.implementation)[2]
            ax.annotate(name, (share, position), (0, 7), textcoords="offset points", ha="center")


def look_of(implementation: str) -> tuple[str, str, str]:
    """Colour, marker and label of an implementation, the same in every figure of the page."""
    colour, marker, label = next(look for start, look in LOOKS.items() if implementation.startswith(start))
    return PALETTE[colour], marker, label


def attention_lines(table):
    """Draw time of one token's attention over fp16 SDPA's by context: read as packed (above), decoded first (below)."""
    table = with_numbers(table[table["operation"] == "decode_attention"], "batch", "context")
    table, batches = table[table["format"] != "int8"], sorted(set(table["batch"]))
    fig, axes = plt.subplots(2, len(batches), figsize=(11, 7), sharex="col", sharey=True, squeeze=False)
    ways = {"vqkv": "packed keys and values", "decode, then": "decoded, then SDPA"}
    for row, (start, title) in zip(axes, ways.items(), strict=True):
        for ax, batch in zip(row, batches, strict=True):
            mine = table[(table["batch"] == batch) & table["implementation"].str.startswith(start)]
            contexts = sorted(set(mine["context"]))
            ax.axhline(1, color=PALETTE["fp16"], linewidth=1.8)
            ax.set_xscale("log", base=2)
            ax.set_xticks(contexts, [f"{n:,}" for n in contexts])
            for stored, rows in mine.groupby("format", sort=False):
                colour, marker = next(look for start, look in FORMATS.items() if stored.startswith(start))
                ratio = rows["ratio_to_fp16"]
                ends = whiskers(*(ratio * rows[end] / rows["median"] for end in ("median", "min", "max")))
                look = {"fmt": marker + "-", "color": PALETTE[colour], "elinewidth": 1, "label": stored}
                ax.errorbar(rows["context"].astype(int), ratio, ends, **look)
            ax.set_title(f"{title}, {'one sequence' if batch == 1 else f'{batch} sequences'}")
        row[0].set(ylabel="time, fp16 SDPA = 1", yscale="log")
    for ax in axes[1]:
        ax.set(xlabel="context (tokens)")
    plain_numbers(axes[0, 0].yaxis)
    low = min(0.6, axes[0, 0].get_ylim()[0])
    axes[0, 0].set_ylim(bottom=low)
    for ax in axes.flat:
        ax.axhspan(low, 1, color=PALETTE["fp16"], alpha=0.08, lw=0)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    axes[0, 0].text(0.02, 0.98, "faster than fp16", transform=axes[0, 0].get_yaxis_transform(), va="top", fontsize=10)
    return fig


def search_lines(table):
    """Draw milliseconds to encode by residual VQ against the codes of a codebook and against codebooks."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    rows = with_numbers(table[table["operation"] == "rvq_encode"], "N", "K", "C")
    rows = rows[rows["N"] == rows["N"].min()]
    panels = {"C": ("K", "codes a codebook, {} codebooks"), "K": ("C", "codebooks of {:,} codes")}
    for ax, (along, (fixed, label)) in zip(axes, panels.items(), strict=True):
        shown = rows[rows[fixed] == rows[fixed].max()].sort_values(along)
        for name, line in shown.groupby("implementation", sort=False):
            colour, marker, title = look_of(name)
            ends = whiskers(line["median"], line["min"], line["max"])
            style = {"fmt": marker + "-", "color": colour, "label": title, "elinewidth": 1}
            ax.errorbar(line[along].astype(int), line["median"], ends, **style)
        bound = shown.groupby(along)["bound_ms"].max()
        ax.plot(bound.index.astype(int), bound, ":", color=PALETTE["bound"], label="bound")
        ax.set(xscale="log", yscale="log", xlabel=label.format(rows[fixed].max()))
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes[0].set_ylabel(f"ms to encode {rows['N'].min():,} vectors")
    plain_numbers(axes[0].yaxis)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=5)
    return fig
