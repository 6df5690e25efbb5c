"""The report in a browser, from files and without a network: pictures are whole, nothing is wider than a telephone, a
click sorts."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vqkv.study import report
from vqkv.study.tables import stored

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
# Put at a page's end: what is seen goes into the page, which the browser prints.
SEEN = """<script>addEventListener("load", () => {
  const images = [...document.images], heads = [...document.querySelectorAll("table.sortable th")];
  const column = i => [...document.querySelectorAll(`table.sortable td:nth-child(${i + 1})`)]
    .map(cell => cell.textContent);
  const seen = { pictures: images.map(each => each.naturalWidth), drawn: images.map(each => each.clientWidth),
    window: innerWidth, page: document.documentElement.scrollWidth,
    asked: performance.getEntriesByType("resource").map(entry => entry.name) };
  seen.sorted = heads.map((head, i) => {
    head.click(); const up = column(i); head.click(); return [head.textContent, up, column(i), head.ariaSort]; });
  console.log("all seen");
  document.body.innerHTML = "<pre id=seen></pre>";
  document.body.firstChild.textContent = JSON.stringify(seen);
})</script></body>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """{page: what a browser of 400 pixels sees in it} of an index, two pages and the claims."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "notebooks").mkdir()
    for name in ("02_codebook_learning", "12_claims_audit"):
        shutil.copy(ROOT / f"notebooks/{name}.ipynb", folder / "notebooks")
    return {file.stem: look(file, folder) for file in report.report(folder / "out", folder / "notebooks")}


def look(file: Path, folder: Path) -> dict:
    text = file.read_text()
    assert text.count("</body>") == 1
    file.write_text(text.replace("</body>", SEEN))
    profile = folder / f"profile-{file.stem}"
    command = [
        BROWSER,
        *OPTIONS,
        "--window-size=400,800",
        f"--user-data-dir={profile}",
        "--dump-dom",
        file.resolve().as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    printed = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout, re.DOTALL)
    assert printed, run.stderr
    console = re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", run.stderr)
    return json.loads(html.unescape(printed[1])) | {"console": console}


def test_pages_are_whole(seen):
    assert seen.keys() == {"index", "02_codebook_learning", "12_claims_audit", "claims"}
    for name, page in seen.items():
        (line,) = page["console"]  # ours
        assert line.startswith('"all seen"'), (name, line)
        assert not page["asked"] and all(width > 0 for width in page["pictures"]), name
    assert seen["02_codebook_learning"]["pictures"] and seen["12_claims_audit"]["pictures"]


def test_nothing_is_wider_than_a_narrow_window(seen):
    for name, page in seen.items():
        assert page["page"] <= page["window"] <= 500, name
        assert all(0 < width <= page["window"] for width in page["drawn"]), name


def test_a_click_on_a_head_sorts_and_a_second_one_turns_it_round(seen):
    claims, columns = stored("12_claims")[0], seen["claims"]["sorted"]
    turned = {head: (up, down, order) for head, up, down, order in columns}
    assert len(turned) == 13 and {order for *_, order in turned.values()} == {"descending"}
    texts = sorted(claims["verdict"])
    assert turned["verdict"][0] == texts and turned["verdict"][1] == texts[::-1]
    numbers = claims["recomputed"].dropna().map("{:.4g}".format).astype(float).sort_values()
    assert [float(text) for text in turned["recomputed"][0] if text] == list(numbers)
    assert [float(text) for text in turned["recomputed"][1] if text] == list(numbers)[::-1]
