"""``python -m vqkv.report``: the executed pages as a folder of HTML, for people without Jupyter.

Every page is one file that needs nothing beside it: figures are embedded, code is folded away. ``index.html`` lists the
pages with their questions and figures. Nothing is loaded from a network, but for MathJax on pages that have formulas.
"""

import base64
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import nbformat
import typer
from tqdm import tqdm

from vqkv.errors import DataError, FormatError
from vqkv.pages import all_notebooks
from vqkv.tables import repository_root

TEMPLATES = Path(__file__).parent / "templates"
MARK = '<meta name="generator" content="vqkv.report">'  # in every page; a folder without it is not overwritten
PAGE_LINK = re.compile(r"\]\(((?:\./)?[\w.-]+)\.ipynb(#[^)\s]*)?\)")
FENCE_OR_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
FORMULA = re.compile(r"\$\$.+?\$\$|(?<![\\$\w])\$(?!\s)[^$\n]*(?<![\s$\\])\$(?!\w)", re.DOTALL)


@dataclass
class Page:
    """An executed notebook, its links to others turned to their pages. Raises ``FormatError`` if it is no notebook,
    ``DataError`` if a cell has not been run."""

    path: Path
    notebook: nbformat.NotebookNode = field(init=False, repr=False)

    def __post_init__(self):
        try:
            self.notebook = nbformat.read(self.path, as_version=4)
            nbformat.validate(self.notebook)
        except Exception as error:  # whatever nbformat stumbles over
            raise FormatError(f"{self.path} is not a notebook: {str(error)[:200]}. Restore or remove it") from error
        for number, cell in enumerate(self.notebook.cells, 1):
            if cell.cell_type == "markdown":
                cell.source = PAGE_LINK.sub(r"](\1.html\2)", cell.source)
            if cell.cell_type == "code" and cell.source.strip() and not cell.execution_count:
                raise DataError(
                    f"{self.path}: cell {number} has not been run. Run the page first: "
                    f"python -m vqkv.study --only {self.name}"
                )

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def file(self) -> str:
        return f"{self.name}.html"

    @cached_property
    def title(self) -> str:
        """Its first heading, else its name."""
        return next((line.lstrip("# ") for line in self._first.splitlines() if line.startswith("#")), self.name)

    @cached_property
    def question(self) -> str:
        """Markdown: the first paragraph below the title."""
        paragraphs = (part.strip() for part in self._first.split("\n\n"))
        return next((part for part in paragraphs if part and not part.startswith("#")), "")

    @cached_property
    def figures(self) -> list[tuple[str, bytes]]:
        """(id of the cell, PNG) of each figure, in the page's order."""
        return [
            (cell.id, base64.b64decode(output.data["image/png"]))
            for cell in self.notebook.cells
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]

    @property
    def has_formulas(self) -> bool:
        texts = (cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")
        return any(FORMULA.search(FENCE_OR_CODE.sub("", text)) for text in texts)

    @property
    def _first(self) -> str:
        cells = self.notebook.cells
        return cells[0].source if cells and cells[0].cell_type == "markdown" else ""


def report(out: Path, notebooks: Path | None = None) -> list[Path]:
    """Render every notebook of a folder (None: the repository's) into the folder ``out``; returns the files.

    ``out`` appears, or takes an older report's place, when all pages are there. Raises ``DataError`` if ``out`` holds
    something else, there are no notebooks or one has not been run, ``FormatError`` for a file that is no notebook,
    ``ImportError`` without nbconvert.
    """
    out = Path(out).resolve()
    _check_place(out)
    exporter = _exporter()
    pages = [Page(path) for path in all_notebooks(Path(notebooks or repository_root() / "notebooks"))]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as scratch:
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        for number, page in enumerate(tqdm(pages, desc="report", unit="page", file=sys.stderr, disable=None)):
            _write(fresh / page.file, _render(exporter, page, pages, number))
        _write_figures(fresh / "figures", pages)
        _write(fresh / "index.html", _index(exporter, pages))
        _take_the_place_of(out, fresh, Path(scratch, "old"))
    return [out / "index.html", *(out / page.file for page in pages)]


def _check_place(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: name a folder for the report")
    index = out / "index.html"
    if out.is_dir() and any(out.iterdir()) and not (index.is_file() and MARK in index.read_text(errors="replace")):
        raise DataError(f"{out} holds something other than a report: name another folder, or empty it")


def _exporter():
    try:
        from nbconvert import HTMLExporter
    except ImportError as error:
        raise ImportError("the report needs nbconvert: pip install 'vqkv[study]'") from error
    return HTMLExporter(
        template_name="basic",
        template_file="page.html.j2",
        extra_template_paths=[str(TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )


def _render(exporter, page: Page, pages: list[Page], number: int) -> str:
    around = {"previous": pages[number - 1] if number else None, "next": (pages[number + 1 :] or [None])[0]}
    html, _ = exporter.from_notebook_node(page.notebook, resources={"mark": MARK, "page": page, **around})
    return html


def _index(exporter, pages: list[Page]) -> str:
    return exporter.environment.get_template("contents.html.j2").render(pages=pages, mark=MARK)


def _write_figures(folder: Path, pages: list[Page]) -> None:
    folder.mkdir()
    for page in pages:
        for number, (_, png) in enumerate(page.figures, 1):
            (folder / f"{page.name}-{number}.png").write_bytes(png)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _take_the_place_of(out: Path, fresh: Path, old: Path) -> None:
    """Two renames in one folder; if the second fails, what was there comes back."""
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(fresh, out)
    except OSError:
        if old.exists():
            os.replace(old, out)
        raise


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the report; an older report there is replaced.")] = Path(
        "report"
    ),
    notebooks: Annotated[Path | None, typer.Option(help="Folder of executed notebooks, as of another study.")] = None,
):
    """Render the study's pages as HTML that needs neither Jupyter nor a network."""
    try:
        files = report(out, notebooks)
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{len(files) - 1} pages: open {files[0]}")


if __name__ == "__main__":
    app()
