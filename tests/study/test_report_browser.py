"""The report in a browser, from files and without a network: pictures are whole, nothing is wider than a telephone, a
click sorts, and the form recommends what the library does."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from vqkv import recommend
from vqkv.study import report
from vqkv.study.tables import stored

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
# A browser's own window is at least 500 pixels wide. What is seen in the frame goes into this page, which is printed.
FRAME = """<iframe width=400 height=800 style="border: 0" src="PAGE"></iframe><script>addEventListener("load", () => {
  const { document: page, performance, innerWidth } = frames[0], images = [...page.images];
  const column = i => [...page.querySelectorAll(`table.sortable td:nth-child(${i + 1})`)].map(cell => cell.textContent);
  const seen = { pictures: images.map(each => each.naturalWidth), drawn: images.map(each => each.clientWidth),
    window: innerWidth, page: page.documentElement.scrollWidth, shown: page.documentElement.clientWidth,
    asked: performance.getEntriesByType("resource").map(entry => entry.name) };
  seen.tables = [...page.querySelectorAll("table.recommended")].filter(each => !each.hidden).map(each => each.id);
  seen.sorted = [...page.querySelectorAll("table.sortable th")].map((head, i) => {
    head.click(); const up = column(i); head.click(); return [head.textContent, up, column(i), head.ariaSort]; });
  console.log("all seen");
  document.body.innerHTML = "<pre id=seen></pre>";
  document.body.firstChild.textContent = JSON.stringify(seen);
})</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An index, two pages, the claims and the calculator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MODELS", report.MODELS[:1])
        return made(tmp_path_factory)


def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "notebooks").mkdir()
    for name in ("02_codebook_learning", "12_claims_audit"):
        shutil.copy(ROOT / f"notebooks/{name}.ipynb", folder / "notebooks")
    return report.report(folder / "out", folder / "notebooks")


@pytest.fixture(scope="module")
def seen(files, tmp_path_factory):
    """{page: what a browser of 400 pixels sees in it}."""
    return {file.stem: look(file, tmp_path_factory.mktemp("profile")) for file in files}


def browsed(address: str, profile: Path) -> subprocess.CompletedProcess:
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", "--allow-file-access-from-files", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def look(file: Path, profile: Path) -> dict:
    frame = file.with_name("frame.html")
    frame.write_text(FRAME.replace("PAGE", file.name))
    run = browsed(frame.resolve().as_uri(), profile)
    printed = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout, re.DOTALL)
    assert printed, run.stderr
    console = re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", run.stderr)
    return json.loads(html.unescape(printed[1])) | {"console": console}


def test_pages_are_whole(seen):
    assert seen.keys() == {"index", "02_codebook_learning", "12_claims_audit", "claims", "calculator"}
    for name, page in seen.items():
        (line,) = page["console"]  # ours
        assert line.startswith('"all seen"'), (name, line)
        assert not page["asked"] and all(width > 0 for width in page["pictures"]), name
    assert seen["02_codebook_learning"]["pictures"] and seen["12_claims_audit"]["pictures"]


def test_nothing_is_wider_than_a_narrow_window(seen):
    for name, page in seen.items():
        assert page["window"] == 400 and page["page"] <= page["shown"], name
        assert all(0 < width <= page["shown"] for width in page["drawn"]), name


def test_a_click_on_a_head_sorts_and_a_second_one_turns_it_round(seen):
    claims, columns = stored("12_claims")[0], seen["claims"]["sorted"]
    turned = {head: (up, down, order) for head, up, down, order in columns}
    assert len(turned) == 15 and {order for *_, order in turned.values()} == {"descending"}
    texts = sorted(claims["verdict"])
    assert turned["verdict"][0] == texts and turned["verdict"][1] == texts[::-1]
    numbers = claims["recomputed"].dropna().map("{:.4g}".format).astype(float).sort_values()
    assert [float(text) for text in turned["recomputed"][0] if text] == list(numbers)
    assert [float(text) for text in turned["recomputed"][1] if text] == list(numbers)[::-1]


def test_the_calculator_shows_one_table_and_it_says_what_the_library_says(files, seen):
    assert seen["calculator"]["tables"] == [f"{report.MODELS[0]} {report.CONTEXTS[0]}"]
    page = BeautifulSoup(next(file for file in files if file.stem == "calculator").read_text(), "html.parser")
    table = recommend(report.MODELS[0], context=report.CONTEXTS[0], memory_gb=report.MEMORY_GB)
    rows = page.find("table", id=f"{report.MODELS[0]} {report.CONTEXTS[0]}").tbody("tr")
    assert [row.td.text for row in rows] == list(table["system"])
    assert [row.td.b is not None for row in rows] == list(table["recommended"])
