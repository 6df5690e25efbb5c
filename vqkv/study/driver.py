"""``python -m vqkv.study``: the notebooks, run through papermill, become committed pages, tables and figures.

The default profile refreshes the repository in place, page by page, each only when it ran to its end. Any other profile
or parameter leaves the repository alone and writes notebooks, tables and figures into a folder of its own; there an
``assert`` of a page that does not hold is reported as a finding: the claims were made for the committed numbers.

Every page has a kernel of its own, so several can run at a time (``jobs``) with the same outputs. Pages that measure
times run alone, after the others, or beside them (``together``), and pages that read the others' tables last.
"""

import ast
import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated

import nbformat
import papermill
import typer
from tqdm import tqdm

from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.study.page_parameters import PROFILES, fit, load_profile, parse_assignments
from vqkv.study.pages import all_notebooks, broken_claims, reads_tables, select, strip
from vqkv.study.tables import digest, repository_root, write_atomically
from vqkv.study.workers import check

TIMES = {"rounds", "repetitions"}  # parameters of pages that measure times


@dataclass
class Study:
    """A run and its place: the notebooks of ``root``, a profile, further parameters, an output folder.

    ``root`` None means this repository; ``out`` None means ``root`` itself for the default profile without further
    parameters, else ``runs/<profile>-<hash of the parameters>``. ``scheduler`` (the address of a Dask scheduler) or
    ``workers`` (processes on this machine) compute the tables' rows, but for timings. ``jobs``: pages at a time; give
    each page's kernel its share of the cores by ``OMP_NUM_THREADS``; workers then serve the pages that run alone. All
    bad input is found here, before anything runs.
    """

    root: Path | None = None
    only: list[str] = field(default_factory=list)
    profile: str = "default"
    parameters: dict = field(default_factory=dict)
    out: Path | None = None
    recompute: bool = False
    profiles: Path = PROFILES
    scheduler: str = ""
    workers: int = 0
    jobs: int = 1
    together: bool = False

    def __post_init__(self):
        self.root = Path(self.root or repository_root()).resolve()
        self.notebooks = select(self.root / "notebooks", self.only)
        settings = load_profile(
            self.profile, self.profiles, [path.stem for path in all_notebooks(self.root / "notebooks")]
        )
        assigned = self._assigned()
        self.injected = {path: parameters_for(path, settings, assigned[path]) for path in self.notebooks}
        self.in_place = self.out is None and not settings and not self.parameters
        label = "custom" if self.profile == "default" else self.profile
        other = self.out or self.root / "runs" / f"{label}-{digest([settings, self.parameters])}"
        self.broken_claims: dict[str, list[str]] = {}
        self.target = self.root if self.in_place else Path(other).resolve()
        if self.target == self.root and not self.in_place:
            raise DataError(f"--out {self.out} is the repository itself: name another folder")
        if type(self.jobs) is not int or self.jobs < 1:
            raise DataError(f"{self.jobs!r} jobs: use a whole number from 1 on")
        check(self.scheduler, self.workers)

    def _assigned(self) -> dict[Path, dict]:
        """For each notebook, the parameters given that it has, and those that none of the chosen has: to be refused."""
        if not self.parameters:
            return {path: {} for path in self.notebooks}
        known = {path: set(notebook_parameters(path)) for path in self.notebooks}
        some = set().union(*known.values())
        return {
            path: {name: value for name, value in self.parameters.items() if name in mine or name not in some}
            for path, mine in known.items()
        }

    def run(self) -> dict[str, str]:
        """Run every notebook; returns {notebook: error} of those that failed, each kept in a folder ``failed``."""
        failures, running = {}, set()
        with self._surroundings(), tqdm(total=len(self.notebooks), unit="notebook") as bar:

            def attempt(path: Path) -> None:
                running.add(path.stem)
                bar.set_description(", ".join(sorted(running)))
                try:
                    self._run_one(path)
                except Exception as error:  # a failing page, or a dead kernel, must not stop the others
                    failures[path.stem] = str(error)
                running.remove(path.stem)

            for paths, jobs in self._batches():
                workers = self.workers if jobs == 1 else 0  # several pages at a time use the cores already
                steering = environment(VQKV_SCHEDULER=self.scheduler, VQKV_WORKERS=str(workers or ""))
                with steering, ThreadPool(jobs) as pool:  # the work is done in kernels, which die with this process
                    for _ in pool.imap_unordered(attempt, paths):
                        bar.update()
        return dict(sorted(failures.items()))

    def _batches(self) -> list[tuple[list[Path], int]]:
        """Notebooks, and how many at a time. With several, the later ones begin, as they compute more; those
        that measure times follow alone, and then those that read the others' tables."""
        if self.jobs == 1:
            return [(self.notebooks, 1)]
        reading = [path for path in self.notebooks if reads_tables(path)]
        timed = [path for path in self.notebooks if not self.together and TIMES.intersection(notebook_parameters(path))]
        rest = [path for path in reversed(self.notebooks) if path not in [*timed, *reading]]
        return [(rest, self.jobs), (timed, 1), (reading, 1)]

    @contextlib.contextmanager
    def _surroundings(self):
        """Environment and folder that kernels inherit, set once: they belong to the process, not to a thread of it."""
        variables = {
            "VQKV_OUT": str(self.target),
            "VQKV_RECOMPUTE": "1" if self.recompute else "0",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "JUPYTER_PREFER_ENV_PATH": "1",  # this interpreter's python3 kernel, not one in the user's home
        }
        with environment(**variables), contextlib.chdir(self.root / "notebooks"):
            yield

    def _run_one(self, path: Path) -> Path:
        """Execute one notebook in a temporary file and move it to its place; what was there stays if it fails."""
        destination = self.target / "notebooks" / path.name
        scratch = self.target / "runs" if self.in_place else self.target
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch, prefix=".study-") as folder:
            executed = Path(folder) / path.name
            try:
                self._execute(path, executed)
            except Exception as error:
                if not self.in_place:
                    self.broken_claims[path.stem] = broken_claims(executed)
                if not self.broken_claims.get(path.stem):
                    raise RuntimeError(_failure(error, executed, scratch / "failed" / path.name)) from error
            notebook = nbformat.read(executed, as_version=4)
        write_atomically(
            destination, nbformat.writes(strip(notebook, keep_injected=not self.in_place)).encode() + b"\n"
        )
        return destination

    def _execute(self, path: Path, executed: Path) -> None:
        papermill.execute_notebook(
            str(path),
            str(executed),
            parameters=self.injected[path],
            kernel_name="python3",
            language="python",
            progress_bar=False,
            coalesce_streams=True,
            allow_error_names=[] if self.in_place else ["AssertionError"],
        )


def parameters_for(notebook: Path, settings: dict[str, dict], assigned: dict) -> dict:
    """Parameters to inject into a notebook: the profile's '*' entries that it has, its own entries, then ``assigned``.

    Raises ``UnknownNameError`` for a parameter that the notebook does not have, ``DataError`` for one of another type.
    """
    defaults = notebook_parameters(notebook)
    shared = {name: value for name, value in settings.get("*", {}).items() if name in defaults}
    parameters = shared | settings.get(notebook.stem, {}) | assigned
    for name in parameters:
        if name not in defaults:
            raise UnknownNameError(
                f"parameter of notebook {notebook.stem}", name, defaults, "Choose notebooks by --only."
            )
    return {name: fit(value, defaults[name], f"{notebook.stem}: {name}") for name, value in parameters.items()}


def notebook_parameters(notebook: Path) -> dict:
    """{parameter: default} of a notebook's ``parameters`` cell; a default that is not a literal becomes None."""
    with environment(JUPYTER_PREFER_ENV_PATH="1"):
        try:
            inspected = papermill.inspect_notebook(str(notebook))
        except ValueError as error:
            raise FormatError(f"notebook {notebook}: {error} Save it with a Python 3 kernel") from error
    return {name: _literal(entry["default"]) for name, entry in inspected.items()}


def _literal(text: str):
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)


@contextlib.contextmanager
def environment(**variables: str):
    """Environment variables for the kernels started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _failure(error: Exception, executed: Path, keep: Path) -> str:
    if not executed.is_file():
        return str(error)
    keep.parent.mkdir(parents=True, exist_ok=True)
    os.replace(executed, keep)
    return f"{str(error).strip()}\nThe partly executed notebook is {keep}"


def describe(root: Path) -> str:
    """The notebooks with their parameters, and the profiles."""
    lines = []
    for path in all_notebooks(root / "notebooks"):
        lines += [path.stem, *(f"    {name} = {value!r}" for name, value in notebook_parameters(path).items())]
    return "\n".join([*lines, "profiles: " + ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml")))])


def _show(study: Study) -> None:
    """Show a study page by page, run nothing; ends with 1 where something cannot be reached."""
    from vqkv.study.dry_run import DryRun  # loads torch, which else only the kernels do

    found = DryRun({path.stem: notebook_parameters(path) | study.injected[path] for path in study.notebooks})
    typer.echo("\n".join(found.lines))
    for reason in found.missing:
        typer.echo(f"cannot be reached: {reason}", err=True)
    raise typer.Exit(1 if found.missing else 0)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[list[str], typer.Option(help="Notebooks by the start of their names: 01, or 01,03.")] = [],  # noqa: B006
    profile: Annotated[str, typer.Option(help="A set of parameters from vqkv/profiles.")] = "default",
    parameter: Annotated[list[str], typer.Option("-p", metavar="NAME=VALUE", help="One parameter.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Folder for notebooks, results and figures.")] = None,
    recompute: Annotated[bool, typer.Option("--recompute/--reuse", help="Compute stored tables anew.")] = False,
    scheduler: Annotated[str, typer.Option(help="Address of a Dask scheduler whose workers compute rows.")] = "",
    workers: Annotated[int, typer.Option(min=0, help="Processes on this machine that compute rows.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Pages at a time; with several, set OMP_NUM_THREADS.")] = 1,
    together: Annotated[
        bool, typer.Option("--together", help="With several jobs, let pages that measure times run beside others.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show notebooks, parameters and profiles.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run; reach for it.")] = False,
):
    """Run the study's notebooks: the committed pages by default, other settings into a folder of their own."""
    try:
        if show:
            return typer.echo(describe(repository_root()))
        study = Study(
            only=only, profile=profile, parameters=parse_assignments(parameter), out=out, recompute=recompute,
            scheduler=scheduler, workers=workers, jobs=jobs, together=together,
        )  # fmt: skip
    except (ValueError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if dry_run:
        return _show(study)
    failures = study.run()
    for name, error in failures.items():
        typer.echo(f"\n{name} failed: {error}", err=True)
    for name, claims in sorted(study.broken_claims.items()):
        for claim in claims:
            typer.echo(f"\n{name}: with these parameters this does not hold:\n{claim}", err=True)
    typer.echo(f"{len(study.notebooks) - len(failures)} of {len(study.notebooks)} notebooks done, in {study.target}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app()
