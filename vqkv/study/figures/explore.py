"""Views of notebook 14: a conversation as HTML and in numbers, a vector through its codec, EVR by layer."""

import html
import itertools
import json
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from vqkv.study.figures.style import PALETTE, look

SHADES = (  # from so many nats on: background and ink, of one hue and falling lightness (ColorBrewer's YlOrBr)
    (0.0, "#ffffff", "#222222"),
    (0.01, "#ffefb0", "#222222"),
    (0.1, "#fec44f", "#222222"),
    (1.0, "#993404", "#ffffff"),
)
TEXT = (
    "background:#ffffff;color:#222222;text-align:left;vertical-align:top;padding:4px 10px;white-space:pre-wrap;"
    "line-height:1.35;"
)

LONGEST = 300  # characters of a user's turn
SMALLEST_KL = 1e-4  # nats; less is drawn there


def coloured_chat(table) -> str:
    """Write ``explore.conversation`` as HTML: a token's ground says its KL; an exact cache says no underlined one."""
    systems = table["system"].drop_duplicates()
    heads = "".join(f'<th style="{TEXT}">{system}</th>' for system in systems)
    columns = ("".join(_turn(rows) for _, rows in table[table["system"] == name].groupby("turn")) for name in systems)
    cells = "".join(f'<td style="{TEXT}width:50%">{column}</td>' for column in columns)
    return f'<p style="{TEXT}">{_legend()}</p><table><tr>{heads}</tr><tr>{cells}</tr></table>'


def _turn(rows) -> str:
    user, said = rows.iloc[0], json.loads(rows["text"].iloc[0])
    said = said if len(said) <= LONGEST else f"{said[: LONGEST // 2]} [...] {said[-LONGEST // 2 :]}"
    answer = ""
    for text, kl, same in rows[["text", "kl", "uncompressed"]].iloc[1:].itertuples(index=False):
        shown = _escaped(json.loads(text))
        answer += _shaded(shown if same else f"<u><b>{shown}</b></u>", kl)
    held, exact = user["resident_bytes"] / 1e6, user["uncompressed_bytes"] / 1e6
    count = f"{user['tokens']:,} tokens: <b>{held:.1f} MB</b> in memory; uncompressed in 16 bits {exact:.1f} MB"
    return f'<p style="color:#767676">{_escaped(said)}</p><p>{answer}</p><p style="font-size:85%">{count}</p>'


def _escaped(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def _shaded(shown: str, kl: float) -> str:
    _, ground, ink = [shade for shade in SHADES if shade[0] <= kl][-1]
    return f'<span title="{kl:.2g} nats" style="background:{ground};color:{ink}">{shown}</span>'


def _legend() -> str:
    ends = [*(f"{least:g}" for least, *_ in SHADES[1:]), ""]
    names = [f"below {ends[0]}", *(f"{a} to {b}" if b else f"{a} and more" for a, b in itertools.pairwise(ends))]
    shades = " ".join(_shaded(f"&nbsp;{name}&nbsp;", least) for name, (least, *_) in zip(names, SHADES, strict=True))
    return f"KL of the token (nats): {shades} &nbsp; <u><b>another token</b></u> than the uncompressed cache writes"


def conversation(table):
    """``explore.conversation`` turn by turn: KL of each token of an answer, with its mean, and megabytes in memory."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for side, (system, rows) in zip((-0.15, 0.15), table.groupby("system", sort=False)):
        colour, kl = look(system)["color"], rows[rows["role"] == "assistant"].groupby("turn")["kl"]
        for turn, values in kl:
            spread = np.linspace(-0.1, 0.1, len(values)) + turn + side
            left.plot(spread, values.clip(lower=SMALLEST_KL), "o", color=colour, ms=3, alpha=0.5)
        left.plot(kl.mean().index + side, kl.mean(), **look(system) | {"ls": "", "marker": "_", "ms": 22, "mew": 3})
        by_turn = rows.drop_duplicates("turn")
        right.plot(by_turn["turn"], by_turn["resident_bytes"] / 1e6, **look(system), label=system)
    shown = {"color": PALETTE["bound"], "ls": "--", "marker": "o", "label": "uncompressed, 16 bits"}
    right.plot(by_turn["turn"], by_turn["uncompressed_bytes"] / 1e6, **shown)
    left.set(yscale="log", ylabel="KL of each token, bar: mean (nats)", ylim=(SMALLEST_KL * 0.8, None))
    right.set(ylabel="in memory after the turn (MB)", ylim=(0, None))
    for ax in (left, right):
        ax.set(xlabel="turn of the conversation", xticks=by_turn["turn"])
    fig.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


def vector_stages(table):
    """Draw ``explore.stages``: a column a system, a row a stage; in the last, the key as it came and as it is read."""
    systems, names = list(dict.fromkeys(table["system"])), _in_order(table)
    size = 5 * len(systems), 1.5 * len(names)
    fig, axes = plt.subplots(len(names), len(systems), figsize=size, squeeze=False)
    fig.supylabel("value (no unit)", fontsize=11)
    for ax, (name, system) in zip(axes.flat, itertools.product(names, systems), strict=True):
        rows = table[(table["system"] == system) & (table["stage"] == name)]
        if rows.empty:
            ax.set_axis_off()
            continue
        style: dict[str, Any] = {"marker": "o", "ms": 3, "ls": ""} if name == "codes" else {"lw": 1.4}
        title = f"{name}: {len(rows)} codes" if name == "codes" else name
        if rows["original"].notna().any():
            ax.plot(rows["place"], rows["original"], color=PALETTE["bound"], lw=1.2, label="as it came")
            error = np.square(rows["value"] - rows["original"]).sum() / np.square(rows["original"]).sum()
            title, style = f"{name}: relative squared error {error:.2g}", style | {"label": "read back"}
        ax.plot(rows["place"], rows["value"], color=look(system)["color"], **style)
        ax.yaxis.set_major_locator(MaxNLocator(3, integer=name == "codes"))
        ax.set_title(f"{system}, {title}" if name == names[0] else title, fontsize=11, loc="left")
    for ax in axes[-1]:
        ax.set_xlabel("channel")
        ax.legend(fontsize=9, ncols=2)
    return fig


def _in_order(table) -> list[str]:
    """Return all stages, each where the system with the most has it."""
    by_system = [list(dict.fromkeys(rows["stage"])) for _, rows in table.groupby("system", sort=False)]
    longest = max(by_system, key=len)
    more = [name for names in by_system for name in names if name not in longest]
    return [*longest[:-2], *dict.fromkeys(more), *longest[-2:]]


def explained_by_layer(table):
    """Draw ``explore.explained``: EVR of keys and of values by layer, a line for each system."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for ax, role in zip(axes, ("key", "value")):
        for system, rows in table[table["role"] == role].groupby("system", sort=False):
            ax.plot(rows["layer"], rows["evr"], **look(system) | {"ms": 5}, label=system)
        ax.set(xlabel="layer", title=f"{role}s")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("explained variance ratio")
    axes[0].set_ylim(top=1.01)
    axes[0].legend()
    return fig
