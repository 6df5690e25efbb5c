"""``python -m vqkv.study``: the notebooks, run by papermill and nbclient, become committed pages, tables and figures.

The default profile refreshes the repository in place, each page only when it ran to its end. Any other profile or
parameter writes into a folder of its own; there each ``assert`` of a page is reported as holding or not. Every page has
its own kernel. A page that takes times runs alone; pages that read the others' tables come last.
"""

import os
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated

import nbformat
import typer
from nbclient import NotebookClient
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

from vqkv.errors import DataError, UnknownNameError
from vqkv.runtime.checks import parse_assignments
from vqkv.study import pages
from vqkv.study.shared import digest
from vqkv.study.steering import Steering
from vqkv.study.tables import repository_root, write_atomically

ELSEWHERE = (
    "**Run with other parameters than the committed page.** Tables and figures are of this run; the sentences are the "
    "committed page's. Of each claim the last cells say whether it holds here."
)
# Garbage is not looked for among what thousands of modules bring: 2 of the 6 seconds that they and a kernel's end take.
IMPORTS = "import gc; gc.disable()\nfrom vqkv.study import experiments, figures, tables\ngc.freeze(); gc.enable()\n"


@dataclass
class Study:
    """A run and its place: the notebooks of ``root``, a profile, further parameters, an output folder.

    ``root`` None means this repository; ``out`` None means ``root`` itself for the default profile without further
    parameters, else ``runs/<profile>-<hash of the parameters>``. ``workers``: processes that compute the tables' rows,
    but for timings. ``jobs``: pages at a time; give each page's kernel its share of the cores by ``OMP_NUM_THREADS``.
    ``timed``: pages that take times, too. All bad input is found here, before anything runs.
    """

    root: Path | None = None
    only: list[str] = field(default_factory=list)
    profile: str = "default"
    parameters: dict = field(default_factory=dict)
    out: Path | None = None
    recompute: bool = False
    workers: int = 0
    jobs: int = 1
    timed: bool = True

    def __post_init__(self):
        self.root = Path(self.root or repository_root()).resolve()
        selected = pages.select(self.root / "notebooks", self.only)
        self.notebooks = [path for path in selected if self.timed or not pages.is_tagged(path, "takes-times")]
        settings = pages.load_profile(self.profile)
        defaults = {path: pages.notebook_parameters(path) for path in self.notebooks}
        parameters = set().union(*map(pages.notebook_parameters, pages.all_notebooks(self.root / "notebooks")))
        for name in self.parameters:
            if name not in parameters:
                raise UnknownNameError("parameter", name, parameters)
        self.without = {  # parameter that was given: the pages that have none of this name
            name: [path.stem for path, own in defaults.items() if name not in own] for name in self.parameters
        }
        self.injected = {}  # of the profile's '*' entries, its own and further parameters those that the notebook has
        for path, own in defaults.items():
            given = settings.get("*", {}) | settings.get(path.stem, {}) | self.parameters
            self.injected[path] = {k: pages.fit(x, own[k], f"{path.stem}: {k}") for k, x in given.items() if k in own}
        self.in_place = self.out is None and not settings and not self.parameters
        label = "custom" if self.profile == "default" else self.profile
        other = self.out or self.root / "runs" / f"{label}-{digest([settings, self.parameters])}"
        self.target = self.root if self.in_place else Path(other).resolve()
        if self.target == self.root and not self.in_place:
            raise DataError(f"--out {self.out} is the repository itself: name another folder")
        self.claims: dict[str, dict[str, str]] = {}  # of a page elsewhere: verdict by claim,
        self.refused: dict[str, list[str]] = {}  # and why it goes without some of its tables

    def run(self) -> dict[str, str]:
        """Run every notebook; returns {notebook: error} of those that failed, each kept in a folder ``failed``."""
        failures: dict[str, str] = {}
        self.target.mkdir(parents=True, exist_ok=True)
        timing = [path for path in self.notebooks if pages.is_tagged(path, "takes-times")]
        reading = [path for path in self.notebooks if pages.is_tagged(path, "reads-tables")]
        others = [path for path in reversed(self.notebooks) if path not in [*timing, *reading]]  # the slowest first
        with tqdm(total=len(self.notebooks), unit="notebook") as bar:
            for jobs, paths in ((self.jobs, others), (1, timing), (self.jobs, reading)):
                with ThreadPool(jobs) as pool:  # the work is done in kernels, which die with this process
                    for name, error in pool.imap_unordered(self._run_one, paths):
                        bar.set_description(f"{name} {'failed' if error else 'done'}")
                        bar.update()
                        failures |= {name: error} if error else {}
        return dict(sorted(failures.items()))

    def _run_one(self, path: Path) -> tuple[str, str]:
        """Execute one notebook and write its page; returns its name and what went wrong: then it is kept."""
        notebook = load_notebook_node(str(path))
        if self.injected[path]:
            notebook = parameterize_notebook(notebook, self.injected[path], kernel_name="python3", language="python")
        if not self.in_place:
            notebook = pages.claims_apart(notebook)
        try:
            self._execute(notebook)
            self.refused[path.stem] = pages.refusals(notebook)
            self.claims[path.stem] = pages.judge(notebook)
        except Exception as error:  # a failing page, or a dead kernel, must not stop the others
            kept = self.target / ("runs/failed" if self.in_place else "failed") / path.name
            write_atomically(kept, pages.written(notebook))
            return path.stem, f"{str(error).strip()}\nThe partly executed notebook is {kept}"
        if not self.in_place:
            notebook.cells.insert(0, nbformat.v4.new_markdown_cell(ELSEWHERE))
        write_atomically(self.target / "notebooks" / path.name, pages.written(pages.strip(notebook)))
        return path.stem, ""

    def _execute(self, notebook: nbformat.NotebookNode) -> None:
        """Run a notebook's cells in a new kernel, after a cell that says where tables go and who computes them."""
        steering = Steering(str(self.target), self.recompute, self.workers)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            resources={"metadata": {"path": str(self.notebooks[0].parent)}},
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],  # not that kernels speak over TCP
            allow_error_names=[] if self.in_place else pages.REFUSALS,
        )
        imports = IMPORTS if any("import experiments" in cell.source for cell in notebook.cells) else ""
        with client.setup_kernel(env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}):
            told = f"{imports}from vqkv.study import steering\nsteering.current = steering.{steering!r}"
            notebook.cells.insert(0, first := nbformat.v4.new_code_cell(told))
            client.execute_cell(first, 0, store_history=False)
            del notebook.cells[0]
            for number, cell in enumerate(notebook.cells):
                source = cell.source
                if pages.TOLERANT in cell.metadata.get("tags", []):
                    cell.source = pages.with_value(source)
                client.execute_cell(cell, number)
                cell.source = source


app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[list[str], typer.Option(help="Notebooks by the start of their names: 01, or 01,03.")] = [],  # noqa: B006
    profile: Annotated[str, typer.Option(help="A set of parameters from vqkv/study/profiles.")] = "default",
    parameter: Annotated[list[str], typer.Option("-p", metavar="NAME=VALUE", help="One parameter.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Folder for notebooks, results and figures.")] = None,
    recompute: Annotated[bool, typer.Option("--recompute/--reuse", help="Compute stored tables again.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that compute rows.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Pages at a time; with several, set OMP_NUM_THREADS.")] = 1,
    timed: Annotated[bool, typer.Option(help="Pages that take times, too.")] = True,
):
    """Run the study's notebooks: the committed pages by default, other settings into a folder of their own."""
    try:
        parameters = parse_assignments(parameter)
        study = Study(None, only, profile, parameters, out, recompute, workers, jobs, timed)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    for name, without in study.without.items():
        if without:
            typer.echo(f"no parameter {name} in {', '.join(without)}", err=True)
    failures = study.run()
    for name, reason in failures.items():
        typer.echo(f"\n{name} failed: {reason}", err=True)
    for name, reasons in sorted(study.refused.items()):
        for reason in reasons:
            typer.echo(f"\n{name} goes without a table: {reason}", err=True)
    for name, verdicts in sorted(study.claims.items()):
        missed = {claim: verdict for claim, verdict in verdicts.items() if verdict != pages.HOLDS}
        for claim, verdict in missed.items():
            typer.echo(f"\n{name}: {verdict}:\n{claim}", err=True)
        if verdicts:
            typer.echo(f"\n{name}: {len(verdicts) - len(missed)} of {len(verdicts)} claims hold here", err=True)
    typer.echo(f"{len(study.notebooks) - len(failures)} of {len(study.notebooks)} notebooks done, in {study.target}")
    raise typer.Exit(1 if failures else 0)
