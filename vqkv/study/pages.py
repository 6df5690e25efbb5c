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
WIDGET = "application/vnd.jupyter.widget-view+json"  # a bar of progress, as tqdm draws it in a notebook
TOLERANT = "raises-exception"  # nbclient goes on after an error in a cell with this tag
REFUSALS = ["DataError", "NameError"]  # of a table that this model cannot have, and of what would have read it
HOLDS = "holds"


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
    return {name: ast.literal_eval(parameter["default"]) for name, parameter in inspect_notebook(str(path)).items()}


def load_profile(name: str) -> dict[str, dict]:
    """Read {notebook or "*": {parameter: value}}; what a profile leaves out it has from the one that it is ``like``."""
    profiles = [path.stem for path in PROFILES.glob("*.yaml")]
    if name not in profiles:
        raise UnknownNameError("profile", name, profiles)
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
    message = f"{what} = {value!r} is {type(value).__name__}; the notebook has {default!r} ({type(default).__name__})"
    raise DataError(message)


def is_tagged(path: Path, tag: str) -> bool:
    """Say whether a page's first cell has this tag, ``takes-times`` or ``reads-tables`` (of other pages)."""
    return tag in nbformat.read(path, as_version=4).cells[0].metadata.get("tags", [])


def strip(notebook: NotebookNode) -> NotebookNode:
    """Remove what differs between equal runs: all metadata but tags, interpreter versions, bars of progress."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
    notebook.metadata = METADATA
    return notebook


def written(notebook: NotebookNode) -> bytes:
    """Make the bytes of a notebook's file."""
    return nbformat.writes(notebook).encode() + b"\n"


def claims_apart(notebook: NotebookNode) -> NotebookNode:
    """Give each claim, an ``assert`` with the lines that lead to it, a cell that may fail; one with a table may not."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or "assert " not in cell.source:
            cells.append(cell)
            continue
        lines, start, statements = cell.source.splitlines(), 0, ast.parse(cell.source).body
        for statement in statements:
            text = "\n".join(lines[start : statement.end_lineno])
            is_table = "tables.table(" in text
            if isinstance(statement, ast.Assert) or is_table or statement is statements[-1]:
                cells.append(nbformat.v4.new_code_cell(text, metadata={"tags": [] if is_table else [TOLERANT]}))
                start = statement.end_lineno
    notebook.cells = cells
    return notebook


def with_value(source: str) -> str:
    """Let a claim that fails say what it found: the left side of its comparison."""
    last = (statements := ast.parse(source).body)[-1] if source.strip() else None
    if not isinstance(last, ast.Assert) or not isinstance(last.test, ast.Compare) or last.msg:
        return source
    last.msg = last.test.left
    return ast.unparse(ast.Module(statements, []))


def judge(notebook: NotebookNode) -> dict[str, str]:
    """Return {claim: verdict} of a page whose ``claims_apart`` have run; verdicts replace what the cells printed."""
    verdicts = {}
    for cell in notebook.cells:
        if TOLERANT in cell.metadata.get("tags", []):
            verdict, last = HOLDS, ast.parse(cell.source).body[-1]
            if error := _error(cell.outputs):
                message = f" (found {error.evalue:.200})" if error.evalue else ""
                reason = f"cannot be asked here ({error.ename}: {error.evalue})"
                verdict = f"does not hold here{message}" if error.ename == "AssertionError" else reason
            claim = ast.get_source_segment(cell.source, last) if isinstance(last, ast.Assert) else None
            if claim:
                verdicts[claim] = verdict
            if claim or verdict != HOLDS:
                cell.outputs = [nbformat.v4.new_output("stream", text=f"{verdict}\n")]
    return verdicts


def refusals(notebook: NotebookNode) -> list[str]:
    """Say which tables a page elsewhere does without, and why. Raises ``DataError`` if it could make none of them."""
    making = [cell for cell in notebook.cells if cell.cell_type == "code" and "tables.table(" in cell.source]
    errors = [_error(cell.outputs) for cell in making]
    refused = [error.evalue for error in errors if error and error.ename == "DataError"]
    if making and all(errors):
        raise DataError(refused[0])
    return refused


def _error(outputs: list[NotebookNode]) -> NotebookNode | None:
    return next((output for output in outputs if output.output_type == "error"), None)
