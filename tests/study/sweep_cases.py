"""Experiments for the tests of sweeps, importable by other processes."""

import os
import signal
from pathlib import Path

from vqkv.errors import UnknownNameError
from vqkv.study.sweep import experiment, product


def _cases():
    return product(x=range(5))


@experiment(_cases)
def cube(x, folder, scale=3):
    """A row or two. Leaves a mark for every call."""
    with Path(folder, str(x)).open("a") as file:
        file.write("1")
    return [{"x": x, "part": part, "y": (x + part) ** 3 / scale} for part in range(1 + x % 2)]


@experiment(_cases)
def troubled(x, folder):
    """``cube``, but case 3 fails, or kills its process, as long as there is a file of that name."""
    if x == 3 and Path(folder, "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if x == 3 and Path(folder, "fail").exists():
        raise UnknownNameError("preset", "vqlm", ["vqllm"])  # its arguments are not its words
    return cube.row(x, folder)


def marks(folder, x) -> int:
    file = Path(folder, str(x))
    return len(file.read_text()) if file.exists() else 0
