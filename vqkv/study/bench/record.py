"""Rows of a bench: what every one of them says about its making, and the CSV they end in."""

import csv
import io
import platform
from pathlib import Path

import torch

from vqkv.runtime.machine import processor
from vqkv.study.provenance import version
from vqkv.study.tables import write_atomically


def versions(*packages: str) -> str:
    """Python and those of the ``packages`` that are installed, as ``name version; ...``."""
    found = {name: version(name) for name in packages}
    return "; ".join([f"python {platform.python_version()}", *(f"{name} {v}" for name, v in found.items() if v)])


def device_name(device: torch.device | str) -> str:
    """The GPU's or the processor's."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor()


def check_writable(path: Path) -> None:
    """Raise ``OSError`` if no file can be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()


def write(rows: list[dict], path: Path) -> None:
    """Write the CSV at once: it is never there by halves."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(Path(path), text.getvalue().encode())
