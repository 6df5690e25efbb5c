"""Where tables go and who computes their rows, as ``python -m vqkv.study`` tells the kernel of each page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Steering:
    """A process' way of making tables.

    ``out``: the folder of ``results/`` and ``figures/``, empty for the repository. ``workers``: processes; 0: this one.
    """

    out: str = ""
    recompute: bool = False
    workers: int = 0


current = Steering()  # a page that is opened by itself reads and writes the repository's tables
