"""``python -m vqkv.study.report``: the executed pages as a folder of HTML, for people without Jupyter.

Every page is one file that needs no network: figures are embedded, code is folded away. ``index.html`` lists them.
"""

import re
from pathlib import Path

import nbformat
import typer
from nbconvert import HTMLExporter

from vqkv.study.pages import all_notebooks
from vqkv.study.tables import repository_root, write_atomically

TEMPLATES = Path(__file__).parent / "templates"
PAGE_LINK = re.compile(r"\]\(((?:\./)?[\w.-]+)\.ipynb(#[^)\s]*)?\)")
REPOSITORY_LINK = re.compile(r"\[([^]]*)\]\(\.\./[^)]*\)")
EXCLUDED = dict.fromkeys(("exclude_input_prompt", "exclude_output_prompt", "exclude_anchor_links"), True)
ABOUT = """# vqkv: the study's pages

Ways to store a KV cache, on one harness, under one byte meter. Every page asks one question; its tables and figures
were computed by the code folded away beside them."""


def report(out: Path = Path("report"), notebooks: Path | None = None) -> list[Path]:
    """Render every notebook of a folder (by default the repository's) into the folder ``out``; returns the files."""
    pages = {path.stem: _page(path) for path in all_notebooks(notebooks or repository_root() / "notebooks")}
    paths = [str(TEMPLATES)]
    exporter = HTMLExporter(template_name="basic", template_file="page.html.j2", extra_template_paths=paths, **EXCLUDED)
    files = []
    links = "\n".join(f"- [{page.metadata['title']}]({name}.html)" for name, page in pages.items())
    listed = [nbformat.v4.new_markdown_cell(f"{ABOUT}\n\n{links}")]
    index = nbformat.v4.new_notebook(cells=listed, metadata={"title": "vqkv: the study's pages"})
    for name, page in ({"index": index} | pages).items():
        files.append(Path(out) / f"{name}.html")
        write_atomically(files[-1], exporter.from_notebook_node(page)[0].encode())
    return files


def _page(path: Path) -> nbformat.NotebookNode:
    """Read an executed notebook; its links to others lead to their pages, those to the repository's files to none."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = REPOSITORY_LINK.sub(r"\1", PAGE_LINK.sub(r"](\1.html\2)", cell.source))
    notebook.metadata["title"] = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    return notebook


if __name__ == "__main__":
    typer.run(report)
