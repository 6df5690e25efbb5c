"""The committed pages are clean and short. ``notebooks/conftest.py`` compares what they show."""

import ast
import statistics
from pathlib import Path

import nbformat
import pytest

from vqkv.study.pages import is_tagged, notebook_parameters, strip, written

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PAGES = sorted(FOLDER.glob("*.ipynb"))
QUANTIZER_LINES = 40  # imports and preset included, as page 15 says
page = pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@page
def test_executed_from_top_to_bottom_without_a_trace_of_how(path):
    assert path.read_bytes() == written(strip(read(path))), "run `python -m vqkv.study`, commit what it writes"
    cells = code(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@page
def test_one_cell_of_literal_parameters(path):
    cells = [cell for cell in code(read(path)) if "parameters" in cell.metadata.get("tags", [])]
    assert len(cells) == 1
    # papermill reads the cell line by line: what it finds must be what Python finds
    parameters = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cells[0].source).body}
    assert notebook_parameters(path) == parameters
    assert is_tagged(path, "reads-tables") == path.name.startswith(("00", "12", "15"))
    assert is_tagged(path, "takes-times") == path.name.startswith(("08", "09", "13"))


@page
def test_logic_lives_in_the_library(path):
    """But for the one cell of page 15 that shows how short a quantizer of one's own is."""
    cells = code(read(path))
    defining = [cell for cell in cells if "defines-quantizer" in cell.metadata.get("tags", [])]
    assert len(defining) == path.name.startswith("15")
    assert all(len(cell.source.splitlines()) <= QUANTIZER_LINES for cell in defining)
    trees = [ast.parse(cell.source) for cell in cells if cell not in defining]
    logic = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While)
    assert not [type(node).__name__ for tree in trees for node in ast.walk(tree) if isinstance(node, logic)]
    assert len(cells) <= 12 and statistics.median(len(cell.source.splitlines()) for cell in cells) < 6
