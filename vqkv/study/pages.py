"""Pages as files: which there are, their parameters, and what of an executed one is kept.

They are read as JSON: nbformat takes two seconds to import, which a dry run need not spend.
"""

import ast
import contextlib
import hashlib
import json
from pathlib import Path

from vqkv.errors import DataError, UnknownNameError

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
CLAIM_ERRORS = ["AssertionError", "KeyError"]  # of a claim that does not hold, or is about a setting that was not tried


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


def notebook_parameters(path: Path) -> dict:
    """{parameter: default} of a notebook's ``parameters`` cell, which assigns literals."""
    sources = [source_of(cell) for cell in read(path)["cells"] if "parameters" in tags_of(cell)]
    assigned = (node for source in sources for node in ast.parse(source).body)
    return {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}


def is_tagged(path: Path, tag: str) -> bool:
    """Whether a page's first cell has this tag: ``takes-times`` of a page that times something, ``reads-tables`` of one
    that reads other pages' tables."""
    return any(tag in tags_of(cell) for cell in read(path)["cells"][:1])


def read(path: Path) -> dict:
    """A notebook's JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def written(notebook: dict) -> bytes:
    """The bytes that nbformat would write."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True).encode() + b"\n"


def source_of(cell: dict) -> str:
    """A cell's text, which a file holds as lines."""
    return "".join(cell["source"])


def tags_of(cell: dict) -> list[str]:
    """A cell's tags."""
    return cell["metadata"].get("tags", [])


def strip(notebook: dict, keep_injected: bool = False) -> dict:
    """Remove what differs between equal runs: times, injected parameters, interpreter versions, random cell ids."""
    unwanted = {"papermill-error-cell-tag"} if keep_injected else {"papermill-error-cell-tag", "injected-parameters"}
    cells = [cell for cell in notebook["cells"] if not unwanted.intersection(tags_of(cell))]
    seen: dict[str, int] = {}
    for cell in cells:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell["metadata"].pop(key, None)
        if not cell["metadata"].get("tags", True):
            del cell["metadata"]["tags"]
        identity = hashlib.sha256(f"{cell['cell_type']}:{source_of(cell)}".encode()).hexdigest()[:8]
        seen[identity] = seen.get(identity, 0) + 1
        cell["id"] = identity if seen[identity] == 1 else f"{identity}-{seen[identity]}"
    metadata = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def broken_claims(executed: Path) -> list[str]:
    """The cells with an ``assert`` that failed, or that found no row to ask, in a notebook that else ran to its end; []
    when anything else went wrong."""
    if not executed.is_file():
        return []
    cells = [cell for cell in read(executed)["cells"] if cell["cell_type"] == "code"]
    errors = [(cell, output) for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    finished = all(cell["execution_count"] for cell in cells)
    if finished and all(output["ename"] in CLAIM_ERRORS and _asserts(source_of(cell)) for cell, output in errors):
        return [source_of(cell) for cell, _ in errors]
    return []


def _asserts(source: str) -> bool:
    with contextlib.suppress(SyntaxError):
        return any(isinstance(node, ast.Assert) for node in ast.parse(source).body)
    return False
