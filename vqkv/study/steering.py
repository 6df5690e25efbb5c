"""Where tables go and who computes their rows, as ``python -m vqkv.study`` tells the kernel of each page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Steering:
    """A process' way of making tables.

    ``out``: the folder that holds ``results/`` and ``figures/``, empty for the repository. ``recompute``: every table
    again. ``workers``: processes that compute rows; 0: one row after another in this process.
    """

    out: str = ""
    recompute: bool = False
    workers: int = 0


current = Steering()  # a page that is opened by itself reads and writes the repository's tables
