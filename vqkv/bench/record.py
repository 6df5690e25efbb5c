"""Rows of a bench: what every one of them says about its making, and the CSV they end in."""

import csv
import os
import platform
from importlib import metadata
from pathlib import Path


def versions(*packages: str) -> str:
    """Python and those of the ``packages`` that are installed, as ``name version; ...``."""
    found = [f"python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "; ".join(found)


def write(rows: list[dict], path: Path) -> None:
    """Write the CSV to a temporary name and move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
