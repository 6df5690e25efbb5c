"""The committed pages are clean and short, and come out again from the committed tables."""

import ast
import hashlib
import json
import re
import statistics
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell

from vqkv.study import figures
from vqkv.study.pages import is_tagged, notebook_parameters, strip, written

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CLIP = re.compile(rb"\bp[0-9a-f]{10}\b")  # hashes of the axes' exact places, which processors round differently
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


@page
def test_figures_come_out_again_from_the_committed_tables(path, monkeypatch):
    """Byte for byte but for names of clip paths, and nothing is computed. Outputs are compared by nbval."""
    drawn = {}
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the shell replaces, and spawn reads

    def keep(fig, name, table):
        drawn[f"{name}.svg"] = table.attrs["vqkv"], figures.render(fig, "svg")

    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(figures, "show", keep)
    with plt.rc_context(), pd.option_context("display.max_columns", 20, "display.float_format", None):
        InteractiveShell.instance().reset()
        for cell in code(read(path)):
            InteractiveShell.instance().run_cell(cell.source, silent=True).raise_error()
    plt.close("all")
    for name, (origin, svg) in drawn.items():
        record = json.loads((FOLDER.parent / "results" / f"{origin['name']}.json").read_text())
        committed = (FOLDER.parent / "figures" / name).read_bytes()
        assert not origin["fresh"] and record["figures"][name] == hashlib.sha256(committed).hexdigest(), name
        assert CLIP.sub(b"", svg) == CLIP.sub(b"", committed), name
    assert drawn
