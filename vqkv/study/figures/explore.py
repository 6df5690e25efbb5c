"""Views of notebook 14: text as HTML, one vector through its codec, EVR by layer."""

import html
import itertools
import json
import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from vqkv.study.figures.style import PALETTE

SHADES = (  # from so many nats on: background and ink, of one hue and falling lightness (ColorBrewer's YlOrBr)
    (0.0, "#ffffff", "#222222"),
    (0.01, "#ffefb0", "#222222"),
    (0.1, "#fec44f", "#222222"),
    (1.0, "#993404", "#ffffff"),
)
COLUMNS = {
    "exact": "exact cache",
    "told": "compressed cache, told the exact tokens before",
    "alone": "compressed cache, by itself",
}
TEXT = (
    "background:#ffffff;color:#222222;text-align:left;vertical-align:top;padding:4px 10px;white-space:pre-wrap;"
    "line-height:1.35;"
)

MOST_ACROSS = 4  # panels


def coloured_text(table) -> str:
    """``explore.continuation`` as HTML: the prompt's end in grey, then three continuations side by side. A token's
    ground (and title) says the KL between the two caches' predictions; tokens other than the exact cache's are
    underlined."""
    heads = "".join(f'<th style="{TEXT}">{title}</th>' for title in COLUMNS.values())
    cells = "".join(f'<td style="{TEXT}font-family:monospace;">{_column(table, name)}</td>' for name in COLUMNS)
    return f'<p style="{TEXT}">{_legend()}</p><table><tr>{heads}</tr><tr>{cells}</tr></table>'


def _column(table, name: str) -> str:
    changed, kl = table[name] != table["exact"], table["kl"]
    if name == "alone":  # what follows another token is another text, which no KL is of
        changed, kl = changed & (changed.cumsum() == 1), kl * math.nan
    return "".join(map(_token, table[name], kl, table["position"] < 0, changed))


def _token(text: str, kl: float, begun: bool, changed: bool) -> str:
    shown = html.escape(json.loads(text)).replace("\n", "↵<br>")
    if begun:
        return f'<span style="color:#767676">{shown}</span>'
    shown = f"<u><b>{shown}</b></u>" if changed else shown
    return shown if math.isnan(kl) else _shaded(shown, kl)


def _shaded(shown: str, kl: float) -> str:
    _, ground, ink = [shade for shade in SHADES if shade[0] <= kl][-1]
    return f'<span title="{kl:.2g} nats" style="background:{ground};color:{ink}">{shown}</span>'


def _legend() -> str:
    ends = [*(f"{least:g}" for least, *_ in SHADES[1:]), ""]
    names = [f"below {ends[0]}", *(f"{a} to {b}" if b else f"{a} and more" for a, b in itertools.pairwise(ends))]
    shades = " ".join(_shaded(f"&nbsp;{name}&nbsp;", least) for name, (least, *_) in zip(names, SHADES, strict=True))
    other = "<u><b>another token</b></u> than with the exact cache (by itself: the first)"
    return f"KL of the next token (nats): {shades} &nbsp; {other}"


def vector_stages(table):
    """``explore.stages``: a panel per stage, its values in the order in which they are stored; the last has the key as
    it is read back on it as it came."""
    names = list(dict.fromkeys(table["stage"]))
    across = min(MOST_ACROSS, len(names))
    down = math.ceil(len(names) / across)
    fig, axes = plt.subplots(down, across, figsize=(3 * across, 2.9 * down), squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(axes.flat, names):
        rows = table[table["stage"] == name]
        if rows["original"].notna().any():
            ax.plot(rows["place"], rows["original"], color=PALETTE["bound"], lw=1.2, label="as it came")
            error = np.square(rows["value"] - rows["original"]).sum() / np.square(rows["original"]).sum()
            ax.set_xlabel(f"channel\nrelative squared error {error:.2g}")
            ax.plot(rows["place"], rows["value"], color=PALETTE["vq"], lw=1.4, label="read back")
            ax.legend(fontsize=8, loc="best")
        else:
            style = {"marker": "o", "ms": 3, "ls": ""} if name == "codes" else {"lw": 1.2}
            ax.plot(rows["place"], rows["value"], color=PALETTE["bound"], **style)
            ax.yaxis.set_major_locator(MaxNLocator(5, integer=name == "codes"))
            ax.set_xlabel(f"{len(rows)} {'codes' if name == 'codes' else 'values'}")
        ax.set_title(name, fontsize=10)
    return fig


def explained_by_layer(table):
    """``explore.explained``: EVR of keys and of values by layer."""
    fig, ax = plt.subplots(figsize=(7, 3.2))
    for role, marker in (("key", "o"), ("value", "s")):
        rows = table[table["role"] == role]
        ax.plot(rows["layer"], rows["evr"], marker=marker, color=PALETTE[role], label=f"{role}s")
    ax.axhline(0, color=PALETTE["bound"], lw=1, ls=":")
    ax.set(xlabel="layer", ylabel="explained variance ratio", xticks=sorted(set(table["layer"])))
    ax.set_ylim(top=1.02)
    ax.legend()
    return fig
