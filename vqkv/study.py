"""``python -m vqkv.study``: the notebooks, run through papermill, become committed pages, tables and figures.

The default profile refreshes the repository in place, page by page, each only when it ran to its end. Any other profile
or parameter leaves the repository alone and writes notebooks, tables and figures into a folder of its own; there an
``assert`` of a page that does not hold is reported as a finding: the claims were made for the committed numbers.
"""

import ast
import contextlib
import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import nbformat
import papermill
import typer
import yaml
from tqdm import tqdm

from vqkv.cluster import check, local_cluster
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.tables import digest, repository_root, write_atomically

PROFILES = Path(__file__).parent / "profiles"
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


@dataclass
class Study:
    """What to run and where: the notebooks of ``root``, a profile, further parameters, an output folder.

    ``root`` None means this repository; ``out`` None means ``root`` itself for the default profile without further
    parameters, else ``runs/<profile>-<hash of the parameters>``. ``scheduler`` (the address of a Dask scheduler) or
    ``workers`` (processes on this machine) compute the tables' rows, but for timings. All bad input is found here,
    before anything runs.
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
        failures = {}
        with self._cluster(), tqdm(self.notebooks, unit="notebook", file=sys.stderr) as bar:
            for path in bar:
                bar.set_description(path.stem)
                try:
                    self.run_one(path)
                except Exception as error:  # a failing page, or a dead kernel, must not stop the others
                    failures[path.stem] = str(error)
        return failures

    @contextlib.contextmanager
    def _cluster(self):
        """One cluster for all notebooks: the kernels find its scheduler's address in their environment."""
        started = local_cluster(self.workers) if self.workers else contextlib.nullcontext(self.scheduler)
        with started as address, environment(**_steering(address)):
            yield

    def run_one(self, path: Path) -> Path:
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
        with environment(
            VQKV_OUT=str(self.target),
            VQKV_RECOMPUTE="1" if self.recompute else "0",
            MPLBACKEND="module://matplotlib_inline.backend_inline",
            JUPYTER_PREFER_ENV_PATH="1",  # this interpreter's python3 kernel, not one in the user's home
        ):
            papermill.execute_notebook(
                str(path),
                str(executed),
                parameters=self.injected[path],
                kernel_name="python3",
                language="python",
                cwd=str(path.parent),
                progress_bar=False,
                coalesce_streams=True,
                allow_error_names=[] if self.in_place else ["AssertionError"],
            )


def _steering(address: str) -> dict[str, str]:
    return {"VQKV_SCHEDULER": address, "VQKV_WORKERS": ""} if address else {}


def all_notebooks(folder: Path) -> list[Path]:
    """The notebooks of a folder in the order of their names. Raises ``DataError`` when there are none."""
    notebooks = sorted(path for path in Path(folder).glob("*.ipynb") if not path.name.startswith("."))
    if not notebooks:
        raise DataError(f"no notebooks in {folder}: run the study in a checkout of the repository")
    return notebooks


def select(folder: Path, only: list[str]) -> list[Path]:
    """The notebooks whose names start with one of ``only`` (``"01"``, ``"01,03"``); all of them when it is empty."""
    notebooks = all_notebooks(folder)
    prefixes = [prefix.strip() for entry in only for prefix in entry.split(",") if prefix.strip()]
    for prefix in prefixes:
        if not any(path.name.startswith(prefix) for path in notebooks):
            raise UnknownNameError("notebook", prefix, [path.stem for path in notebooks])
    return [path for path in notebooks if not prefixes or path.name.startswith(tuple(prefixes))]


def load_profile(name: str, folder: Path = PROFILES, stems: list[str] | None = None) -> dict[str, dict]:
    """{notebook or "*": {parameter: value}}. Raises ``UnknownNameError`` for an unknown profile or notebook name."""
    known = [path.stem for path in Path(folder).glob("*.yaml")]
    if name not in known:
        raise UnknownNameError("profile", name, known)
    path = Path(folder) / f"{name}.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise FormatError(f"profile {path} is not YAML: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(entry, dict) for entry in settings.values()):
        raise FormatError(f"profile {path} must map notebook names, or '*', to mappings of parameters")
    for entry in settings:
        if stems is not None and entry != "*" and entry not in stems:
            raise UnknownNameError(f"notebook in profile {name!r}", entry, ["*", *stems])
    return settings


def parse_assignments(assignments: list[str]) -> dict:
    """``["seeds=[0, 1]", "model=gpt2"]`` -> parameters; values are YAML literals. Raises ``FormatError`` for others."""
    parameters = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        try:
            parameters[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise FormatError(f"-p {assignment}: the value is not a YAML literal ({error})") from error
        if not equals or not name.strip():
            raise FormatError(f"-p {assignment}: write it as name=value")
    return parameters


def parameters_for(notebook: Path, settings: dict[str, dict], assigned: dict) -> dict:
    """What to inject into a notebook: the profile's '*' entries that it has, its own entries, then ``assigned``.

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
    return {name: _fit(value, defaults[name], f"{notebook.stem}: {name}") for name, value in parameters.items()}


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


def _fit(value, default, what: str):
    """``value`` if it has the default's type. An int also serves as a float, and so does 1e-3, a string in YAML."""
    if isinstance(default, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    if isinstance(default, list | tuple) and isinstance(value, list):
        return [_fit(entry, default[0], f"{what}[{i}]") if default else entry for i, entry in enumerate(value)]
    if default is None or type(value) is type(default):
        return value
    raise DataError(
        f"{what} = {value!r} is {type(value).__name__}; the notebook has {default!r} ({type(default).__name__})"
    )


def strip(notebook: nbformat.NotebookNode, keep_injected: bool = False) -> nbformat.NotebookNode:
    """Remove what differs between equal runs: times, injected parameters, interpreter versions, random cell ids."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    unwanted = {"papermill-error-cell-tag"} if keep_injected else {"papermill-error-cell-tag", "injected-parameters"}
    notebook.cells = [cell for cell in notebook.cells if not unwanted.intersection(cell.metadata.get("tags", []))]
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        identity = hashlib.sha256(f"{cell.cell_type}:{cell.source}".encode()).hexdigest()[:8]
        seen[identity] = seen.get(identity, 0) + 1
        cell["id"] = identity if seen[identity] == 1 else f"{identity}-{seen[identity]}"
    return notebook


def broken_claims(executed: Path) -> list[str]:
    """The cells whose ``assert`` failed in a notebook that else ran to its end; [] when anything else went wrong."""
    if not executed.is_file():
        return []
    cells = [cell for cell in nbformat.read(executed, as_version=4).cells if cell.cell_type == "code"]
    errors = [(cell, output) for cell in cells for output in cell.outputs if output.output_type == "error"]
    finished = all(cell.execution_count for cell in cells)
    if finished and all(output.ename == "AssertionError" and _asserts(cell.source) for cell, output in errors):
        return [cell.source for cell, _ in errors]
    return []


def _asserts(source: str) -> bool:
    with contextlib.suppress(SyntaxError):
        return any(isinstance(node, ast.Assert) for node in ast.parse(source).body)
    return False


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
    """What a study would do, page by page; ends with 1 where something cannot be reached."""
    from vqkv.dry_run import DryRun  # loads torch, which else only the kernels do

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
    show: Annotated[bool, typer.Option("--list", help="Show notebooks, parameters and profiles.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run; reach for it.")] = False,
):
    """Run the study's notebooks: the committed pages by default, other settings into a folder of their own."""
    try:
        if show:
            return typer.echo(describe(repository_root()))
        study = Study(
            only=only, profile=profile, parameters=parse_assignments(parameter), out=out, recompute=recompute,
            scheduler=scheduler, workers=workers,
        )  # fmt: skip
    except (ValueError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if dry_run:
        return _show(study)
    failures = study.run()
    for name, error in failures.items():
        typer.echo(f"\n{name} failed: {error}", err=True)
    for name, claims in study.broken_claims.items():
        for claim in claims:
            typer.echo(f"\n{name}: with these parameters this does not hold:\n{claim}", err=True)
    typer.echo(f"{len(study.notebooks) - len(failures)} of {len(study.notebooks)} notebooks done, in {study.target}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app()
