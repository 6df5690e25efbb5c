"""Pages as files: which there are, their parameters and values for them, and what of an executed one is kept."""

import ast
import contextlib
from pathlib import Path

import nbformat
import yaml
from nbformat import NotebookNode
from papermill import inspect_notebook

from vqkv.errors import DataError, UnknownNameError

PROFILES = Path(__file__).parent / "profiles"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
METADATA |= {"language_info": {"name": "python"}}
CLAIM_ERRORS = ["AssertionError", "KeyError"]  # of a claim that does not hold, or is about a setting that was not tried


def all_notebooks(folder: Path) -> list[Path]:
    """List the notebooks of a folder in the order of their names. Raises ``DataError`` when there are none."""
    notebooks = sorted(path for path in Path(folder).glob("*.ipynb") if not path.name.startswith("."))
    if not notebooks:
        raise DataError(f"no notebooks in {folder}: run the study in a checkout of the repository")
    return notebooks


def select(folder: Path, only: list[str]) -> list[Path]:
    """List the notebooks whose names start with one of ``only`` (``"01"``, ``"01,03"``); all when it is empty."""
    notebooks = all_notebooks(folder)
    prefixes = [prefix.strip() for entry in only for prefix in entry.split(",") if prefix.strip()]
    for prefix in prefixes:
        if not any(path.name.startswith(prefix) for path in notebooks):
            raise UnknownNameError("notebook", prefix, [path.stem for path in notebooks])
    return [path for path in notebooks if not prefixes or path.name.startswith(tuple(prefixes))]


def notebook_parameters(path: Path) -> dict:
    """Read {parameter: default} from a notebook's ``parameters`` cell, which assigns literals."""
    return {name: ast.literal_eval(found["default"]) for name, found in inspect_notebook(str(path)).items()}


def load_profile(name: str) -> dict[str, dict]:
    """Read {notebook or "*": {parameter: value}}; what a profile leaves out it has from the one that it is ``like``."""
    known = [path.stem for path in PROFILES.glob("*.yaml")]
    if name not in known:
        raise UnknownNameError("profile", name, known)
    own = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8")) or {}
    base = load_profile(own.pop("like")) if "like" in own else {}
    return base | {page: base.get(page, {}) | parameters for page, parameters in own.items()}


def fit(value, default, what: str):
    """Return ``value`` if it has the default's type. An int is a float too, and so is 1e-3, a string in YAML."""
    if isinstance(default, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    if isinstance(default, list) and isinstance(value, list):
        return [fit(entry, default[0], f"{what}[{i}]") if default else entry for i, entry in enumerate(value)]
    if default is None or type(value) is type(default):
        return value
    raise DataError(
        f"{what} = {value!r} is {type(value).__name__}; the notebook has {default!r} ({type(default).__name__})"
    )


def is_tagged(path: Path, tag: str) -> bool:
    """Say whether a page's first cell has this tag: ``takes-times`` of a page that times something, ``reads-tables`` of
    one that reads other pages' tables."""
    return tag in nbformat.read(path, as_version=4).cells[0].metadata.get("tags", [])


def strip(notebook: NotebookNode) -> NotebookNode:
    """Remove what differs between equal runs: all metadata but tags, and interpreter versions."""
    for cell in notebook.cells:
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
    notebook.metadata = METADATA
    return notebook


def written(notebook: NotebookNode) -> bytes:
    """Make the bytes of a notebook's file."""
    return nbformat.writes(notebook).encode() + b"\n"


def broken_claims(notebook: NotebookNode) -> list[str]:
    """List the cells with an ``assert`` that failed, or that found no row to ask. Raises ``RuntimeError`` for an error
    in any other cell."""
    claims = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                if not any(line.startswith("assert ") for line in cell.source.splitlines()):
                    raise RuntimeError(f"{output.ename}: {output.evalue}, in\n{cell.source}")
                claims.append(cell.source)
    return claims
