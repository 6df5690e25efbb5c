"""Figures of notebook 14's calibration on other text and on little text."""

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from vqkv.study.figures.style import PALETTE, basename, by_model, look, mark_floor

LEARNS_NOTHING = 1.001  # times: a KL that varies less with the size of the calibration text


def domains(across, spread, names: dict[str, str]):
    """Bits of a value that calibration on another domain costs each system (row), a panel for each model; filled and
    hollow: the first and the second text that is read. Grey: two standard deviations of the same difference between
    calibrations on the same domain. ``across``, ``spread``: as ``experiments.across_domains`` and ``seed_spread``
    return them; ``names``: short ones of systems."""
    systems, read = (list(dict.fromkeys(across[column])) for column in ("system", "test_corpus"))
    fig, axes, panels = by_model(across, (11, 1.4 + 0.36 * len(systems)), sharex=True)
    for ax, model, mine in panels:
        ax.use_sticky_edges = False  # a bar ends inside
        luck = spread[spread["model"] == model].set_index("system")["log2_kl_fit"]
        for place, system in enumerate(systems):
            error = 2 * 2**0.5 * luck[system] / 2  # of a difference; four times the KL is a bit
            ax.barh(place, 2 * error, 0.7, -error, color=PALETTE["other"], alpha=0.5)
            rows = mine[mine["system"] == system].set_index("test_corpus")["lost_bits"]
            ax.plot(rows[read], [place] * len(read), color=look(system)["color"])
            for text, face in zip(read, (look(system)["color"], "white"), strict=False):
                ax.plot(rows[text], place, **look(system), mfc=face, mew=1.6)
        ax.axvline(0, color=PALETTE["bound"], linewidth=1)
        ax.set(title=basename(model), xlabel="cost of the other domain (bits per value)")
    axes[0, 0].set_yticks(range(len(systems)), [names.get(system, system) for system in systems])
    axes[0, 0].invert_yaxis()
    looks = ((f"reads {text}", face) for text, face in zip(read, (PALETTE["published"], "white"), strict=False))
    handles = [
        plt.Line2D([], [], ls="", marker="o", ms=8, color=PALETTE["published"], mfc=f, label=t) for t, f in looks
    ]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=PALETTE["other"], alpha=0.5, label="luck of a calibration"))
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def sizes(table, names: dict[str, str]):
    """KL (above) and stored bits (below) against calibration sequences, a column for each model; a cross on top where a
    system refused, dotted what learns nothing. ``table``: as ``experiments.calibration_text`` returns it."""
    rows = table[table["part"] == "size"]
    models, systems = (list(dict.fromkeys(rows[column])) for column in ("model", "system"))
    fig, axes = plt.subplots(2, len(models), figsize=(11, 7), sharex=True, sharey="row", squeeze=False)
    for (kl, bits), model in zip(axes.T, models, strict=True):
        for system in systems:
            mine = rows[(rows["model"] == model) & (rows["system"] == system)].sort_values("train_seqs")
            _line(kl, bits, mine, system, names.get(system, system))
        kl.set(xscale="log", yscale="log", title=basename(model))
        kl.set_ylim(rows["kl_mean"].min() / 3, rows["kl_mean"].max() * 12)
        bits.set(xlabel="calibration sequences", ylim=(0, None))
        mark_floor(kl, rows)
        counts = sorted(set(rows["train_seqs"]))
        bits.set_xticks(counts, [str(count) for count in counts])
        bits.xaxis.set_minor_locator(NullLocator())
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
    axes[1, 0].set_ylabel("stored bits per value")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return fig


def _line(kl, bits, mine, system: str, label: str) -> None:
    refused = mine[mine["refused"].fillna("") != ""]  # a stored table has NaN for ""
    flat = mine["kl_mean"].max() < LEARNS_NOTHING * mine["kl_mean"].min()
    for ax, column in ((kl, "kl_mean"), (bits, "bits_per_value")):
        error = [mine["kl_mean"] - mine["kl_low"], mine["kl_high"] - mine["kl_mean"]] if ax is kl else None
        style = look(system) | {"ls": ":" if flat else "-", "label": label, "capsize": 2, "elinewidth": 1}
        ax.errorbar(mine["train_seqs"], mine[column], error, **style)
    if len(refused):
        height = 0.95 - 0.09 * len(kl.texts)  # below what was written of others
        place = {"color": look(system)["color"], "transform": kl.get_xaxis_transform()}
        kl.plot(refused["train_seqs"], [height] * len(refused), "x", ms=8, mew=3, **place)
        kl.text(refused["train_seqs"].max(), height, f"    {label} refuses", va="center", fontsize=11, **place)
