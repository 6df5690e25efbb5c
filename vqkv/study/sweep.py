"""Tables of experiments, case by case: in this process or in several, and after a kill from where it was.

The rows are the same whoever computes them, in whatever order. A case draws all its random numbers from seeds among
its arguments, and what cases share (``per_process``) depends on its own arguments alone. The order in which torch sums
depends on the number of threads, so a worker has as many as the process that sweeps.
"""

import hashlib
import inspect
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky import get_reusable_executor
from tqdm import tqdm

from vqkv.errors import DataError
from vqkv.runtime.files import replacing
from vqkv.study import steering
from vqkv.study.shared import forget, keep_freed_memory, plain
from vqkv.study.subject import Subject

PACKAGE = Path(__file__).resolve().parents[1]
_files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json", ".csv"))
_contents = [f"{path.relative_to(PACKAGE)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in _files]
# Of every source file and table of this package when it was imported: one that changes later is not what runs.
CODE = hashlib.sha256("\n".join(_contents).encode()).hexdigest()


class Experiment:
    """A table of the study: called with the table's parameters, plain literals and a ``subject``, it is a DataFrame of
    the rows of every case. ``attrs["sources"]`` has the hashes of models and texts, ``attrs["seconds"]`` the time of
    all cases, those of earlier runs too. Made by ``experiment``."""

    __name__: str
    __qualname__: str

    def __init__(self, row: Callable, cases: Callable, finish: Callable | None):
        update_wrapper(self, row)
        self.row, self.listed, self.finish = row, cases, finish

    def __reduce__(self) -> str:  # a worker imports it
        return self.__qualname__

    def __call__(self, **parameters) -> pd.DataFrame:
        return self.run(parameters)

    def cases(self, **parameters) -> list["ExperimentCase"]:
        """Return the cases of these parameters."""
        parts = [part for part in (self.row, self.listed, self.finish) if part]
        if unknown := parameters.keys() - {name for part in parts for name in inspect.signature(part).parameters}:
            raise TypeError(f"{self.__name__} takes no {', '.join(sorted(unknown))}")
        parameters = with_subject(parameters)
        listed, settings = self.listed(**_taken(self.listed, parameters)), _taken(self.row, parameters)
        made = []
        for number, case in enumerate(listed, 1):
            about = ", ".join(f"{name}={value}" for name, value in case.items())
            name = f"{self.__name__}, case {number} of {len(listed)} ({about})"
            made.append(ExperimentCase(self, plain(settings | case, name), name))
        return made

    def run(self, parameters: dict, folder: Path | None = None) -> pd.DataFrame:
        """Compute the table. A finished case is kept in ``folder``, from where a killed run of the same code goes on.

        A case that raises ``DataError``, as a system does that does not fit the model, has no rows, and a warning says
        why. Raises ``DataError`` for arguments that are no plain literals, sources that differ, and no rows at all.
        """
        results = _computed(self.__name__, self.cases(**parameters), folder)
        rows = _known_rows(results)
        if self.finish:
            rows = self.finish(**_taken(self.finish, parameters | {"rows": rows}))
        table = pd.DataFrame(rows)
        table.attrs["sources"] = _sources(results)
        table.attrs["seconds"] = sum(result["seconds"] for result in results.values())
        return table


def experiment(cases: Callable = lambda: [{}], finish: Callable | None = None) -> Callable:
    """Make a table of a function that computes the row, or the rows, of a case (decorator).

    ``cases`` lists what it gets in each case, one by default; ``finish`` makes the table's rows of all ``rows``. Each
    of the functions gets those of the table's parameters that it names.
    """
    return lambda row: Experiment(row, cases, finish)


def product(**choices) -> list[dict]:
    """List every combination of arguments, the last of which changes fastest: ``product(bits=[2, 3], seed=[0, 1])``."""
    return [dict(zip(choices, chosen)) for chosen in itertools.product(*choices.values())]


@dataclass(frozen=True)
class ExperimentCase:
    """A case of an experiment: arguments of its row function as plain literals; ``name`` is what errors call it."""

    experiment: Experiment
    arguments: dict
    name: str

    def result(self) -> dict:
        """Compute ``rows``, ``sources``, ``seconds`` as JSON gives them back; ``refused``: why there are none."""
        arguments, start, refused = with_subject(self.arguments), time.perf_counter(), ""
        try:
            rows = self.experiment.row(**arguments)
        except DataError as error:
            rows, refused = [], str(error)
        rows = [rows] if isinstance(rows, dict) else rows
        rows = [{k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()} for row in rows]
        sources = arguments["subject"].sources if "subject" in arguments else {}
        return {"rows": rows, "sources": sources, "seconds": time.perf_counter() - start, "refused": refused}

    def identity(self, threads: int) -> str:
        """Hash all that its rows depend on but for sources; sums depend on the ``threads`` of whoever computes them."""
        function = f"{self.experiment.__module__}.{self.experiment.__qualname__}"
        about = json.dumps([function, CODE, self.arguments, threads])
        return hashlib.sha256(about.encode()).hexdigest()[:32]


def with_subject(arguments: dict) -> dict:
    """Return the arguments with the subject that its literals stand for."""
    literals = arguments.get("subject")
    return arguments | {"subject": Subject(**literals)} if isinstance(literals, dict) else arguments


def _taken(function: Callable, parameters: dict) -> dict:
    """Return the parameters that a function takes."""
    return {name: parameters[name] for name in inspect.signature(function).parameters if name in parameters}


def _computed(desc: str, cases: list[ExperimentCase], folder: Path | None) -> dict[str, dict]:
    """Return results by the names of these cases, in their order, computed or found in a folder."""
    threads = torch.get_num_threads()
    kept = {case.name: folder / f"{case.identity(threads)}.json" for case in cases} if folder else {}
    results = {name: json.loads(path.read_bytes()) for name, path in kept.items() if path.is_file()}
    calls = [(case, threads) for case in cases if case.name not in results]
    try:
        with tqdm(total=len(cases), initial=len(results), desc=desc, unit="case", disable=None) as bar:
            for name, result in in_processes(_result, calls, steering.current.workers or 1):
                if folder:
                    folder.mkdir(parents=True, exist_ok=True)
                    with replacing(kept[name]) as file:
                        file.write(json.dumps(result).encode())
                results[name] = result
                bar.update()
    finally:
        forget()
    return {case.name: results[case.name] for case in cases}


def _result(case: ExperimentCase, threads: int) -> tuple[str, dict]:
    """Return name and result of a case."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        return case.name, case.result()
    except Exception as error:
        error.add_note(f"in {case.name}")
        raise


def in_processes(function: Callable, calls: list[tuple], workers: int) -> Iterator:
    """Yield ``function(*call)`` of every call as they finish, in so many processes (1: in this one).

    Raises what a call raises, and ``RuntimeError`` when a process died.
    """
    waiting = [delayed(function)(*call) for call in calls]
    try:
        with parallel_config("loky", inner_max_num_threads=torch.get_num_threads() if workers > 1 else None):
            yield from Parallel(workers, return_as="generator_unordered", batch_size=1)(waiting)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker died, most often of too little memory: use fewer workers, or smaller settings. What has finished "
            "is kept"
        ) from error
    finally:
        if workers > 1:  # they would keep their models for five minutes
            get_reusable_executor().shutdown(kill_workers=True)


def _known_rows(results: dict[str, dict]) -> list[dict]:
    """List rows of all cases; a warning for each that has none. Raises ``DataError`` if every case was refused."""
    rows = [row for result in results.values() for row in result["rows"]]
    refused = {name: result["refused"] for name, result in results.items() if result["refused"]}
    for name, why in refused.items():
        if not rows:
            raise DataError(f"{why} (in {name})")
        warnings.warn(f"no rows of {name}: {why}", stacklevel=3)
    return rows


def _sources(results: dict[str, dict]) -> dict:
    """Return all sources; a text of which another model's tokenizer makes other tokens is named with the model.

    Raises ``DataError`` if a source was not the same for two cases.
    """
    sources: dict[str, str] = {}
    models: dict[str, str] = {}
    for case, result in results.items():
        model = ", ".join(name for name in result["sources"] if name.startswith("model "))
        for name, value in result["sources"].items():
            if sources.get(name, value) != value and models[name] != model:
                name = f"{name}, {model}"
            if sources.setdefault(name, value) != value:
                raise DataError(f"{name} is {value} for {case}, {sources[name]} before: begin again with --recompute")
            models.setdefault(name, model)
    return sources
