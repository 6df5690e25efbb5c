"""The form that recommends, filled in and read in a real browser, against the library."""

import shutil
import subprocess

import nbformat
import pytest
from bs4 import BeautifulSoup

from vqkv import recommend
from vqkv.study import report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
MODEL = "meta-llama/Meta-Llama-3-8B"
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: the form's script is not run")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator")
    cells = [nbformat.v4.new_markdown_cell("# 01 A page")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "01_page.ipynb")
    report.report(folder, folder)
    return folder / "calculator.html"


@pytest.mark.parametrize(
    "given",
    [
        {"context": 32768, "batch_size": 1, "memory_gb": 24},
        {"context": 1000, "batch_size": 7, "memory_gb": 16.5},
        {"context": 131072, "batch_size": 2, "ms_per_token": 20000},
    ],
)
def test_the_form_says_what_the_library_says(page, given, tmp_path):
    names = {"context": "context", "batch_size": "batch", "memory_gb": "memory", "ms_per_token": "ms"}
    filled = {"model": MODEL, "memory": ""} | {names[name]: value for name, value in given.items()}
    address = f"{page.as_uri()}#{'&'.join(f'{name}={value}' for name, value in filled.items())}"
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--dump-dom", address]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in run.stderr, run.stderr
    rows = BeautifulSoup(run.stdout, "html.parser").select("#recommended tbody tr")
    shown = [[cell.text.replace(",", "") for cell in row("td")] for row in rows]
    table = recommend(MODEL, **given)
    assert [row[0] for row in shown] == list(table["system"].str.replace(",", ""))
    columns = {1: "bits_all_told", 2: "cache_gb", 3: "side_mb", 4: "break_even", 5: "longest", 6: "ms_per_token"}
    for place, name in columns.items():
        expected = [f"{value:g}" if value == value else "" for value in table.get(name, [float("nan")] * len(table))]
        for one, other in zip((row[place] for row in shown), expected):
            assert bool(one) == bool(other) and (not one or float(one) == pytest.approx(float(other), rel=5e-3))
    assert [bool(row.get("class")) for row in rows] == list(table["recommended"])
