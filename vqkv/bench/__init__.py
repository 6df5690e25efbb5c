"""Timings and peak memory beside other people's code, each system in turn in one process.

``python -m vqkv.bench [rvq|generate|peak] [--out FILE.csv]``: residual VQ's kernels against other libraries (the
default), what a cache adds to the time of a generated token, and how much memory generation takes at its peak.
"""

from vqkv.bench import generation, peak, rvq

COMMANDS = {"rvq": rvq.main, "generate": generation.main, "peak": peak.main}


def main(arguments: list[str]) -> None:
    """Run the bench that the first argument names, residual VQ's if it is an option."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    COMMANDS[name or "rvq"](arguments[1:] if name else arguments)
