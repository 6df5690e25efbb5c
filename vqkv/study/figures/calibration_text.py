"""Figures of notebook 14's calibration on other text and on little text."""

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from vqkv.study.figures.style import PALETTE, mark_floor

SYSTEMS = {  # part of a system's name -> colour, marker
    "turboquant": ("turboquant", "^"),
    "kvquant": ("kvquant", "v"),
    "cachegen": ("cachegen", "<"),
    "vqllm": ("vqllm", "s"),
    "aqua": ("aqua", "h"),
    "higgs": ("higgs", "D"),
    "kvtc": ("kvtc", "p"),
    "by head": ("crossed", "*"),
    "predicted": ("crossed 2", "P"),
}
LEARNS_NOTHING = 1.001  # times: a KL that varies less with the size of the calibration text


def domains(across, names: dict[str, str]):
    """KL with calibration on the text's own domain (filled) and on the other (open), a panel for each model (column)
    and text that is read (row); on the right the ratio of the two, and the stored bits with the one and the other.
    ``across``: as ``experiments.across_domains`` returns it; ``names``: short ones of systems."""
    models, read = (list(dict.fromkeys(across[column])) for column in ("model", "test_corpus"))
    systems = list(dict.fromkeys(across["system"]))
    size = (5.5 * len(models), 0.6 + 0.32 * (len(systems) + 2) * len(read))
    fig, axes = plt.subplots(len(read), len(models), figsize=size, sharex=True, sharey=True, squeeze=False)
    for (i, text), (j, model) in ((a, b) for a in enumerate(read) for b in enumerate(models)):
        ax, mine = axes[i, j], across[(across["model"] == model) & (across["test_corpus"] == text)]
        for row in mine.itertuples():
            place, (colour, marker) = systems.index(row.system), _look(row.system)
            look = {"color": colour, "marker": marker, "ms": _size(marker)}
            ax.plot([row.kl_own, row.kl_other], [place, place], color=colour, lw=2)
            ax.plot(row.kl_other, place, mfc="white", mew=1.6, **look)
            ax.plot(row.kl_own, place, **look)
            numbers = f"{row.kl_ratio:.2f}   {row.bits_own:.2f} → {row.bits_other:.2f}"
            ax.text(1.01, place, numbers, transform=ax.get_yaxis_transform(), va="center", fontsize=10)
        ax.set(xscale="log", title=f"{model.split('/')[-1]} reads {text}")
        ax.text(1.01, 1.02, "ratio  bits per value", transform=ax.transAxes, fontsize=9)
    axes[0, 0].set_yticks(range(len(systems)), [names.get(system, system) for system in systems])
    axes[0, 0].set_ylim(len(systems) - 0.4, -0.6)
    for ax in axes[-1]:
        ax.set_xlabel("KL to the exact cache (nats)")
    looks = (("own domain", PALETTE["published"]), ("the other", "white"))
    handles = [
        Line2D([], [], ls="", marker="o", ms=7, color=PALETTE["published"], mfc=face, label=f"calibrated on {what}")
        for what, face in looks
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def sizes(table, names: dict[str, str]):
    """KL (above) and stored bits (below) against calibration sequences, a column for each model; a cross on top where a
    system refused, dotted what learns nothing. ``table``: as ``experiments.calibration_text`` returns it."""
    rows = table[table["part"] == "size"]
    models, systems = (list(dict.fromkeys(rows[column])) for column in ("model", "system"))
    fig, axes = plt.subplots(2, len(models), figsize=(5.5 * len(models), 6.6), sharex=True, sharey="row", squeeze=False)
    for (kl, bits), model in zip(axes.T, models, strict=True):
        for system in systems:
            mine = rows[(rows["model"] == model) & (rows["system"] == system)].sort_values("train_seqs")
            _line(kl, bits, mine, system, names.get(system, system))
        kl.set(xscale="log", yscale="log", title=model.split("/")[-1])
        kl.set_ylim(rows["kl_mean"].min() / 3, rows["kl_mean"].max() * 12)
        bits.set(xlabel="calibration sequences", ylim=(0, None))
        mark_floor(kl, rows)
        counts = sorted(set(rows["train_seqs"]))
        bits.set_xticks(counts, [str(count) for count in counts])
        bits.xaxis.set_minor_locator(NullLocator())
    axes[0, 0].set_ylabel("KL to the exact cache (nats)")
    axes[1, 0].set_ylabel("stored bits per value")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


def _line(kl, bits, mine, system: str, label: str) -> None:
    (colour, marker), refused = _look(system), mine[mine["refused"].fillna("") != ""]  # a stored table has NaN for ""
    flat = mine["kl_mean"].max() < LEARNS_NOTHING * mine["kl_mean"].min()
    look = {"color": colour, "ls": ":" if flat else "-", "marker": marker, "ms": _size(marker)}
    for ax, column in ((kl, "kl_mean"), (bits, "bits_per_value")):
        ax.plot(mine["train_seqs"], mine[column], label=label, **look)
    if len(refused):
        height = 0.95 - 0.09 * len(kl.texts)  # below what was written of others
        place = {"color": colour, "transform": kl.get_xaxis_transform()}
        kl.plot(refused["train_seqs"], [height] * len(refused), "x", ms=8, mew=3, **place)
        kl.text(refused["train_seqs"].max(), height, f"    {label} refuses", va="center", fontsize=10, **place)


def _look(system: str) -> tuple[str, str]:
    """Colour and marker."""
    looks = (look for name, look in SYSTEMS.items() if name in system)
    colour, marker = next(looks, ("published", "o"))
    return PALETTE[colour], marker


def _size(marker: str) -> int:
    return 8 if marker in "*P" else 5
