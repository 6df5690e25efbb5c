"""The look of figures, the colour that each system and role keeps everywhere, and ``show()``."""

import io
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import yaml
from IPython.display import Image, Markdown, display
from matplotlib.ticker import FuncFormatter

from vqkv.models.load import TITLES
from vqkv.study import steering
from vqkv.study.tables import output_root, provenance, record_figures, repository_root, write_atomically

_palette = yaml.safe_load(Path(__file__).with_name("palette.yaml").read_text(encoding="utf-8"))
PALETTE: dict[str, str] = _palette["colours"]
LOOKS: dict[str, tuple[str, str]] = _palette["looks"]  # part of a system's name -> colour and marker

STYLE = Path(__file__).with_name("study.mplstyle")

# What a file says about its making would make two equal figures differ.
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def use_style() -> None:
    """Set the study's style for every figure drawn from here on."""
    plt.style.use(["petroff10", str(STYLE)])


def show(fig, name: str, table) -> None:
    """Show a figure with links; write ``figures/NAME.svg`` and ``.png`` with the results of ``table``.

    Links lead to its file, its table and the script that made it. One that was merely loaded leaves existing
    files alone.
    """
    origin = table.attrs["vqkv"]
    root = Path(origin["root"])
    paths = [root / "figures" / f"{name}.{kind}" for kind in METADATA]
    asked = steering.current.out or origin["fresh"] or root.parent.name == "runs"
    if asked or not all(path.is_file() for path in paths):
        hashes = {path.name: write_atomically(path, render(fig, path.suffix[1:])) for path in paths}
        record_figures(root, origin["name"], hashes)
    display(fig)
    plt.close(fig)  # or the end of the cell would show it again
    record, pages = provenance(origin["name"], root), output_root() / "notebooks"
    here, code = (os.path.relpath(folder, pages) for folder in (root, repository_root()))
    script = record["function"].rpartition(".")[0].replace(".", "/") + ".py"
    seconds = record["wall_seconds"]
    cost = "in several runs" if seconds is None else f"in {seconds:,.0f} s" if seconds >= 1 else "in less than 1 s"
    links = f"[figure]({here}/figures/{name}.svg) · [table]({here}/results/{origin['name']}.csv), {record['rows']} rows"
    made_by = f"computed by [{script}]({code}/{script}) {cost} ({record['device']})"
    display(Markdown(f"<small>{links} · {made_by}</small>"))


def made(name: str) -> Image:
    """Show a page's figure, ``figures/NAME.png`` of the run at hand or, where that has none, of the repository."""
    paths = (root / "figures" / f"{name}.png" for root in (output_root(), repository_root()))
    return Image(next(path for path in paths if path.is_file()).read_bytes())


def render(fig, kind: str) -> bytes:
    """Return the figure as a file of ``kind`` ``svg`` or ``png``: equal figures give equal bytes."""
    buffer = io.BytesIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vqkv"}):
        fig.savefig(buffer, format=kind, metadata=METADATA[kind])
    return buffer.getvalue()


def look(system: str) -> dict:
    """Colour, marker and its size of a system, in the arguments of ``plot``."""
    colour, marker = next((style for part, style in LOOKS.items() if part in system), ("published", "o"))
    return {"color": PALETTE[colour], "marker": marker, "ms": 10 if marker in "*P" else 7}


def whiskers(middle, low, high) -> np.ndarray:
    """Return the lengths (2, rows) of error bars from numbers to the ends of their intervals."""
    return np.stack(np.atleast_1d(middle - low, high - middle)).clip(0)


def interval(rows, column: str = "kl_mean") -> np.ndarray | None:
    """Return the error bars of a column with ``_low`` and ``_high`` next to it, or None for a column without."""
    low, high = (column.removesuffix("_mean") + end for end in ("_low", "_high"))
    return whiskers(rows[column], rows[low], rows[high]) if low in rows else None


def plain_numbers(axis) -> None:
    """Write 1, 2, 5, 10, ... along a logarithmic axis."""
    for axis_format in (axis.set_major_formatter, axis.set_minor_formatter):
        axis_format(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "125" else ""))


def mark_floor(ax, rows) -> None:
    """Shade what lies below the KL of an fp16 cache, which is rounding; where all is far above, print its number."""
    (low, high), floor = ax.get_ylim(), rows["kl_floor"].max()
    if low > 10 * floor or ax.get_yscale() == "linear":
        look = {"transform": ax.transAxes, "ha": "right", "fontsize": 8, "color": PALETTE["published"]}
        ax.text(0.99, 0.02, f"fp16's own error: {floor:.1g}", **look)
        return
    shade = {"color": PALETTE["published"], "alpha": 0.2, "lw": 0, "zorder": 0, "label": "fp16's own error"}
    ax.axhspan(min(low, floor / 2), floor, **shade)
    ax.set_ylim(min(low, floor / 2), high)


def basename(model: str) -> str:
    """Return a model's name as its card writes it, or without its owner or folder."""
    return TITLES.get(model, model.split("/")[-1])


def model_of(table) -> str:
    """Return the name of the one model of a table."""
    (model,) = set(table["model"])
    return basename(model)


def colour_of(model: str) -> str:
    """Return the colour of a model; others than this study's have that of ``llama-mini``."""
    return PALETTE.get(model.split("/")[-1], PALETTE["llama-mini"])
