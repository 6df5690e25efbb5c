"""``python -m vqkv.study.report``: the executed pages as a folder of HTML, for people without Jupyter.

Every page is one file that needs no network: figures are embedded, code is folded away. ``index.html`` lists the pages
with what they ask and found, ``calculator.html`` chooses among tables that ``recommend`` made.
"""

import re
from pathlib import Path

import nbformat
import typer
from nbconvert import HTMLExporter

from vqkv import recommend
from vqkv.study.pages import all_notebooks
from vqkv.study.tables import repository_root, write_atomically

TEMPLATES = Path(__file__).parent / "templates"
PAGE_LINK = re.compile(r"\]\(((?:\./)?[\w.-]+)\.ipynb(#[^)\s]*)?\)")
REPOSITORY_LINK = re.compile(r"\[([^]]*)\]\(\.\./[^)]*\)")
FOUND = "**What this page shows.**"
ABOUT = """# vqkv: the study's pages

Ways to store a KV cache, on one harness, under one byte meter. Every page asks one question; its tables and figures
were computed by the code folded away beside them."""
CALCULATOR = """# Which one for my model?

**Question.** Which ways of storing a cache fit a model, a context and 24 GB? Bold rows fit, and no other that fits has
no more bits and no more KL. `kl` (nats) and `facts_lost` (points) are SmolLM2-135M's.

For other models and memories: `vqkv recommend FOLDER_OR_HUB_NAME --memory-gb 80`."""
MODELS = ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-7B")
CONTEXTS, MEMORY_GB = (8192, 32768, 131072), 24
CHOOSE = """<script>
const menus = [...document.querySelectorAll("select")], tables = document.querySelectorAll("table.recommended");
const show = () => tables.forEach(each => { each.hidden = each.id !== menus.map(menu => menu.value).join(" "); });
menus.forEach(menu => menu.addEventListener("change", show));
show();
</script>"""


def report(out: Path = Path("report"), notebooks: Path | None = None) -> list[Path]:
    """Render every notebook of a folder (by default the repository's) into the folder ``out``; returns the files."""
    pages = {path.stem: _page(path) for path in all_notebooks(notebooks or repository_root() / "notebooks")}
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
    """Read an executed notebook; its links to others lead to their pages, those to the repository's files to none."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = REPOSITORY_LINK.sub(r"\1", PAGE_LINK.sub(r"](\1.html\2)", cell.source))
    notebook.metadata["title"] = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    return notebook


def _calculator() -> nbformat.NotebookNode:
    """Make a page whose two menus, a model and a context, choose among tables of ``recommend``."""
    menus = " ".join(
        f"<select>{''.join(f'<option>{each}</option>' for each in one)}</select>" for one in (MODELS, CONTEXTS)
    )
    tables = "".join(_recommended(model, context) for model in MODELS for context in CONTEXTS)
    shown = nbformat.v4.new_output("display_data", {"text/html": f"<p>{menus}</p>{tables}{CHOOSE}"})
    cells = [nbformat.v4.new_markdown_cell(CALCULATOR), nbformat.v4.new_code_cell("", outputs=[shown])]
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": "Which one for my model?"})


def _recommended(model: str, context: int) -> str:
    """Write a table of ``recommend``, its recommended rows bold."""
    ways = recommend(model, context=context, memory_gb=MEMORY_GB).drop(columns="preset")
    good = ways.pop("recommended")
    ways["system"] = ways["system"].where(~good, "<b>" + ways["system"] + "</b>")
    how = {"escape": False, "index": False, "border": 0, "na_rep": "", "float_format": "{:.4g}".format}
    return ways.to_html(table_id=f"{model} {context}", classes="recommended", **how)


def _index(pages: dict[str, nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """Make a page of links: every page's title and, below it, its question and the paragraph of what it shows."""
    cells = [nbformat.v4.new_markdown_cell(ABOUT)]
    for name, page in pages.items():
        paragraphs = [part for cell in page.cells if cell.cell_type == "markdown" for part in cell.source.split("\n\n")]
        question = next((part for part in paragraphs if part.strip() and not part.startswith("#")), "")
        found = "\n\n".join(part for part in paragraphs if part.startswith(FOUND)).replace(FOUND, "**Found.**")
        text = f"## [{page.metadata['title']}]({name}.html)\n\n{question}\n\n{found}"
        cells.append(nbformat.v4.new_markdown_cell(text))
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": "vqkv: the study's pages"})


if __name__ == "__main__":
    typer.run(report)
