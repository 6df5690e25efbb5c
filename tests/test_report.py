"""The report of small notebooks: whole, self-contained, in the place of an older one only."""

import base64
import builtins
import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from typer.testing import CliRunner

from vqkv import report
from vqkv.errors import DataError, FormatError

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
        links = [
            tag[name] for tag, name in ((t, n) for n in ("href", "src") for t in parsed(file).find_all(**{n: True}))
        ]
        for link in links:
            if link.startswith(("data:", "https://cdnjs")):
                continue
            target, _, fragment = link.partition("#")
            assert (file.parent / target).is_file() and (not fragment or fragment in ids[target or file.name]), link
    following = [[a["href"] for a in parsed(file).nav.find_all("a")] for file in files[1:]]
    assert following == [
        ["index.html", "02_second.html"],
        ["01_first.html", "index.html", "03_third.html"],
        ["02_second.html", "index.html"],
    ]
    second = files[2].read_text()
    assert 'href="01_first.html#cell-id=code-2"' in second and "a.ipynb" in second


def test_contents(pages, tmp_path):
    out = report.report(tmp_path / "out", pages)[0]
    sections = parsed(out).find_all("section")
    assert [section.h2.text for section in sections] == ["01 First: a title", "02 Second", "03 Third & last"]
    assert " ".join(sections[0].p.text.split()) == "Question. How large is it?" and sections[0].p.em.text == "large"
    assert [tag["href"] for tag in parsed(out).ol.find_all("a")] == ["01_first.html", "02_second.html", "03_third.html"]
    (thumbnail,) = sections[0].find_all("img")
    assert (out.parent / thumbnail["src"]).read_bytes() == base64.b64decode(PNG)
    assert thumbnail.parent["href"] == "01_first.html#cell-id=code-2" and not sections[1].find_all("img")


def test_nothing_comes_from_a_network_but_formulas(pages, tmp_path):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:|figures/)([^\"]*)|url\(|@import")
    for file in report.report(tmp_path / "out", pages):
        found = [match.group(1) for match in loaded.finditer(file.read_text())]
        assert bool(found) == (file.stem == "03_third") and all("mathjax" in link for link in found)


def test_an_older_report_is_replaced_as_a_whole_and_nothing_else(pages, tmp_path):
    out = tmp_path / "deep/out"
    report.report(out, pages)
    (pages / "02_second.ipynb").unlink()
    report.report(out, pages)
    assert not (out / "02_second.html").exists() and list(out.parent.iterdir()) == [out]
    assert [a["href"] for a in parsed(out / "03_third.html").nav.find_all("a")] == ["01_first.html", "index.html"]
    for taken in ("file", "folder/index.html"):
        path = tmp_path / taken
        path.parent.mkdir(exist_ok=True)
        path.write_text("<html>mine</html>")
        with pytest.raises(DataError, match=rf"{taken.partition('/')[0]} .*name (a|another) folder"):
            report.report(tmp_path / taken.partition("/")[0], pages)
        assert path.read_text() == "<html>mine</html>"
    (tmp_path / "empty").mkdir()
    assert report.report(tmp_path / "empty", pages)[0].is_file()


@pytest.mark.parametrize("fails", ["a page", "the move"])
def test_a_failure_leaves_the_older_report(pages, tmp_path, monkeypatch, fails):
    out = tmp_path / "out"
    before = report.report(out, pages)[1].read_bytes()
    if fails == "a page":
        write(pages, "04_fourth", "# 04", cell("x", count=None))
    else:
        replace = report.os.replace
        monkeypatch.setattr(
            report.os, "replace", lambda a, b: replace(a, b) if a.name != "fresh" else replace(a / "x", b)
        )
    with pytest.raises((DataError, OSError)):
        report.report(out, pages)
    assert (out / "01_first.html").read_bytes() == before and sorted(out.parent.iterdir()) == [pages, out]


def test_what_cannot_be_rendered_is_named_with_a_remedy(pages, tmp_path, monkeypatch):
    write(pages, "04_fourth", "# 04", cell("1"), cell("2", count=None))
    with pytest.raises(DataError, match=r"04_fourth.ipynb: cell 3 has not been run.*vqkv.study --only 04_fourth"):
        report.report(tmp_path / "out", pages)
    for text in ("{", '{"cells": 3}', "\xff"):
        (pages / "04_fourth.ipynb").write_bytes(text.encode("latin-1"))
        with pytest.raises(FormatError, match="04_fourth.ipynb is not a notebook"):
            report.report(tmp_path / "out", pages)
    with pytest.raises(DataError, match="no notebooks"):
        report.report(tmp_path / "out", tmp_path)
    load = builtins.__import__

    def without(name, *args):
        if name == "nbconvert":
            raise ImportError(name)
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs nbconvert: pip install 'vqkv\[study\]'"):
        report.report(tmp_path / "out", pages)
    assert not (tmp_path / "out").exists()


def test_command_line(pages, tmp_path):
    run = CliRunner().invoke(report.app, ["--out", str(tmp_path / "out"), "--notebooks", str(pages)])
    assert run.exit_code == 0 and "3 pages" in run.output and (tmp_path / "out/index.html").is_file()
    run = CliRunner().invoke(report.app, ["--out", str(pages), "--notebooks", str(pages)])
    assert run.exit_code == 2 and "error:" in run.output and "something other than a report" in run.output


@pytest.mark.parametrize(
    ("text", "formula"),
    [("$x$", True), ("$$x$$", True), ("costs $5 to $10", False), ("`$x$`", False), ("5 $ and 6 $", False), ("", False)],
)
def test_formulas_are_told_from_dollars(tmp_path, text, formula):
    write(tmp_path, "01", text)
    assert report.Page(tmp_path / "01.ipynb").has_formulas is formula
