"""Timings and peak memory beside other people's code, each system in turn in one process.

``python -m vqkv.study.bench [--only OPERATION ...] [--out FILE.csv]``: kernels against other libraries, fp16 attention
and the machine's roofline. ``python -m vqkv.study.bench generate``: what a cache adds to the time of a generated token.
``... peak``: how much memory generation takes at its peak. ``... scaling``: how much
faster several processes calibrate.
"""

from vqkv.study.bench import generation, peak, scaling, speed

COMMANDS = {"generate": generation.main, "peak": peak.main, "scaling": scaling.main}


def main(arguments: list[str]) -> None:
    """Run the bench that the first argument names, the kernels' if it is an option."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    COMMANDS[name](arguments[1:]) if name else speed.main(arguments)
