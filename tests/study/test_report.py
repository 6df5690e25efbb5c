"""The report of small notebooks: whole and self-contained."""

import base64
import re

import nbformat
import pytest
from bs4 import BeautifulSoup

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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "notebooks"
    table = display(text_html="<table><tr><td>0.37 &lt; 1</td></tr></table>", text_plain="0.37")
    write(folder, "01_first", FIRST, cell("x = 1 < 2"), cell("show(x)", table, display(image_png=PNG), count=2))
    write(
        folder, "02_second", "# 02 Second\n\nWhy? See [page 01](01_first.ipynb#cell-id=code-2), `a.ipynb`.", cell("1")
    )
    ends = "**What this page shows.** It is `large`.\n\n**Limits.** One page. See [a file](../README.md)."
    write(folder, "03_third", "# 03 Third & last\n\nNo question.", cell("", count=None), ends)
    return folder


@pytest.fixture(scope="module")
def files(pages):
    return report.report(pages.parent / "out", pages)


def parsed(path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def test_pages_hold_what_the_notebooks_hold(files):
    assert [file.name for file in files] == ["index.html", "01_first.html", "02_second.html", "03_third.html"]
    first = parsed(files[1])
    assert first.title.text == "01 First: a title" and first.h1.text == "01 First: a title"
    assert first.find("td").text == "0.37 < 1" and "0.37" not in [pre.text.strip() for pre in first.find_all("pre")]
    (figure,) = first.find_all("img")
    assert figure["src"] == f"data:image/png;base64,{PNG}"
    code = first.find_all("details")
    assert [entry.find("pre").text.strip() for entry in code] == ["x = 1 < 2", "show(x)"]
    assert not any(entry.has_attr("open") or entry.find("td") for entry in code)


def test_every_link_leads_somewhere_and_none_to_a_network(files):
    ids = {file.name: {tag["id"] for tag in parsed(file).find_all(id=True)} for file in files}
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:)([^\"]*)|url\(|@import")
    for file in files:
        assert file.stem == "index" or parsed(file).nav.a["href"] == "index.html"
        for tag in parsed(file).find_all(href=True):
            target, _, fragment = tag["href"].partition("#")
            assert (file.parent / target).is_file() and (not fragment or fragment in ids[target or file.name]), tag
        assert not loaded.search(file.read_text())
    titles = [tag.text for tag in parsed(files[0]).find_all("h2")]
    assert titles == ["01 First: a title", "02 Second", "03 Third & last"]
    assert "".join(parsed(files[0]).h2.find_next("p").text.split()) == "Question.Howlargeisit?"
    assert [tag.text for tag in parsed(files[0]).find_all("p")[-2:]] == ["No question.", "Found. It is large."]
    assert "See a file." in parsed(files[3]).text and not parsed(files[3]).find("details")
    second = files[2].read_text()
    assert 'href="01_first.html#cell-id=code-2"' in second and "a.ipynb" in second


def test_a_folder_without_notebooks(tmp_path):
    with pytest.raises(DataError, match="no notebooks in"):
        report.report(tmp_path, tmp_path)
