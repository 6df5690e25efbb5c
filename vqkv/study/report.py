"""``python -m vqkv.study.report``: the executed pages as a folder of HTML, for people without Jupyter.

Every page is one file that needs nothing beside it and no network: figures are embedded, code is folded away.
``index.html`` lists the pages with what they ask and found, ``claims.html`` all audited claims in a table to sort,
``calculator.html`` shows what ``recommend`` says of a few models.
"""

import html
import re
from pathlib import Path
from typing import Annotated

import nbformat
import pandas as pd
import typer
from nbconvert import HTMLExporter

from vqkv.evaluation.recommend import recommend
from vqkv.study.pages import all_notebooks
from vqkv.study.tables import repository_root, stored, write_atomically

TEMPLATES = Path(__file__).parent / "templates"
PAGE_LINK = re.compile(r"\]\(((?:\./)?[\w.-]+)\.ipynb(#[^)\s]*)?\)")
REPOSITORY_LINK = re.compile(r"\[([^]]*)\]\(\.\./[^)]*\)")
FOUND = "**What this page shows.**"
ABOUT = """# vqkv: the study's pages

Ways to store a KV cache, on one harness, under one byte meter. Every page asks one question; its tables and figures
were computed by the code folded away beside them."""
CLAIMS = """# All claims

**Question.** Which claims of the four sources hold? A click on a column's head sorts by it; page 12 has the rule that
makes the verdicts."""
CALCULATOR = """# Which one for my model?

**Question.** Which ways of storing a cache fit a model, a context and 24 GB? Bytes follow from the model's shape.
`kl` (nats) and `facts_lost` (points) are SmolLM2-135M's (page 11): measure yours with `vqkv.evaluate`.
For another model or memory: `vqkv recommend FOLDER_OR_HUB_NAME --memory-gb 80`.

Bold rows fit, and no other row that fits has no more bits and no more KL. `break_even`: tokens from which on the cache
of one sequence is smaller than in fp16, side information included. `longest`: tokens that fit beside the weights."""
MODELS = ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-7B")
CONTEXTS = (8192, 32768, 131072)
MEMORY_GB = 24
CHOOSE = """<script>
const menus = [...document.querySelectorAll("select")], tables = document.querySelectorAll("table.recommended");
const show = () => tables.forEach(each => { each.hidden = each.id !== menus.map(menu => menu.value).join(" "); });
menus.forEach(menu => menu.addEventListener("change", show));
show();
</script>"""


def report(out: Path, notebooks: Path | None = None) -> list[Path]:
    """Render every notebook of a folder (None: the repository's) into the folder ``out``; returns the files. Raises
    ``DataError`` if there are no notebooks."""
    pages = {path.stem: _page(path) for path in all_notebooks(Path(notebooks or repository_root() / "notebooks"))}
    if audited := stored("12_claims"):
        pages["claims"] = _claims(audited[0], list(pages))
    pages["calculator"] = _calculator()
    exporter = HTMLExporter(
        template_name="basic",
        template_file="page.html.j2",
        extra_template_paths=[str(TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    files = []
    for name, page in ({"index": _index(pages)} | pages).items():
        files.append(Path(out) / f"{name}.html")
        write_atomically(files[-1], exporter.from_notebook_node(page)[0].encode())
    return files


def _page(path: Path) -> nbformat.NotebookNode:
    """An executed notebook, its links to others pointed to their pages and those to the repository's files to words."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = REPOSITORY_LINK.sub(r"\1", PAGE_LINK.sub(r"](\1.html\2)", cell.source))
    notebook.metadata["title"] = _title(notebook) or path.stem
    return notebook


def _claims(audited: pd.DataFrame, pages: list[str]) -> nbformat.NotebookNode:
    """Every audited claim in a table that a click sorts, with a link to the page that a measured one is read from."""
    claims = audited.drop(columns=["rule", "how"])
    linked = {f"page {name[:2]}": f'<a href="{name}.html">page {name[:2]}</a>' for name in pages}
    words = claims.select_dtypes("str").columns
    claims[words] = claims[words].fillna("").map(html.escape)
    claims["where"] = claims["where"].replace(linked)
    table = claims.to_html(
        classes="sortable", index=False, escape=False, border=0, float_format="{:.4g}".format, na_rep=""
    )
    script = f"<script>{(TEMPLATES / 'sortable.js').read_text()}</script>"
    shown = nbformat.v4.new_output("display_data", {"text/html": table + script})
    cells = [nbformat.v4.new_markdown_cell(CLAIMS), nbformat.v4.new_code_cell("", outputs=[shown])]
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": "All claims"})


def _calculator() -> nbformat.NotebookNode:
    """A page whose two menus, a model and a context, choose among tables that ``recommend`` made."""
    tables = "".join(_recommended(model, context) for model in MODELS for context in CONTEXTS)
    menus = " ".join(
        f"<select>{''.join(f'<option>{choice}</option>' for choice in choices)}</select>"
        for choices in (MODELS, CONTEXTS)
    )
    shown = nbformat.v4.new_output("display_data", {"text/html": f"<p>{menus}</p>{tables}{CHOOSE}"})
    cells = [nbformat.v4.new_markdown_cell(CALCULATOR), nbformat.v4.new_code_cell("", outputs=[shown])]
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": "Which one for my model?"})


def _recommended(model: str, context: int) -> str:
    """A table of ``recommend``, its recommended rows bold."""
    ways = recommend(model, context=context, memory_gb=MEMORY_GB).drop(columns="preset")
    good = ways.pop("recommended")
    ways["system"] = ways["system"].where(~good, "<b>" + ways["system"] + "</b>")
    how = {"escape": False, "index": False, "border": 0, "na_rep": "", "float_format": "{:.4g}".format}
    return ways.to_html(table_id=f"{model} {context}", classes="recommended", **how)


def _title(notebook: nbformat.NotebookNode) -> str:
    first = notebook.cells[0].source if notebook.cells else ""
    return first.splitlines()[0].lstrip("# ") if first.startswith("#") else ""


def _index(pages: dict[str, nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """A page of links: every page's title and, below it, its question and the paragraph of what it shows."""
    cells = [nbformat.v4.new_markdown_cell(ABOUT)]
    for name, page in pages.items():
        paragraphs = [part for cell in page.cells if cell.cell_type == "markdown" for part in cell.source.split("\n\n")]
        question = next((part for part in paragraphs if part.strip() and not part.startswith("#")), "")
        found = "\n\n".join(part for part in paragraphs if part.startswith(FOUND)).replace(FOUND, "**Found.**")
        text = f"## [{page.metadata['title']}]({name}.html)\n\n{question}\n\n{found}"
        cells.append(nbformat.v4.new_markdown_cell(text))
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": "vqkv: the study's pages"})


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    notebooks: Annotated[Path | None, typer.Option(help="Folder of executed notebooks, as of another study.")] = None,
):
    """Render the study's pages as HTML that needs neither Jupyter nor a network."""
    try:
        files = report(out, notebooks)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{len(files) - 1} pages: open {files[0]}")


if __name__ == "__main__":
    app()
