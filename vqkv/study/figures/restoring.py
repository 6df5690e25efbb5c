"""Figures of notebook 13."""

import matplotlib.pyplot as plt
import numpy as np

from vqkv.study.figures.generation import style_of
from vqkv.study.figures.labels import name_ends, plain_numbers
from vqkv.study.figures.style import PALETTE, basename, by_model

AGAIN = {"color": PALETTE["bound"], "ls": "--", "label": "computed again"}


def ready_lines(table):
    """Milliseconds until the first token after a prompt against the prompt's length: restored by each system, and
    computed again (black, dashed). A panel per model; ``table``: from ``restoring_times``."""
    fig, axes, panels = by_model(table, (12, 4.2))
    for ax, model, mine in panels:
        again = mine.drop_duplicates("tokens")
        ax.plot(again["tokens"], again["again_ms"], **AGAIN)
        for system, rows in mine.groupby("system", sort=False):
            ax.plot(rows["tokens"], rows["ready_ms"], **_look(system))
        ax.set(title=basename(model), xscale="log", yscale="log", xlabel="tokens of the prompt")
        ax.set_xticks(again["tokens"], [f"{n:,}" for n in again["tokens"]])
        ax.minorticks_off()
        ax.margins(x=0.15)
        plain_numbers(ax.yaxis)
    axes[0, 0].set_ylabel("until the next token (ms)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return fig


def bandwidth_lines(table, slowest: float = 5, fastest: float = 2000):
    """Milliseconds until the first token after each model's longest prompt against the bandwidth (MB/s) that its file
    comes with: bytes over bandwidth, and the time measured with the file in memory. Dashed: computed again."""
    speeds = np.geomspace(slowest, fastest, 60)
    fig, axes, panels = by_model(table, (12, 4.4))
    for ax, model, mine in panels:
        mine = mine[mine["tokens"] == mine["tokens"].max()]
        ax.plot(speeds, np.full_like(speeds, mine["again_ms"].iloc[0]), **AGAIN)
        for row in mine.itertuples():
            ax.plot(speeds, row.ready_ms + row.file_bytes / 1e3 / speeds, **_look(row.system) | {"marker": ""})
        ax.set(title=f"{basename(model)}, {mine['tokens'].iloc[0]:,} tokens", xscale="log", yscale="log")
        ax.set(xlabel="bandwidth (MB/s)")
        ax.set_xticks([10, 100, 1000], ["10", "100", "1,000"])
        ax.minorticks_off()
        plain_numbers(ax.yaxis)
    for ax in axes[0]:
        name_ends(ax)
    axes[0, 0].set_ylabel("until the next token (ms)")
    return fig


def chat_lines(table):
    """Turn by turn of a chat: milliseconds until the answer's first token, with the cache brought back and with
    everything computed again (dashed); and the megabytes that the folder holds."""
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
    colour, marker = style_of(system)
    return {"color": colour, "marker": marker, "ms": 7, "lw": 2.2, "label": system.removeprefix("best 1.8 ")}
