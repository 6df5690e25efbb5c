"""nbval runs the committed pages again from stored tables, offline, writing nowhere; figures come out byte for byte.

Kernels live in pytest's own processes, after all tests there, so that each process imports everything once.
"""

import hashlib
import json
import os
import re
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import matplotlib.pyplot as plt
import nbval.kernel
import pandas as pd
from ipykernel.inprocess.manager import InProcessKernelManager

from vqkv.study import figures

ROOT = Path(__file__).resolve().parent.parent
CLIP = re.compile(rb"\bp[0-9a-f]{10}\b")  # hashes of the axes' exact places, which processors round differently


class Kernels(InProcessKernelManager):
    """What nbval asks of a kernel's manager."""

    def shutdown_kernel(self, now: bool = False):
        type(self.kernel.shell).clear_instance()  # and with it the page's names
        super().shutdown_kernel()


def start(startup_timeout: float, kernel_name: str, stderr, cwd: str):
    """Start a kernel that is no process: its manager and client."""
    os.chdir(cwd)
    figures.show = show  # not before: tests call the committed one
    plt.rcdefaults()
    pd.reset_option("^display")  # pages set some
    pd.set_option("display.max_columns", 20)  # as where there is no terminal
    manager = Kernels()
    manager.start_kernel()
    kernel = manager.kernel
    kernel.shell.events.register("pre_execute", lambda: kernel.stdout.set_parent(kernel.get_parent()))
    kernel.shell.events.register("post_execute", kernel.stdout.flush)
    client = manager.client()
    client.start_channels()
    return manager, client


def show(fig, name: str, table) -> None:
    """Compare a figure with the committed file, then show it; nbval compares no images."""
    origin, svg = table.attrs["vqkv"], figures.render(fig, "svg")
    committed = (ROOT / "figures" / f"{name}.svg").read_bytes()
    record = json.loads((ROOT / "results" / f"{origin['name']}.json").read_text())
    assert not origin["fresh"] and record["figures"][f"{name}.svg"] == hashlib.sha256(committed).hexdigest()
    assert CLIP.sub(b"", svg) == CLIP.sub(b"", committed), f"{name} comes out different"
    committed_show(fig, name, table)


committed_show = figures.show
nbval.kernel.start_new_kernel = start
