"""The report in a browser, from files and without a network: pictures are whole, nothing is wider than the window."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vqkv.study import report

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
# A browser's own window is at least 500 pixels wide. What is seen in the frame goes into this page, which is printed.
FRAME = """<iframe width=WIDTH height=800 style="border: 0" src="PAGE"></iframe><script>addEventListener("load", () => {
  const { document: page, performance, innerWidth } = frames[0], images = [...page.images];
  const seen = { pictures: images.map(each => each.naturalWidth), drawn: images.map(each => each.clientWidth),
    window: innerWidth, page: page.documentElement.scrollWidth, shown: page.documentElement.clientWidth,
    asked: performance.getEntriesByType("resource").map(entry => entry.name),
    tables: [...page.querySelectorAll("table.recommended")].filter(each => !each.hidden).map(each => each.id) };
  console.log("all seen");
  document.body.innerHTML = "<pre id=seen></pre>";
  document.body.firstChild.textContent = JSON.stringify(seen);
})</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An index, two pages and the calculator."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "notebooks").mkdir()
    for name in ("02_codebook_learning", "12_claims_audit"):
        shutil.copy(ROOT / f"notebooks/{name}.ipynb", folder / "notebooks")
    return report.report(folder / "out", folder / "notebooks")


@pytest.fixture(scope="module", params=[400, 1400])
def seen(request, files, tmp_path_factory):
    """The window's width, and {page: what a browser of it sees}."""
    width = request.param
    return width, {file.stem: look(file, width, tmp_path_factory.mktemp("profile")) for file in files}


def browsed(address: str, profile: Path) -> subprocess.CompletedProcess:
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", "--allow-file-access-from-files", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def look(file: Path, width: int, profile: Path) -> dict:
    frame = file.with_name("frame.html")
    frame.write_text(FRAME.replace("PAGE", file.name).replace("WIDTH", str(width)))
    run = browsed(frame.resolve().as_uri(), profile)
    printed = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout, re.DOTALL)
    assert printed, run.stderr
    console = re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", run.stderr)
    return json.loads(html.unescape(printed[1])) | {"console": console}


def test_pages_are_whole(seen):
    _, pages = seen
    assert pages.keys() == {"index", "02_codebook_learning", "12_claims_audit", "calculator"}
    for name, page in pages.items():
        (line,) = page["console"]  # ours
        assert line.startswith('"all seen"'), (name, line)
        assert not page["asked"] and all(width > 0 for width in page["pictures"]), name
    assert pages["calculator"]["tables"] == [f"{report.MODELS[0]} {report.CONTEXTS[0]}"]
    assert pages["02_codebook_learning"]["pictures"] and pages["12_claims_audit"]["pictures"]


def test_nothing_is_wider_than_the_window(seen):
    width, pages = seen
    for name, page in pages.items():
        assert page["window"] == width and page["page"] <= page["shown"], name
        assert all(0 < drawn <= page["shown"] for drawn in page["drawn"]), name
