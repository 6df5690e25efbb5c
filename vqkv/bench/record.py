"""Rows of a bench: what every one of them says about its making, and the CSV they end in."""

import csv
import io
import platform
from importlib import metadata
from pathlib import Path

import torch

from vqkv.machine import processor
from vqkv.tables import write_atomically


def versions(*packages: str) -> str:
    """Python and those of the ``packages`` that are installed, as ``name version; ...``."""
    found = [f"python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "; ".join(found)


def device_name(device: torch.device | str) -> str:
    """The GPU's or the processor's."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor()


def check_writable(path: Path) -> None:
    """Raise ``OSError`` if no file can be written there; one that is there stays as it is."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a CSV file")
    probe = path.with_name(f".{path.name}.probe")
    write_atomically(probe, b"")
    probe.unlink()


def write(rows: list[dict], path: Path) -> None:
    """Write the CSV at once: it is never there by halves."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(Path(path), text.getvalue().encode())
