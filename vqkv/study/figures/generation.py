"""Figures of notebook 08."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import in_axes, name_beside, name_ends, plain_numbers, spread
from vqkv.study.figures.style import PALETTE, mark_floor

STYLES = {  # start of a label -> palette key, marker; the first that fits
    "DynamicCache": ("fp16", "o"),
    "transformers quanto": ("quanto", "P"),
    "transformers hqq": ("hqq", "X"),
    "quanto": ("quanto", "o"),
    "hqq": ("hqq", "s"),
    "kivi": ("kivi", "^"),
    "kvquant": ("kvquant", "v"),
    "higgs": ("higgs", "D"),
    "vqllm": ("vqllm", "o"),
    "vqq_product": ("pq", "p"),
    "rvq2": ("vq", "X"),
    "aqua": ("aqua", "D"),
    "best 1.8 short": ("crossed", "*"),
    "best 1.8 long": ("crossed 2", "*"),
    "lossless": ("lossless", "h"),
    "fp16": ("fp16", "o"),
    "zlib": ("zlib", "h"),
}
REFERENCE = "DynamicCache"


def style_of(system: str) -> tuple[str, str]:
    """Colour and marker of a system, the same in every figure of the page."""
    colour, marker = next(style for start, style in STYLES.items() if system.startswith(start))
    return PALETTE[colour], marker


def time_dumbbells(table, panels: dict[str, str]):
    """Milliseconds per generated token by system, with quartiles. ``panels``: a query of the table -> a title with a
    place for a number, that of the column (context or batch) which varies: smallest hollow, largest filled. Dotted:
    ``DynamicCache``."""
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 5.4), sharey=True, squeeze=False)
    order = None
    for ax, (query, title) in zip(axes[0], panels.items(), strict=True):
        rows = table.query(query)
        along = "context" if rows["batch"].nunique() == 1 else "batch"
        ends = sorted({rows[along].min(), rows[along].max()})
        order = order or list(rows[rows[along] == ends[-1]].sort_values("decode_ms")["system"])
        for place, system in enumerate(order):
            _dumbbell(ax, place, rows[rows["system"] == system].set_index(along), ends)
        for end in rows[(rows["system"] == REFERENCE) & rows[along].isin(ends)]["decode_ms"]:
            ax.axvline(end, color=PALETTE["fp16"], linestyle=":", linewidth=1)
        what = f"{ends[0]:,} (hollow) or {ends[-1]:,} (filled)"
        ax.set(title=title.format(what), xscale="log", xlabel="milliseconds per generated token")
        plain_numbers(ax.xaxis)
    axes[0, 0].set_yticks(range(len(order)), order)
    axes[0, 0].invert_yaxis()
    return fig


def _dumbbell(ax, place: int, rows, ends) -> None:
    colour, marker = style_of(rows["system"].iloc[0])
    ax.plot(rows.loc[ends, "decode_ms"], [place] * len(ends), color=colour, alpha=0.5)
    for end, face in zip(ends, ("white", colour), strict=False):
        row = rows.loc[end]
        whiskers = [[row["decode_ms"] - row["decode_q1"]], [row["decode_q3"] - row["decode_ms"]]]
        ax.errorbar(row["decode_ms"], place, xerr=whiskers, fmt=marker, color=colour, mfc=face, ms=7, elinewidth=1)


def memory_lines(table, systems: list[str]):
    """Storage of ``systems`` for one sequence, side information counted, against generated tokens: megabytes, and how
    many times less than ``DynamicCache``. ``table``: from ``with_side``."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.4))
    rows = table[(table["batch"] == 1) & table["system"].isin(systems)]
    rows = rows.assign(megabytes=rows["all_told_bytes"] / 1e6)
    for ax, column in zip(axes, ("megabytes", "ratio_all_told"), strict=True):
        for system, line in rows.groupby("system", sort=False):
            colour, marker = style_of(system)
            ax.plot(line["generated"], line[column], marker + "-", color=colour, mfc=_face(system), ms=5, label=system)
        ax.set(xlabel="generated tokens, after a prompt of 128", ylim=(0, None))
        name_ends(ax, 0.05)
    axes[0].set(ylabel="stored for one sequence, all told (MB)")
    axes[1].set(ylabel="times smaller than DynamicCache")
    return fig


def _face(system: str) -> str:
    """Transformers' own caches are hollow."""
    return "white" if system.startswith("transformers") else style_of(system)[0]


def _dashes(system: str) -> str:
    """Affine codes of 2 bits are dashed, beside those of 4."""
    return "--" if system.endswith(("quanto 2", "hqq 2")) else "-"


def loss_by_position(table, systems: list[str]):
    """Above: the model's loss by position, exact (black) and reading each cache. Below: KL from the exact model, with
    its standard error over sequences. A column per model; dotted: where the positions that it was trained on end."""
    models = list(dict.fromkeys(table["model"]))
    shape = {"sharex": "col", "sharey": "row", "squeeze": False, "height_ratios": (1, 2)}
    fig, axes = plt.subplots(2, len(models), figsize=(11, 6.4), **shape)
    for column, model in zip(axes.T, models, strict=True):
        mine = table[table["model"] == model]
        mine = mine.assign(middle=(mine["start"] + mine["end"]) / 2)
        shown = [system for system in systems if system in set(mine["system"])]
        for system in [*shown, REFERENCE]:
            rows, (colour, marker) = mine[mine["system"] == system], style_of(system)
            look = {"color": colour, "mfc": _face(system), "ms": 5, "elinewidth": 1, "ls": _dashes(system)}
            column[0].plot(rows["middle"], rows["nll"], color=colour, ls=_dashes(system))
            if system != REFERENCE:
                column[1].errorbar(rows["middle"], rows["kl"], rows["kl_se"], fmt=marker, label=system, **look)
        if mine["end"].max() > mine["trained"].max():
            for ax in column:
                ax.axvline(mine["trained"].max(), color=PALETTE["bound"], linestyle=":", linewidth=1)
        column[0].set(title=model)
        column[1].set(xlabel="position in the text (tokens)", yscale="log", ylim=(mine["kl_floor"].max() / 2, None))
        mark_floor(column[1], mine)
        name_ends(column[1], 0.05)
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel("KL from the exact model (nats)")
    return fig


def choose(table, systems: list[str]):
    """KL against bits per value all told, both best at the lower left, of ``systems``: a line from what a sequence
    takes that shares side information with others (filled) to what it takes alone (hollow), and at its name the
    milliseconds that the system adds to a token. ``table``: from ``choices``."""
    fig, ax = plt.subplots(figsize=(10, 5))
    rows = table[table.index.isin(systems)].sort_values("kl", kind="stable")
    for system, row in rows.iterrows():
        colour, marker = style_of(system)
        ax.plot(row[["bits_shared", "bits_all_told"]], [row["kl"]] * 2, color=colour)
        ax.plot(row["bits_all_told"], row["kl"], marker, color=colour, mfc="white", ms=8)
        ax.plot(row["bits_shared"], row["kl"], marker, color=colour, ms=8)
    ax.set(xscale="log", yscale="log", xlabel="bits per value, all told", ylabel="KL from the exact model (nats)")
    ax.margins(x=0.08, y=0.08)
    for set_ticks in (ax.set_xticks, ax.xaxis.set_ticklabels):
        set_ticks(TICKS)
    ax.minorticks_off()
    points = in_axes(ax, rows[["bits_all_told", "kl"]])
    for (system, row), point, place in zip(rows.iterrows(), points, spread(points[:, 1], 0.055), strict=True):
        name = f"{system} (+{row['added_ms']:.0f} ms)"
        name_beside(ax, name, style_of(system)[0], tuple(point), (point[0] + 0.03, place))
    return fig


TICKS = (2, 3, 4, 5, 6, 8, 10)
