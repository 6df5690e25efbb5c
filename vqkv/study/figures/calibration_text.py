"""Figures of notebook 14's calibration on other text and on little text."""

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from vqkv.study.figures.labels import plain_numbers
from vqkv.study.figures.style import PALETTE, interval, look, mark_floor


def domains(across, names: dict[str, str]):
    """What calibration on the other corpus does to each system (row): times of KL with the paired 95% interval (left),
    stored bits more (right); filled and hollow: the first and the second corpus that is read. ``across``: as
    ``experiments.across_domains`` returns it; ``names``: short ones of systems."""
    systems, read = (list(dict.fromkeys(across[column])) for column in ("system", "test_corpus"))
    fig, (times, bits) = plt.subplots(1, 2, figsize=(11, 1.4 + 0.36 * len(systems)), sharey=True, width_ratios=[2, 1])
    for row in across.itertuples():
        second = read.index(row.test_corpus)
        place, style = systems.index(row.system) - 0.15 + 0.3 * second, look(row.system)
        style |= {"ls": "", "mfc": "white" if second else style["color"]}
        error = [[row.ratio - row.low], [row.high - row.ratio]]
        times.errorbar(row.ratio, place, xerr=error, capsize=3, elinewidth=1, **style)
        bits.plot(row.more_bits, place, **style)
    for ax, nothing in ((times, 1), (bits, 0)):
        ax.axvline(nothing, color=PALETTE["bound"], linewidth=1)
    times.set(xscale="log", xlabel="KL, calibrated on the other text over on its own")
    plain_numbers(times.xaxis)
    bits.set(xlabel="stored bits more")
    times.set_yticks(range(len(systems)), [names.get(system, system) for system in systems])
    times.invert_yaxis()
    for text, face in zip(read, (PALETTE["published"], "white"), strict=False):
        times.plot([], [], "o", ms=8, color=PALETTE["published"], mfc=face, label=f"reads {text}")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def sizes(table, names: dict[str, str]):
    """KL with its 95% interval (left) and stored bits (right) against calibration sequences; a cross on top where a
    system refused. ``table``: rows of ``experiments.calibration_text``."""
    fig, (kl, bits) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=[3, 2])
    for number, (system, mine) in enumerate(table.sort_values("train_seqs").groupby("system", sort=False)):
        style = look(system) | {"label": names.get(system, system)}
        kl.errorbar(mine["train_seqs"], mine["kl_mean"], interval(mine), capsize=2, elinewidth=1, **style)
        bits.plot(mine["train_seqs"], mine["bits_per_value"], **style)
        if len(refused := mine.loc[mine["kl_mean"].isna(), "train_seqs"]):
            high = {"color": style["color"], "transform": kl.get_xaxis_transform()}
            kl.plot(refused, [0.97 - 0.03 * number] * len(refused), "x", ms=8, mew=3, **high)
    kl.set(yscale="log", ylabel="KL to the exact cache (nats)")
    bits.set(ylabel="stored bits per value", ylim=(0, None))
    mark_floor(kl, table)
    counts = sorted(set(table["train_seqs"]))
    for ax in (kl, bits):
        ax.set(xscale="log", xlabel="calibration sequences")
        ax.set_xticks(counts, [str(count) for count in counts])
        ax.xaxis.set_minor_locator(NullLocator())
    plain_numbers(kl.yaxis)
    fig.legend(*kl.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig
