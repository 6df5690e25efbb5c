"""Figures of pages 01 to 03: what is quantized, how codebooks are learned, and residual VQ."""

import itertools
import math
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from vqkv.study.figures.style import PALETTE, basename, interval, look, mark_floor, model_of, plain_numbers, whiskers

ROLE_NAMES = {"key": "keys before RoPE", "key_post_rope": "keys after RoPE", "value": "values"}


def magnitudes_by_layer(table, published: dict[str, float]):
    """Draw each head's largest |value| by layer, ``published`` medians, and its loudest over its median channel."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for offset, (role, name) in zip((-0.2, 0, 0.2), ROLE_NAMES.items(), strict=True):
        rows, look = table[table["role"] == role], {"color": PALETTE[role], "label": name, "ms": 4.5}
        left.plot(rows["layer"] + offset, rows["max_abs"], "o", **look)
        right.plot(rows["layer"] + offset, rows["channel_ratio"], "o", **look)
    for style, (model, median) in zip(("--", ":"), published.items(), strict=True):
        left.axhline(median, color=PALETTE["published"], linestyle=style, label=f"{model}'s median head (published)")
    right.axhline(1, color=PALETTE["bound"], linewidth=1)
    left.set(xlabel="layer", ylabel="largest |value| of a head (no unit)", yscale="log")
    right.set(xlabel="layer", ylabel="loudest channel / median channel\n(mean |value|)", yscale="log")
    for ax in (left, right):
        plain_numbers(ax.yaxis)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    return fig


def learning_curves(table, groups: dict[str, list[tuple[str, dict]]], top: float | None = None):
    """Draw held-out loss after the last stage against steps, mean and range of seeds; ``top`` cuts a start far above.

    ``groups``: panel title -> [(label, {column: value}), ...], the first the same everywhere.
    """
    last = table[table["stage"] == table["stage"].max()]
    if top is not None and last[last["step"] == last["step"].max()]["loss"].max() > top:
        top = None
    fig, axes = plt.subplots(1, len(groups), figsize=(11, 3.8), sharey=True, squeeze=False)
    for number, (ax, (title, variants)) in enumerate(zip(axes[0], groups.items(), strict=True)):
        for i, (label, chosen) in enumerate(variants):
            curves = _where(last, chosen).groupby("step")["loss"].agg(["mean", "min", "max"])
            colour = f"C{i}" if number == 0 or i == 0 else f"C{i + 2}"
            ax.plot(curves.index, curves["mean"], label=label, color=colour, lw=2.5)
            ax.fill_between(curves.index, curves["min"], curves["max"], color=colour, alpha=0.25, linewidth=0)
        ax.axvline(50, color=PALETTE["published"], linestyle="--", linewidth=1)
        ax.text(52, 0.98, '"50 steps"', color=PALETTE["published"], va="top", transform=ax.get_xaxis_transform())
        ax.set(title=title, xlabel="moving-average steps", ylim=(0, top))
    for ax in axes[0]:
        ax.legend()
    axes[0, 0].set_ylabel("held-out relative MSE")
    return fig


def unused_codes(table, variants: list[tuple[str, dict]]):
    """After the last step, per stage: the share of codes that no held-out vector chose; mean over seeds and range."""
    last = table[table["step"] == table["step"].max()]
    fig, ax = plt.subplots(figsize=(7, 3.6))
    for i, (label, chosen) in enumerate(variants):
        stages = 100 * _where(last, chosen).groupby("stage")["unused"].agg(["mean", "min", "max"])
        error = whiskers(stages["mean"], stages["min"], stages["max"])
        ax.errorbar(stages.index, stages["mean"], error, fmt="o-", color=f"C{i}", label=label, capsize=3, lw=2.5, ms=7)
    ax.set(ylabel="codes that no vector chose (%)", xlabel="stage", ylim=(0, None))
    ax.legend()
    return fig


def _where(table, chosen: dict):
    """Return the rows in which every column has its chosen value."""
    return table[(table[[*chosen]] == pd.Series(chosen)).all(axis=1)]


FILLS = ("full", "none", "left")  # of the markers of the calibrations


def other_calibrations(against: pd.DataFrame, names: dict[str, str]):
    """Draw what each other calibration (marker) does to each system (row): times of KL with the paired 95% interval,
    and marginal bits more. ``against``: of ``experiments.against_own``; ``names``: short ones of systems."""
    systems, kinds = list(dict.fromkeys(against["system"])), ["train_corpus", "train_seqs", "test_corpus"]
    fig, (times, bits) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.5 * len(systems)), sharey=True, width_ratios=[2, 1])
    calibrations = against.groupby(kinds, sort=False)
    for number, (fill, (kind, rows)) in enumerate(zip(FILLS, calibrations)):
        corpus, size, read = map(str, kind)
        _calibration(times, bits, rows, systems, 0.25 * (number - 1), fill)
        style = {"fillstyle": fill, "markerfacecoloralt": "white", "color": PALETTE["published"], "ms": 8}
        times.plot([], [], "o", label=f"{size} of {basename(corpus)}, reads {basename(read)}", **style)
    for ax, nothing in ((times, 1), (bits, 0)):
        ax.axvline(nothing, color=PALETTE["bound"], linewidth=1)
    times.set(xlabel="times the KL of its own calibration")
    bits.set(xlabel="marginal bits more a value")
    times.set_yticks(range(len(systems)), [names.get(system, system) for system in systems])
    times.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _calibration(times, bits, rows: pd.DataFrame, systems: list[str], below: float, fill: str) -> None:
    row: Any
    for row in rows.itertuples():
        position, style = systems.index(row.system) + below, look(row.system)
        if pd.isna(row.ratio):
            times.text(1, position, "  raises an error", color=style["color"], va="center", fontsize=9)
            continue
        style |= {"ls": "", "fillstyle": fill, "markerfacecoloralt": "white"}
        error = whiskers(row.ratio, row.low, row.high)
        times.errorbar(row.ratio, position, xerr=error, capsize=3, elinewidth=1, **style)
        bits.plot(row.more_bits, position, **style)


GROUPING_COLOURS = {
    "key (contiguous)": "contiguous",
    "key (strided)": "strided",
    "key (random)": "random",
    "value": "value",
    "key (strided) + value": "key+value",
}
PANELS = {"kl_mean": "KL (nats)", "facts_lost": "facts lost (points)", "stored_mse": "relative MSE of what is stored"}


def grouping_bars(table):
    """Draw a bar per row of Table 1 for KL and facts lost, with 95% intervals, and for the stored role's error."""
    rows = table.set_index("quantised").loc[[name for name in GROUPING_COLOURS if name in set(table["quantised"])]]
    rows["stored_mse"] = rows["key_mse"].where(rows.index != "value", rows["value_mse"])
    rows.loc[rows.index.str.contains("+", regex=False), "stored_mse"] = float("nan")
    shown = {column: label for column, label in PANELS.items() if column in rows}
    fig, axes = plt.subplots(1, len(shown), figsize=(11, 2.8), sharey=True)
    colours = [PALETTE[GROUPING_COLOURS[name]] for name in rows.index]
    for ax, (column, label) in zip(axes, shown.items(), strict=True):
        error = interval(rows, column)
        ax.barh(rows.index, rows[column], 0.7, xerr=error, color=colours, error_kw={"capsize": 3})
        ax.set_xlabel(label)
    axes[0].invert_yaxis()
    return fig


def group_size_lines(table, num_quantizers: int):
    """Draw KL of shared codebooks against channels of a group: for ``num_quantizers`` codebooks, and at equal bits."""
    fig, ax = plt.subplots(figsize=(7, 4.1))
    rows = table[table["codebooks"] == "shared"].sort_values("group_size")
    bits = rows["bits_per_value"].mode()[0]
    usual = rows[rows["num_quantizers"] == num_quantizers]
    for colour, mine, label in (
        ("contiguous", usual, f"{num_quantizers} stages (numbers: marginal bits)"),
        ("bound", rows[rows["bits_per_value"] == bits], f"{bits:g} marginal bits (stages in proportion)"),
    ):
        look: dict[str, Any] = {"fmt": "o-", "color": PALETTE[colour], "label": label, "capsize": 3}
        ax.errorbar(mine["group_size"], mine["kl_mean"], interval(mine), **look)
    for (size, rate), kl in usual.groupby(["group_size", "bits_per_value"])["kl_mean"].max().items():
        ax.annotate(f"{rate:g}", (size, kl), (8, -11), textcoords="offset points", fontsize=9)
    ax.set(title=model_of(rows), xlabel="channels of a group", ylabel="KL (nats)", xscale="log", yscale="log")
    ax.set_xticks(sorted(set(rows["group_size"])), sorted(set(rows["group_size"])))
    ax.xaxis.minorticks_off()
    plain_numbers(ax.yaxis)
    ax.margins(y=0.12)
    mark_floor(ax, rows)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


SIZE_COLOURS = ("#bd1f01", "#ffa90e", "#3f90da")  # of codebooks, the largest first


def distance_to_bound(table):
    """Draw decibels above a Gaussian's rate-distortion bound against bits, mean over seeds; beams by line style."""
    fig, ax = plt.subplots(figsize=(7.5, 4))
    colours = _size_colours(table)
    for (size, beam), rows in table.groupby(["codebook_size", "beam"]):
        curve = rows.groupby("bits_per_value")["mse"].mean()
        gap = [10 * math.log10(mse * 4**bits) for bits, mse in curve.items()]
        style = "o-" if beam > 1 else "o:"
        ax.plot(curve.index, gap, style, color=colours[size], label=f"{size} codes, beam {beam}")
    ax.axhline(0, color=PALETTE["bound"], linewidth=1)
    ax.text(0.02, 0.05, "Shannon's bound", transform=ax.get_yaxis_transform(), va="bottom", fontsize=9)
    ax.set(xlabel="marginal bits a value", ylabel="error above the bound (dB)", ylim=(0, None))
    ax.legend(ncols=2)
    return fig


def depth_curves(table, metrics: dict[str, str]):
    """Draw each metric (column -> axis label) that the table has against marginal bits, a line per codebook size."""
    metrics = {column: label for column, label in metrics.items() if column in table}
    fig, axes = plt.subplots(1, len(metrics), figsize=(11, 3.9), squeeze=False)
    colours = _size_colours(table)
    for ax, (column, axis_label) in zip(axes[0], metrics.items(), strict=True):
        for size, rows in table.groupby("codebook_size"):
            rows = rows.sort_values("bits_per_value")
            look = {"fmt": "o-", "color": colours[size], "label": f"{size:,} codes", "capsize": 2}
            ax.errorbar(rows["bits_per_value"], rows[column], interval(rows, column), **look)
        ax.set(xlabel="marginal bits a value", ylabel=axis_label, yscale="linear" if "lost" in column else "log")
    axes[0, -1].legend(fontsize=9)
    return fig


def _size_colours(table) -> dict[int, str]:
    return dict(zip(sorted(set(table["codebook_size"]), reverse=True), itertools.cycle(SIZE_COLOURS)))
