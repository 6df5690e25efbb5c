"""The report of small notebooks: complete and self-contained."""

import base64
import re

import nbformat
import pytest
from bs4 import BeautifulSoup

from vqkv.study import report

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n a figure").decode()
FIRST = "# 01 First: a title\n\n**Question.** How *large*\nis it?\n\n**Published claim.** 5.5 at $5 or $6 each."
SECOND = "# 02 Second & last\n\nWhy? See [page 01](01_first.ipynb#cell-id=code)."
ENDS = "**What this page shows.** It is `large`.\n\n**Limits.** One page. See [a file](../README.md)."


def write(folder, name: str, *cells):
    cells = [nbformat.v4.new_markdown_cell(entry) if isinstance(entry, str) else entry for entry in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    shown = {"text/html": "<table><tr><td>0.37 &lt; 1</td></tr></table>", "text/plain": "0.37"}
    outputs = [nbformat.v4.new_output("display_data", data) for data in (shown, {"image/png": PNG})]
    write(folder, "01_first", FIRST, nbformat.v4.new_code_cell("show(x < 2)", outputs=outputs, id="code"))
    write(folder, "02_second", SECOND, ENDS)
    files = report.report(folder / "out", folder)
    assert [file.name for file in files] == ["index.html", "01_first.html", "02_second.html"]
    return {file.name: BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser") for file in files}


def test_pages_hold_what_the_notebooks_hold_with_their_code_folded_away(pages):
    first = pages["01_first.html"]
    assert first.title.text == "01 First: a title" == first.h1.text and first.find("td").text == "0.37 < 1"
    assert [figure["src"] for figure in first.find_all("img")] == [f"data:image/png;base64,{PNG}"]
    (code,) = first.find_all("details")
    assert code.find("pre").text.strip() == "show(x < 2)" and not code.has_attr("open") and not code.find("td")


def test_every_link_leads_somewhere_and_none_to_a_network(pages):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:)([^\"]*)|url\(|@import")
    for page in pages.values():
        for tag in page.find_all(href=True):
            target, _, fragment = tag["href"].partition("#")
            assert not fragment or pages[target].find(id=fragment) if target else True, tag
        assert not loaded.search(str(page))
    index, second = pages["index.html"], pages["02_second.html"]
    linked = {item.a.text: item.a["href"] for item in index.find_all("li")}
    assert linked == {"01 First: a title": "01_first.html", "02 Second & last": "02_second.html"}
    assert "See a file." in second.text and second.find(href="01_first.html#cell-id=code")
