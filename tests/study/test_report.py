"""The report of small notebooks: whole, self-contained, in the place of an older one only."""

import base64
import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from typer.testing import CliRunner

from vqkv.errors import DataError
from vqkv.study import report

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n a figure").decode()
FIRST = "# 01 First: a title\n\n**Question.** How *large*\nis it?\n\n**Published claim.** 5.5 at $5 or $6 each."


def cell(source: str, *outputs, count: int | None = 1):
    return nbformat.v4.new_code_cell(source, execution_count=count, outputs=list(outputs), id=f"code-{count}")


def display(**data):
    return nbformat.v4.new_output("display_data", {key.replace("_", "/"): value for key, value in data.items()})


def write(folder, name: str, *cells):
    cells = [nbformat.v4.new_markdown_cell(entry) if isinstance(entry, str) else entry for entry in cells]
    folder.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


@pytest.fixture
def pages(tmp_path):
    folder = tmp_path / "notebooks"
    table = display(text_html="<table><tr><td>0.37 &lt; 1</td></tr></table>", text_plain="0.37")
    write(folder, "01_first", FIRST, cell("x = 1 < 2"), cell("show(x)", table, display(image_png=PNG), count=2))
    write(
        folder, "02_second", "# 02 Second\n\nWhy? See [page 01](01_first.ipynb#cell-id=code-2), `a.ipynb`.", cell("1")
    )
    write(folder, "03_third", "# 03 Third & last\n\nNo question.\n\nBound: $2^{-2b}$.", cell("", count=None))
    return folder


def parsed(path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def test_pages_hold_what_the_notebooks_hold(pages, tmp_path):
    files = report.report(tmp_path / "out", pages)
    assert [file.name for file in files] == ["index.html", "01_first.html", "02_second.html", "03_third.html"]
    first = parsed(files[1])
    assert first.title.text == "01 First: a title" and first.h1.text == "01 First: a title"
    assert first.find("td").text == "0.37 < 1" and "0.37" not in [pre.text.strip() for pre in first.find_all("pre")]
    (figure,) = first.find_all("img")
    assert figure["src"] == f"data:image/png;base64,{PNG}"
    code = first.find_all("details")
    assert [entry.find("pre").text.strip() for entry in code] == ["x = 1 < 2", "show(x)"]
    assert not any(entry.has_attr("open") or entry.find("td") for entry in code)
    assert parsed(files[3]).h1.text == "03 Third & last"


def test_every_link_leads_somewhere(pages, tmp_path):
    files = report.report(tmp_path / "out", pages)
    ids = {file.name: {tag["id"] for tag in parsed(file).find_all(id=True)} for file in files}
    for file in files:
        assert file.stem == "index" or parsed(file).nav.a["href"] == "index.html"
        for tag in parsed(file).find_all(href=True):
            target, _, fragment = tag["href"].partition("#")
            assert (file.parent / target).is_file() and (not fragment or fragment in ids[target or file.name]), tag
    second = files[2].read_text()
    assert 'href="01_first.html#cell-id=code-2"' in second and "a.ipynb" in second


def test_contents(pages, tmp_path):
    index = parsed(report.report(tmp_path / "out", pages)[0])
    links = {tag.a["href"]: tag for tag in index.find_all("h2")}
    assert list(links) == ["01_first.html", "02_second.html", "03_third.html"]
    assert [tag.text for tag in links.values()] == ["01 First: a title", "02 Second", "03 Third & last"]
    question = links["01_first.html"].find_next("p")
    assert " ".join(question.text.split()) == "Question. How large is it?" and question.em.text == "large"


def test_nothing_comes_from_a_network_but_mathjax(pages, tmp_path):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:)([^\"]*)|url\(|@import")
    for file in report.report(tmp_path / "out", pages):
        assert all("mathjax" in match.group(1) for match in loaded.finditer(file.read_text()))


def test_an_older_report_is_replaced_once_all_pages_are_rendered_and_nothing_else(pages, tmp_path):
    out = tmp_path / "deep/out"
    report.report(out, pages)
    (pages / "02_second.ipynb").unlink()
    before = {path.name: path.read_bytes() for path in report.report(out, pages)}
    assert {path.name for path in out.iterdir()} == before.keys() == {"index.html", "01_first.html", "03_third.html"}
    write(pages, "04_fourth", "# 04", cell("x", count=None))
    with pytest.raises(DataError, match=r"04_fourth.ipynb: cell 2 has not been run.*vqkv.study --only 04_fourth"):
        report.report(out, pages)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for taken in ("file", "folder/index.html"):
        path = tmp_path / taken
        path.parent.mkdir(exist_ok=True)
        path.write_text("<html>mine</html>")
        with pytest.raises(DataError, match=rf"{taken.partition('/')[0]} .*name (a|another) folder"):
            report.report(tmp_path / taken.partition("/")[0], pages)
        assert path.read_text() == "<html>mine</html>"


def test_command_line(pages, tmp_path):
    run = CliRunner().invoke(report.app, ["--out", str(tmp_path / "out"), "--notebooks", str(pages)])
    assert run.exit_code == 0 and "3 pages" in run.output and (tmp_path / "out/index.html").is_file()
    for text in ("{", '{"cells": 3}', "\xff"):
        (pages / "04_fourth.ipynb").write_bytes(text.encode("latin-1"))
        run = CliRunner().invoke(report.app, ["--out", str(tmp_path / "out"), "--notebooks", str(pages)])
        assert run.exit_code == 2 and "04_fourth.ipynb is not a notebook" in run.output
