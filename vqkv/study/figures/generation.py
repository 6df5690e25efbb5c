"""Figures of notebook 08."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE

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
    "best-short 1.8": ("crossed", "*"),
    "best-mid 1.8": ("crossed 3", "*"),
    "best-long 1.8": ("crossed 2", "*"),
    "live": ("live", "d"),
    "kvtc": ("kvtc", "o"),
    "cachegen": ("cachegen", "s"),
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


def memory_dots(table):
    """Megabytes of each system: what is stored (hollow), what must be resident with the tables made from it (light),
    and the peak, prefill included (filled). Dotted: the peak of ``DynamicCache``."""
    table = table.assign(peak_mb=table[["prefill_mb", "decode_mb"]].max(axis=1))
    rows = table.sort_values("peak_mb", ignore_index=True)
    fig, ax = plt.subplots(figsize=(8, 0.27 * len(rows) + 1))
    for place, row in rows.iterrows():
        colour, marker = style_of(row["system"])
        ax.plot([row["stored_mb"], row["peak_mb"]], [place] * 2, color=colour, alpha=0.4)
        for name, look in MEMORY.items():
            ax.plot(row[name], place, marker, color=colour, ms=7, **look | {"mfc": look.get("mfc", colour)})
    for peak in rows.loc[rows["system"] == REFERENCE, "peak_mb"]:  # none, if a reader leaves it out
        ax.axvline(peak, color=PALETTE["fp16"], linestyle=":", lw=1)
    ax.set_yticks(range(len(rows)), rows["system"])
    ax.set(xlabel="megabytes: stored (hollow), resident (light), peak (filled)", xlim=(0, None))
    ax.invert_yaxis()
    return fig


MEMORY = {"stored_mb": {"mfc": "white"}, "resident_mb": {"alpha": 0.4}, "peak_mb": {}}


def in_place(times, losses):
    """Transformers' int4 and what attention reads where it lies: bits a value of 8,192 tokens with side information,
    what a token takes longer than with ``DynamicCache`` after few (hollow) and many tokens (filled), and KL with its
    95% interval. ``times``: of one shape; ``losses``: of ``frontier``."""
    fig, axes = plt.subplots(1, 3, figsize=(11, 2.6), sharey=True)
    systems = [system for system in IN_PLACE if system in set(times["system"])]
    lost = losses.set_index("system").loc[[system.removeprefix("transformers ") for system in systems]]
    ends = sorted({times["context"].min(), times["context"].max()})
    for place, (system, (_, row)) in enumerate(zip(systems, lost.iterrows(), strict=True)):
        colour, marker = style_of(system)
        axes[0].barh(place, row["bits_8k_x1"], 0.6, color=colour)
        added = times[times["system"] == system].set_index("context")["added_mean_ms"]
        axes[1].plot(added[ends], [place] * len(ends), color=colour, alpha=0.5)
        for end, face in zip(ends, ("white", colour), strict=False):
            axes[1].plot(added[end], place, marker, color=colour, mfc=face, ms=9)
        error = [[row["kl_mean"] - row["kl_low"]], [row["kl_high"] - row["kl_mean"]]]
        axes[2].errorbar(row["kl_mean"], place, xerr=error, fmt=marker, color=colour, ms=9, capsize=3)
    axes[1].axvline(0, color=PALETTE["fp16"], linestyle=":", linewidth=1)
    axes[0].set(xlabel="bits a value at 8,192 tokens")
    axes[1].set(xlabel=f"ms added, {ends[0]:,} (hollow) or {ends[-1]:,} tokens")
    axes[2].set(xlabel="KL (nats)", xlim=(0, None))
    axes[0].set_yticks(range(len(systems)), [IN_PLACE[system] for system in systems])
    axes[0].invert_yaxis()
    return fig


IN_PLACE = {
    "transformers quanto 4": "transformers' int4",
    "quanto 4": "our int4",
    "live 3.25": "live 3.25",
    "live 2.25": "live 2.25",
}
