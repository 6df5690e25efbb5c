"""Pages as files: which there are, and what of an executed one is kept."""

import ast
import contextlib
import hashlib
from pathlib import Path

import nbformat

from vqkv.errors import DataError, UnknownNameError

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def all_notebooks(folder: Path) -> list[Path]:
    """The notebooks of a folder in the order of their names. Raises ``DataError`` when there are none."""
    notebooks = sorted(path for path in Path(folder).glob("*.ipynb") if not path.name.startswith("."))
    if not notebooks:
        raise DataError(f"no notebooks in {folder}: run the study in a checkout of the repository")
    return notebooks


def select(folder: Path, only: list[str]) -> list[Path]:
    """The notebooks whose names start with one of ``only`` (``"01"``, ``"01,03"``); all of them when it is empty."""
    notebooks = all_notebooks(folder)
    prefixes = [prefix.strip() for entry in only for prefix in entry.split(",") if prefix.strip()]
    for prefix in prefixes:
        if not any(path.name.startswith(prefix) for path in notebooks):
            raise UnknownNameError("notebook", prefix, [path.stem for path in notebooks])
    return [path for path in notebooks if not prefixes or path.name.startswith(tuple(prefixes))]


def reads_tables(path: Path) -> bool:
    """True for a page that reads other pages' tables: its first cell has the tag ``reads-tables``."""
    cells = nbformat.read(path, as_version=4).cells
    return "reads-tables" in cells[0].metadata.get("tags", []) if cells else False


def strip(notebook: nbformat.NotebookNode, keep_injected: bool = False) -> nbformat.NotebookNode:
    """Remove what differs between equal runs: times, injected parameters, interpreter versions, random cell ids."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    unwanted = {"papermill-error-cell-tag"} if keep_injected else {"papermill-error-cell-tag", "injected-parameters"}
    notebook.cells = [cell for cell in notebook.cells if not unwanted.intersection(cell.metadata.get("tags", []))]
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        identity = hashlib.sha256(f"{cell.cell_type}:{cell.source}".encode()).hexdigest()[:8]
        seen[identity] = seen.get(identity, 0) + 1
        cell["id"] = identity if seen[identity] == 1 else f"{identity}-{seen[identity]}"
    return notebook


def broken_claims(executed: Path) -> list[str]:
    """The cells whose ``assert`` failed in a notebook that else ran to its end; [] when anything else went wrong."""
    if not executed.is_file():
        return []
    cells = [cell for cell in nbformat.read(executed, as_version=4).cells if cell.cell_type == "code"]
    errors = [(cell, output) for cell in cells for output in cell.outputs if output.output_type == "error"]
    finished = all(cell.execution_count for cell in cells)
    if finished and all(output.ename == "AssertionError" and _asserts(cell.source) for cell, output in errors):
        return [cell.source for cell, _ in errors]
    return []


def _asserts(source: str) -> bool:
    with contextlib.suppress(SyntaxError):
        return any(isinstance(node, ast.Assert) for node in ast.parse(source).body)
    return False
