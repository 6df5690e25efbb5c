"""Figures of notebook 13."""

import matplotlib.pyplot as plt
import numpy as np

from vqkv.study.figures.labels import name_ends, plain_numbers
from vqkv.study.figures.style import PALETTE, look

IN_TABLES = ("best-long", "cachegen", "lossless")  # more than six lines are hard to tell apart
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
    name_ends(axes[1])
    return fig


def chat_lines(table):
    """Turn by turn of a chat: milliseconds until the answer's first token, with the cache brought back and with
    everything computed again (dashed); and the megabytes that the folder holds. ``IN_TABLES`` are not drawn."""
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
