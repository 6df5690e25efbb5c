"""Case functions for the tests of sweeps; they import nothing big, so that a worker process starts at once."""

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


def killed_once(x, folder):
    """Call 2 kills its worker the first time."""
    mark(folder, f"begun-{x}")
    if x == 2 and marks(folder, "begun-2") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return cube(x, folder)


def deadly(x, folder):
    """Call 1 kills every worker."""
    if x == 1:
        mark(folder, "deaths")
        os.kill(os.getpid(), signal.SIGKILL)
    return cube(x, folder)


def failing(x, folder, scale=3):
    """From 3 on it fails as long as there is a file of that name."""
    if x >= 3 and path(folder, "fail").exists():
        raise OSError(f"no {x}")
    return cube(x, folder, scale)[0], {"text": path(folder, "text").read_text()}


def misspelt(x, folder):
    """An error of the library's own, whose arguments are not its words."""
    from vqkv.errors import UnknownNameError

    raise UnknownNameError("preset", "vqlm", ["vqllm"])


def unsendable(x, folder):
    """An error that no other process can be given."""
    error = OSError(f"disk {x} of {folder}")
    error.lock = threading.Lock()
    raise error


def mark(folder, name):
    with path(folder, name).open("a") as file:
        file.write("1")


def marks(folder, name) -> int:
    found = path(folder, name)
    return len(found.read_text()) if found.exists() else 0


def path(folder, name) -> Path:
    """``folder`` may begin with ``in:``, which makes it no local folder whose contents a case depends on."""
    return Path(str(folder).removeprefix("in:"), str(name))
