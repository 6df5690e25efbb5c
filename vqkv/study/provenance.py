"""Provenance of a table: function and parameters, versions of packages, processor or GPU, commit."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from vqkv.reference.machine import processor

RECORDED_PACKAGES = ("torch", "transformers", "triton", "numpy", "pandas", "matplotlib", "vqkv")


def describe(name: str, function: Callable, parameters: dict) -> dict:
    """Everything about the run of a table's ``function`` that is known before it starts."""
    return {
        "name": name,
        "function": f"{function.__module__}.{function.__qualname__}",
        "parameters": parameters,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in RECORDED_PACKAGES},
        "device": _device(),
    } | _commit()


def version(package: str) -> str | None:
    """Of an installed package; None for another."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def versions(*packages: str) -> str:
    """Python and those of the ``packages`` that are installed, as ``name version; ...``."""
    found = {"python": platform.python_version()} | {name: version(name) for name in packages}
    return "; ".join(f"{name} {number}" for name, number in found.items() if number)


def device_name(device: torch.device | str) -> str:
    """The GPU's or the processor's."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor()


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _commit() -> dict:
    """Commit and dirty flag of the code, None where git knows none. Tables, figures and pages change while a study
    runs, so they do not count."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return {"commit": None, "dirty": None}
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", "vqkv", "pyproject.toml", "constraints.txt")
    return {"commit": commit or None, "dirty": bool(changes) if commit else None}


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.strip()
