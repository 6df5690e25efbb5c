"""Case functions for the tests of sweeps, importable by other processes."""

import os
import signal
import threading
import time
from pathlib import Path

DOOM = None  # (case, seconds): so long after that case has begun the process is killed


def cube(x, folder, scale=3):
    """A row or two. Leaves a mark for every call."""
    mark(folder, x)
    return [{"x": x, "part": part, "y": (x + part) ** 3 / scale} for part in range(1 + x % 2)], {"text": "abc"}


def slow_cube(x, folder, seconds):
    """``cube`` that takes its time, and may be the process's last."""
    mark(folder, f"begun-{x}")
    if DOOM is not None and DOOM[0] == x:
        threading.Timer(DOOM[1], os.kill, [os.getpid(), signal.SIGKILL]).start()
    time.sleep(seconds)
    return cube(x, folder)


def troubled(x, folder):
    """``cube``, but case 3 fails, or kills its process, as long as there is a file of that name."""
    if x == 3 and path(folder, "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if x == 3 and path(folder, "fail").exists():
        from vqkv.errors import UnknownNameError

        raise UnknownNameError("preset", "vqlm", ["vqllm"])  # its arguments are not its words
    rows, _ = cube(x, folder)
    return rows, {"text": path(folder, "text").read_text()}


def mark(folder, name):
    with path(folder, name).open("a") as file:
        file.write("1")


def marks(folder, name) -> int:
    found = path(folder, name)
    return len(found.read_text()) if found.exists() else 0


def path(folder, name) -> Path:
    """``folder`` may begin with ``in:``, which makes it no local folder whose contents a case depends on."""
    return Path(str(folder).removeprefix("in:"), str(name))
