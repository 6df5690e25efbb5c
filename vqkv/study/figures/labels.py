"""Names beside what they name, and numbers that are read at a glance."""

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from scipy.optimize import isotonic_regression


def plain_numbers(axis) -> None:
    """1, 2, 5, 10, ... along a logarithmic axis."""
    for axis_format in (axis.set_major_formatter, axis.set_minor_formatter):
        axis_format(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "125" else ""))


def name_ends(ax, step: float = 0.075) -> None:
    """The name of each labelled line of ``ax``, whose limits are final, at its right end, no closer than they can be
    read."""
    ax.autoscale_view()
    labelled = {name: getattr(line, "lines", [line])[0] for line, name in zip(*ax.get_legend_handles_labels())}
    lines = {name: line for name, line in labelled.items() if isinstance(line, Line2D)}  # and no shaded area
    ends = {name: np.ma.compress_rows(np.ma.masked_invalid(line.get_xydata()))[-1] for name, line in lines.items()}
    points = sorted((*(ax.transScale + ax.transLimits).transform(end)[::-1], name) for name, end in ends.items())
    for (end, right, name), place in zip(points, spread([point[0] for point in points], step), strict=True):
        name_beside(ax, name, lines[name].get_color(), (right, end), (right + 0.04, place))


def name_beside(ax, name: str, colour, end: tuple[float, float], place: tuple[float, float]) -> None:
    """A name at ``place`` and a line from there to ``end``, both in shares of the axes."""
    line = {"arrowstyle": "-", "color": colour, "alpha": 0.5, "shrinkA": 0, "shrinkB": 4, "relpos": (0, 0.5)}
    where = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
    ax.annotate(name, end, place, arrowprops=line, color=colour, fontsize=9, va="center", **where)


def spread(places, step: float) -> np.ndarray:
    """The sorted ``places`` at least ``step`` apart, with the least squared displacement."""
    least = step * np.arange(len(places))
    return isotonic_regression(np.asarray(places) - least).x + least
