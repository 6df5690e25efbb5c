"""The committed pages are clean and short, and run on any model and text to their end: every profile's entries are
parameters. ``notebooks/conftest.py`` compares what they show. Their report in HTML is complete and self-contained."""

import ast
import base64
import re
import statistics
from pathlib import Path

import nbformat
import numpy as np
import pytest
import small_models
import torch
from bs4 import BeautifulSoup

from vqkv.data.corpus import HUB_CORPORA, SPLITS, of_split
from vqkv.models.load import KNOWN_CONFIGS
from vqkv.study import report
from vqkv.study.driver import Study
from vqkv.study.experiments import own_preset
from vqkv.study.experiments.own import imported
from vqkv.study.pages import HOLDS, is_tagged, load_profile, notebook_parameters, strip, written
from vqkv.study.subject import Subject
from vqkv.study.tables import repository_root

PAGES = sorted(repository_root().glob("notebooks/*.ipynb"))
MODELS = ("gpt2", "tinyllama-1.1b", "llama3.2-3b", "llama3-8b", "mistral-7b", "gemma-7b", "qwen2.5-7b")
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]  # Dettmers et al. 2023, appendix E
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
QUANTIZER_LINES = 40  # imports and preset included, as page 15 says
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n a figure").decode()
FIRST = "# 01 First: a title\n\n**Question.** How *large*\nis it?\n\n**Published claim.** 5.5 at $5 or $6 each."
SECOND = "# 02 Second & last\n\nWhy? See [page 01](01_first.ipynb#cell-id=code).\n\nSee [a file](../README.md)."
page = pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def defining(path: Path) -> list[nbformat.NotebookNode]:
    """The cell of page 15 that defines a quantizer of a reader's own."""
    return [cell for cell in code(path) if "defines-quantizer" in cell.metadata.get("tags", [])]


@page
def test_executed_from_top_to_bottom_without_a_trace_of_how(path):
    assert path.read_bytes() == written(strip(read(path))), "run `python -m vqkv.study`, commit what it writes"
    cells = code(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@page
def test_one_cell_of_literal_parameters(path):
    cells = [cell for cell in code(path) if "parameters" in cell.metadata.get("tags", [])]
    assert len(cells) == 1
    # papermill reads the cell line by line: what it finds must be what Python finds
    parameters = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cells[0].source).body}
    assert notebook_parameters(path) == parameters
    assert is_tagged(path, "reads-tables") == path.name.startswith(("00", "12", "15"))
    assert is_tagged(path, "takes-times") == path.name.startswith(("08", "09", "13"))


@page
def test_logic_lives_in_the_library(path):
    """But for the one cell of page 15 that shows how short a quantizer of one's own is."""
    cells, quantizers = code(path), defining(path)
    assert len(quantizers) == path.name.startswith("15")
    assert all(len(cell.source.splitlines()) <= QUANTIZER_LINES for cell in quantizers)
    trees = [ast.parse(cell.source) for cell in cells if cell not in quantizers]
    logic = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While)
    assert not [type(node).__name__ for tree in trees for node in ast.walk(tree) if isinstance(node, logic)]
    assert len(cells) <= 12 and statistics.median(len(cell.source.splitlines()) for cell in cells) < 6


@pytest.mark.parametrize("name", [*MODELS, "smoke", "quick"])
def test_every_entry_is_a_parameter_of_the_right_type(name):
    study, settings = Study(profile=name), load_profile(name)
    pages = {path.stem: notebook_parameters(path) for path in PAGES}
    parameters = pages | {"*": {parameter for page in pages.values() for parameter in page}}
    assert all(set(entries) <= set(parameters[page]) for page, entries in settings.items())
    for path, injected in study.injected.items() if name in MODELS else ():
        corpus, timed = injected.get("corpus", "pg19"), path.stem[:2] in ("08", "09")
        assert {of_split(corpus, split) for split in SPLITS} <= set(HUB_CORPORA)
        assert injected.get("second_model", "") == ""
        if "device" in pages[path.stem]:
            assert injected["device"] in (("cuda",) if timed else ("cuda", "auto"))
        assert injected.get("model", settings["*"]["model"]) in KNOWN_CONFIGS, path.stem


def test_a_page_runs_on_any_model_and_says_which_claims_hold(tmp_path):
    """Most layers of this Gemma attend to the last 10 tokens only."""
    text = "".join(f"Line {i} is about {i * i} and {i % 7} of them.\n" for i in range(3000))
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    model = str(small_models.make("gemma3", tmp_path / "mine", small_models.SLIDING["gemma3"]()))
    parameters = {"model": model, "corpus": str(tmp_path / "mine.txt"), "num_seqs": 1, "seq_len": 64}
    study = Study(only=["01"], profile="smoke", parameters=parameters, out=tmp_path / "out")
    (page,) = study.notebooks
    assert study.run() == {} and study.refused == {page.stem: []}
    verdicts = [*study.claims[page.stem].values()]
    assert len(verdicts) == sum('"assert ' in line for line in page.read_text().splitlines())
    assert all(verdict.startswith((HOLDS, "does not hold", "cannot be asked")) for verdict in verdicts)
    assert any(verdict.startswith("does not hold here") for verdict in verdicts)
    assert (tmp_path / "out" / "figures").is_dir() and not (tmp_path / "out" / "failed").exists()


def test_hard_values_come_back_and_the_levels_are_those_of_the_paper(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path))
    cell = imported(defining(PAGES[15])[0].source)
    np.testing.assert_allclose(cell.NormalFloat(4).levels.float(), NF4, atol=5e-4)
    x = torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(0))
    x[0, :, 3:6] *= torch.tensor([0, 1e4, 1e-6])[:, None]
    codec = cell.nf(4).key_codec(64).fit(x)
    payload = codec.encode(x)
    error = codec.decode(payload) - x
    assert error.isfinite().all() and error.square().sum() < 0.02 * x.square().sum()
    assert 8 * payload.nbytes == x.numel() * 4 + 8 * 16  # codes, and a scale for each token


def test_a_quantizer_of_one_s_own_is_measured_beside_others():
    subject = Subject("vqkv/llama-mini", "python-stdlib", [1, 40], [1, 40])
    about = {"subject": subject, "models": [subject.name], "seeds": [0], "chunk_size": 18, "sink_tokens": 4}
    made = own_preset(**about, definition=defining(PAGES[15])[0].source, preset="nf", bits=[4], beside=["higgs 4"])
    own, higgs = made.to_dict("records")
    assert (own["system"], own["nominal_bits"], higgs["system"], higgs["nominal_bits"]) == ("nf", 4, "higgs 4", 0)
    assert own["bits_per_value"] == higgs["bits_per_value"] == 4.125 and own["kl_floor"] < own["kl_mean"] < 0.1


@pytest.fixture(scope="module")
def html_pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    shown = {"text/html": "<table><tr><td>0.37 &lt; 1</td></tr></table>", "text/plain": "0.37"}
    outputs = [nbformat.v4.new_output("display_data", data) for data in (shown, {"image/png": PNG})]
    first, second = map(nbformat.v4.new_markdown_cell, (FIRST, SECOND))
    code = nbformat.v4.new_code_cell("show(x < 2)", outputs=outputs, id="code")
    for name, cells in {"01_first": [first, code], "02_second": [second]}.items():
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    files = report.report(folder / "out", folder)
    assert [file.name for file in files] == ["index.html", "01_first.html", "02_second.html"]
    return {file.name: BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser") for file in files}


def test_pages_hold_what_the_notebooks_hold_with_their_code_folded_away(html_pages):
    first = html_pages["01_first.html"]
    assert first.title.text == "01 First: a title" == first.h1.text and first.find("td").text == "0.37 < 1"
    assert [figure["src"] for figure in first.find_all("img")] == [f"data:image/png;base64,{PNG}"]
    (code,) = first.find_all("details")
    assert code.find("pre").text.strip() == "show(x < 2)" and not code.has_attr("open") and not code.find("td")


def test_every_link_leads_somewhere_and_none_to_a_network(html_pages):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:)([^\"]*)|url\(|@import")
    for page in html_pages.values():
        for tag in page.find_all(href=True):
            target, _, fragment = tag["href"].partition("#")
            assert not fragment or html_pages[target].find(id=fragment) if target else True, tag
        assert not loaded.search(str(page))
    index, second = html_pages["index.html"], html_pages["02_second.html"]
    linked = {item.a.text: item.a["href"] for item in index.find_all("li")}
    assert linked == {"01 First: a title": "01_first.html", "02 Second & last": "02_second.html"}
    assert "See a file." in second.text and second.find(href="01_first.html#cell-id=code")
