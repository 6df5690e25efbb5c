"""Figures of notebook 08."""

import matplotlib.pyplot as plt

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, interval, look, whiskers

REFERENCE = "DynamicCache"


def time_dumbbells(table, panels: dict[str, str]):
    """Draw milliseconds per generated token by system, with quartiles. ``panels``: a query of the table -> a title with
    a place for a number, that of the column (context or batch) which varies: smallest hollow, largest filled. Dotted:
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
    style = look(rows["system"].iloc[0]) | {"ls": ""}
    ax.plot(rows.loc[ends, "decode_ms"], [place] * len(ends), color=style["color"], alpha=0.5)
    for end, face in zip(ends, ("white", style["color"]), strict=False):
        row = rows.loc[end]
        quartiles = whiskers(row["decode_ms"], row["decode_q1"], row["decode_q3"])
        ax.errorbar(row["decode_ms"], place, xerr=quartiles, mfc=face, elinewidth=1, **style)


def memory_dots(table):
    """Draw megabytes of each system: what is stored (hollow), what must be resident with the tables made from it
    (light), and the peak, prefill included (filled). Dotted: the peak of ``DynamicCache``."""
    table = table.assign(peak_mb=table[["prefill_mb", "decode_mb"]].max(axis=1))
    rows = table.sort_values("peak_mb", ignore_index=True)
    fig, ax = plt.subplots(figsize=(8, 0.27 * len(rows) + 1))
    for place, row in rows.iterrows():
        style = look(row["system"])
        ax.plot([row["stored_mb"], row["peak_mb"]], [place] * 2, color=style["color"], alpha=0.4)
        for name, fill in MEMORY.items():
            ax.plot(row[name], place, **style | fill)
    for peak in rows.loc[rows["system"] == REFERENCE, "peak_mb"]:  # none, if a reader leaves it out
        ax.axvline(peak, color=PALETTE["fp16"], linestyle=":", lw=1)
    ax.set_yticks(range(len(rows)), rows["system"])
    ax.set(xlabel="megabytes: stored (hollow), resident (light), peak (filled)", xlim=(0, None))
    ax.invert_yaxis()
    return fig


MEMORY = {"stored_mb": {"mfc": "white"}, "resident_mb": {"alpha": 0.4}, "peak_mb": {}}


def in_place(times, losses):
    """Draw transformers' int4 and what attention reads where it lies: bits a value of 8,192 tokens with side
    information, what a token takes longer than with ``DynamicCache`` after few (hollow) and many tokens (filled), and
    KL with its 95% interval. ``times``: of one shape; ``losses``: of ``frontier``."""
    fig, axes = plt.subplots(1, 3, figsize=(11, 2.6), sharey=True)
    measured = {system: system.removeprefix("transformers ") for system in IN_PLACE if system in set(times["system"])}
    systems = [system for system, name in measured.items() if name in set(losses["system"])]
    lost = losses.set_index("system").loc[[measured[system] for system in systems]]
    ends = sorted({times["context"].min(), times["context"].max()})
    for place, (system, (_, row)) in enumerate(zip(systems, lost.iterrows(), strict=True)):
        style = look(system)
        colour = style["color"]
        axes[0].barh(place, row["bits_8k_x1"], 0.6, color=colour)
        added = times[times["system"] == system].set_index("context")["added_mean_ms"]
        axes[1].plot(added[ends], [place] * len(ends), color=colour, alpha=0.5)
        for end, face in zip(ends, ("white", colour), strict=False):
            axes[1].plot(added[end], place, mfc=face, **style)
        axes[2].errorbar(row["kl_mean"], place, xerr=interval(row), capsize=3, **style)
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
