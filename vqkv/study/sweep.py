"""A table's rows, case by case: in this process, in several or on a Dask cluster, and after a kill from where it was.

``VQKV_WORKERS`` in the environment is a number of processes on this machine, ``VQKV_SCHEDULER`` the address of a Dask
scheduler; without either, cases run one after another in this process. ``vqkv.study`` sets them.

The rows are the same whoever computes them, in whatever order: a case draws all its random numbers from seeds among
its arguments, and what cases share (``per_process``) depends on its own arguments alone. The order in which torch sums
depends on the number of threads, so a worker computes one case at a time, on as many threads as the process that sweeps
has; several workers on one machine are fastest with ``OMP_NUM_THREADS=1``. Workers of a cluster are assumed to have the
same packages and the same kind of processor or GPU; their version of this library, models and texts are compared.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from vqkv.errors import DataError
from vqkv.study.allocator import give_back, keep_freed_memory
from vqkv.study.tables import plain, unfinished, write_atomically
from vqkv.study.workers import in_processes, on_cluster

PACKAGE = Path(__file__).resolve().parents[1]
_one_at_a_time = threading.Lock()
_held: list[OrderedDict] = []  # what ``per_process`` keeps in this process


def _code() -> str:
    """Hash of every source file of this package, and of the tables that come with it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json", ".csv")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE = _code()  # when it was imported: a file that changes later is not the code that runs


@dataclass(frozen=True)
class SweepCase:
    """One call of ``compute``, a function of a module that returns (rows, sources), with plain literals; ``name`` is
    what errors call it."""

    compute: Callable
    arguments: dict
    name: str

    def result(self) -> dict:
        """``rows`` and ``sources``, exactly as JSON gives them back."""
        rows, sources = self.compute(**self.arguments)
        rows = [{k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()} for row in rows]
        return {"rows": rows, "sources": plain(sources, f"{self.name}: sources")}

    def identity(self, threads: int) -> str:
        """A hash of all that its rows depend on but for its sources, whose own hashes are compared with the other
        cases'; the last bits of sums depend on the ``threads`` of whoever computes them."""
        function = f"{self.compute.__module__}.{self.compute.__qualname__}"
        about = json.dumps([function, CODE, self.arguments, threads])
        return hashlib.sha256(about.encode()).hexdigest()[:32]


# Chooses one of a sweep's cases, which then is computed alone.
one_case: ContextVar[Callable[[list[SweepCase]], SweepCase] | None] = ContextVar("vqkv_one_case", default=None)


class OneCase(Exception):
    """Rows of the ``case`` that ``one_case`` chose, on their way past what a table makes of all its rows."""

    def __init__(self, case: str, rows: list[dict]):
        super().__init__(case)
        self.case, self.rows = case, rows


def sweep(compute: Callable, cases: list[dict], settings: dict, desc: str) -> tuple[list[dict], dict]:
    """The rows of every case, in the order of ``cases``, and the sources of all of them.

    ``compute``, a function of a module, is called as ``compute(**settings, **case)`` and returns (rows, sources): dicts
    of numbers, booleans and words, and the hashes of the models and texts behind them. All arguments are plain
    literals. Within ``tables.table`` a finished case is kept beside the table until that is stored: a run that was
    killed goes on from there, unless code or arguments have changed. ``desc`` is the bar's.

    What a case raises ends the sweep, with the case in a note. Raises ``DataError`` for arguments that are no plain
    literals, or sources that are not the same for all cases, ``RuntimeError`` where a process died.
    """
    listed = [", ".join(f"{name}={value!r}" for name, value in case.items()) for case in cases]
    names = [f"{desc}, case {i} of {len(cases)} ({about})" for i, about in enumerate(listed, 1)]
    arguments = [plain(settings | case, f"{desc}: {case}") for case in cases]
    cases = [SweepCase(compute, *about) for about in zip(arguments, names)]
    if choose := one_case.get():
        case = choose(cases)
        raise OneCase(case.name, next(_here({case.name: case}))[1]["rows"])
    folder, threads = unfinished.get(), torch.get_num_threads()
    kept = {case.name: folder / f"{case.identity(threads)}.json" for case in cases} if folder else {}
    found = {name: json.loads(path.read_bytes()) for name, path in kept.items() if path.is_file()}
    missing = {case.name: case for case in cases if case.name not in found}
    with tqdm(total=len(cases), initial=len(found), desc=desc, unit="case", disable=None) as bar:
        for name, result in _computed(missing):
            if kept:
                write_atomically(kept[name], json.dumps(result).encode())
            found[name] = result
            bar.update()
    return [row for case in cases for row in found[case.name]["rows"]], _sources(found)


def per_process(maxsize: int) -> Callable:
    """Decorator: the last ``maxsize`` results of a function of plain literals, given by keyword, are kept in this
    process until its sweep ends. What several cases need goes here (a model, a calibration), so that memory stays
    bounded; an old result goes before a new one is made. The result must depend on the arguments alone."""

    def decorate(function: Callable) -> Callable:
        held: OrderedDict = OrderedDict()
        _held.append(held)

        @wraps(function)
        def remembered(**arguments):
            key = json.dumps(plain(arguments, f"arguments of {function.__name__}"), sort_keys=True)
            if key in held:
                value = held.pop(key)
            else:
                while len(held) >= maxsize:
                    held.popitem(last=False)
                value = function(**arguments)
            held[key] = value
            return value

        return remembered

    return decorate


def forget() -> None:
    """Drop what ``per_process`` keeps in this process, and its memory."""
    for held in _held:
        held.clear()
    give_back()


def _computed(cases: dict[str, SweepCase]) -> Iterator[tuple[str, dict]]:
    """(name, result) of these cases as they finish, computed where the environment says."""
    scheduler, workers = (os.environ.get(f"VQKV_{name}", "").strip() for name in ("SCHEDULER", "WORKERS"))
    calls = {name: (case, CODE, torch.get_num_threads()) for name, case in cases.items()}
    if not calls:
        return
    if scheduler:
        yield from on_cluster(scheduler, _on_worker, calls, forget)
    elif workers:
        yield from in_processes(int(workers), _on_worker, calls)
    else:
        yield from _here(cases)


def _here(cases: dict[str, SweepCase]) -> Iterator[tuple[str, dict]]:
    keep_freed_memory()
    try:
        for name, case in cases.items():
            try:
                result = case.result()
            except Exception as error:
                error.add_note(f"in {name}")
                raise
            yield name, result
    finally:
        forget()


def _on_worker(case: SweepCase, code: str, threads: int) -> dict:
    """A case in another process, one at a time: threads of a Dask worker would share models."""
    if code != CODE:
        raise DataError(f"a worker has another version of vqkv in {PACKAGE}: restart it with the one of this sweep")
    keep_freed_memory()
    with _one_at_a_time:
        torch.set_num_threads(threads)
        return case.result()


def _sources(results: dict[str, dict]) -> dict:
    """All sources. Raises ``DataError`` if one of them was not the same for two cases."""
    known, first = {}, {}
    for case, result in results.items():
        for name, value in result["sources"].items():
            if known.setdefault(name, value) != value:
                raise DataError(
                    f"{name} is {value} for {case} but {known[name]} for {first[name]}: it changed meanwhile, or "
                    "workers have another one; begin anew with --recompute"
                )
            first.setdefault(name, case)
    return known
