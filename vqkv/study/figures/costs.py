"""Figures of pages 08 and 13: bytes, milliseconds and stored prompts."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from vqkv.study.figures.style import PALETTE, interval, look, plain_numbers, whiskers

REFERENCE = "DynamicCache"


def time_dumbbells(table, panels: dict[str, str]):
    """Draw milliseconds per generated token by system, with quartiles; dotted: ``DynamicCache``. ``panels``: a query ->
    a title with a place for the number (context or batch) that varies: smallest hollow, largest filled."""
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 5.4), sharey=True, squeeze=False)
    order: list[str] = []
    for ax, (query, title) in zip(axes[0], panels.items(), strict=True):
        rows = table.query(query)
        along = "context" if rows["batch"].nunique() == 1 else "batch"
        ends = sorted({rows[along].min(), rows[along].max()})
        order = order or list(rows[rows[along] == ends[-1]].sort_values("decode_ms")["system"])
        for position, system in enumerate(order):
            style, row_at = look(system) | {"ls": ""}, rows[rows["system"] == system].set_index(along)
            ax.plot(row_at.loc[ends, "decode_ms"], [position] * len(ends), color=style["color"], alpha=0.5)
            for end, face in zip(ends, ("white", style["color"]), strict=False):
                row = row_at.loc[end]
                quartiles = whiskers(row["decode_ms"], row["decode_q1"], row["decode_q3"])
                ax.errorbar(row["decode_ms"], position, xerr=quartiles, mfc=face, elinewidth=1, **style)
        for end in rows[(rows["system"] == REFERENCE) & rows[along].isin(ends)]["decode_ms"]:
            ax.axvline(end, color=PALETTE["fp16"], linestyle=":", linewidth=1)
        what = f"{ends[0]:,} (hollow) or {ends[-1]:,} (filled)"
        ax.set(title=title.format(what), xscale="log", xlabel="milliseconds per generated token")
        plain_numbers(ax.xaxis)
    axes[0, 0].set_yticks(range(len(order)), order)
    axes[0, 0].invert_yaxis()
    return fig


def memory_dots(table):
    """Draw megabytes of each system: stored (hollow), resident (light), peak (filled; ``DynamicCache``'s dotted)."""
    table = table.assign(peak_mb=table[["prefill_mb", "decode_mb"]].max(axis=1))
    rows = table.sort_values("peak_mb", ignore_index=True)
    fig, ax = plt.subplots(figsize=(8, 0.27 * len(rows) + 1))
    for position, row in rows.iterrows():
        style = look(row["system"])
        ax.plot([row["stored_mb"], row["peak_mb"]], [position] * 2, color=style["color"], alpha=0.4)
        for name, fill in MEMORY.items():
            ax.plot(row[name], position, **style | fill)
    for peak in rows.loc[rows["system"] == REFERENCE, "peak_mb"]:  # none, if a reader leaves it out
        ax.axvline(peak, color=PALETTE["fp16"], linestyle=":", lw=1)
    ax.set_yticks(range(len(rows)), rows["system"])
    ax.set(xlabel="megabytes: stored (hollow), resident (light), peak (filled)", xlim=(0, None))
    ax.invert_yaxis()
    return fig


MEMORY: dict[str, dict[str, Any]] = {"stored_mb": {"mfc": "white"}, "resident_mb": {"alpha": 0.4}, "peak_mb": {}}


def in_place(times, losses):
    """Draw transformers' int4 and what attention reads where it lies: bits a value of 8,192 tokens with side
    information, what a token takes longer than with ``DynamicCache`` after few (hollow) and many tokens (filled), and
    KL with its 95% interval. ``times``: of one shape; ``losses``: of ``frontier``."""
    fig, axes = plt.subplots(1, 3, figsize=(11, 2.6), sharey=True)
    measured = {system: system.removeprefix("transformers ") for system in IN_PLACE if system in set(times["system"])}
    systems = [system for system, name in measured.items() if name in set(losses["system"])]
    lost = losses.set_index("system").loc[[measured[system] for system in systems]]
    ends = sorted({times["context"].min(), times["context"].max()})
    for position, (system, (_, row)) in enumerate(zip(systems, lost.iterrows(), strict=True)):
        style = look(system)
        colour = style["color"]
        axes[0].barh(position, row["bits_8k_x1"], 0.6, color=colour)
        added = times[times["system"] == system].set_index("context")["added_mean_ms"]
        axes[1].plot(added[ends], [position] * len(ends), color=colour, alpha=0.5)
        for end, face in zip(ends, ("white", colour), strict=False):
            axes[1].plot(added[end], position, mfc=face, **style)
        axes[2].errorbar(row["kl_mean"], position, xerr=interval(row), capsize=3, **style)
    axes[1].axvline(0, color=PALETTE["fp16"], linestyle=":", linewidth=1)
    axes[0].set(xlabel="bits a value at 8,192 tokens")
    axes[1].set(xlabel=f"ms added a token, after\n{ends[0]:,} (hollow) or {ends[-1]:,} tokens")
    axes[2].set(xlabel="KL (nats)", xlim=(0, None))
    axes[2].locator_params(axis="x", nbins=4)
    axes[0].set_yticks(range(len(systems)), [IN_PLACE[system] for system in systems])
    axes[0].invert_yaxis()
    return fig


IN_PLACE = {"transformers quanto 4": "transformers' int4", "quanto 4": "our int4"}
IN_PLACE |= {name: name for name in ("live 3.25", "live 2.25")}


IN_TABLES = ("best-long", "cachegen", "lossless")  # more than six lines are hard to distinguish
AGAIN = {"color": PALETTE["bound"], "ls": "--", "label": "computed again"}


def waiting(table):
    """Milliseconds until the first token after a prompt, restored by each system and computed again (dashed): against
    the prompt's length, files in memory; and for the longest prompt against the bandwidth (MB/s) that its file comes
    with, bytes over bandwidth added. ``table``: from ``restoring_times``, of one model; ``IN_TABLES`` are not drawn."""
    table = table[~table["system"].str.startswith(IN_TABLES)]
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True)
    again = table.drop_duplicates("tokens")
    longest = table[table["tokens"] == table["tokens"].max()]
    speeds = np.geomspace(5, 2000, 60)
    axes[0].plot(again["tokens"], again["again_ms"], **AGAIN)
    axes[1].plot(speeds, np.full_like(speeds, longest["again_ms"].iloc[0]), **AGAIN)
    for system, rows in table.groupby("system", sort=False):
        axes[0].plot(rows["tokens"], rows["ready_ms"], **_look(system))
    for row in longest.itertuples():
        axes[1].plot(speeds, row.ready_ms + row.file_bytes / 1e3 / speeds, **_look(row.system) | {"marker": ""})
    axes[0].set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="until the next token (ms)")
    axes[1].set(xscale="log", xlabel=f"bandwidth (MB/s), {longest['tokens'].iloc[0]:,} tokens")
    axes[0].set_xticks(again["tokens"], [f"{n:,}" for n in again["tokens"]])
    axes[1].set_xticks([10, 100, 1000], ["10", "100", "1,000"])
    for ax in axes:
        ax.minorticks_off()
    plain_numbers(axes[0].yaxis)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return fig


def chat_lines(table):
    """Draw by turn the time to an answer's first token, restored and computed again (dashed), and megabytes."""
    table = table[~table["system"].str.startswith(IN_TABLES)]
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    again = table.groupby("turn")["again_ms"].median()
    axes[0].plot(again.index, again, **AGAIN)
    for system, rows in table.groupby("system", sort=False):
        axes[0].plot(rows["turn"], rows["ready_ms"], **_look(system))
        axes[1].plot(rows["turn"], rows["folder_bytes"] / 1e6, **_look(system))
    axes[0].set(ylabel="until the answer begins (ms)", ylim=(0, None))
    axes[1].set(ylabel="stored in the folder (MB)", ylim=(0, None))
    for ax in axes:
        ax.set(xlabel="turn of the chat", xticks=sorted(set(table["turn"])))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return fig


def _look(system: str) -> dict:
    return look(system) | {"lw": 2.2, "label": system}
