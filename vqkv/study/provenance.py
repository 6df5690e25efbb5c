"""Provenance of a table: function and parameters, versions of packages, processor or GPU, commit."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

RECORDED_PACKAGES = ("torch", "transformers", "triton", "numpy", "pandas", "matplotlib", "vqkv")


def describe(name: str, function: Callable, parameters: dict) -> dict:
    """Return everything about the run of a table's ``function`` that is known before it starts."""
    return {
        "name": name,
        "function": f"{function.__module__}.{function.__qualname__}",
        "parameters": parameters,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in RECORDED_PACKAGES},
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu", threads=True),
    } | _commit()


def version(package: str) -> str | None:
    """Return the version of an installed package; None for another."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*packages: str) -> str:
    """Name Python and those of the ``packages`` that are installed, as ``name version; ...``."""
    version_of = {"python": platform.python_version()} | {name: version(name) for name in packages}
    return "; ".join(f"{name} {number}" for name, number in version_of.items() if number)


def device_name(device: torch.device | str, threads: bool = False) -> str:
    """Return the GPU's name or the processor's, if asked for with torch's threads on it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    listed = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    names = re.findall(r"^model name\s*:\s*(.*\S)", listed.read_text(), re.MULTILINE) if listed.is_file() else []
    processor, count = names[0] if names else platform.processor() or platform.machine(), torch.get_num_threads()
    return processor + f", {count} thread{'s' * (count > 1)}" * threads


def _commit() -> dict:
    """Return commit and dirty flag of the code, None where git knows none; what a study writes does not count."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return {"commit": None, "dirty": None}
    asked = ["rev-parse --verify HEAD", "status --porcelain -- vqkv pyproject.toml constraints.txt"]
    commit, changes = (
        subprocess.run(["git", *words.split()], cwd=root, capture_output=True, text=True).stdout.strip()
        for words in asked
    )
    return {"commit": commit or None, "dirty": bool(changes) if commit else None}
