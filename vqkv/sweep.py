"""A table's rows, case by case: in this process or on a Dask cluster, and after a kill from where it was.

``VQKV_SCHEDULER`` in the environment is the address of a Dask scheduler, ``VQKV_WORKERS`` a number of worker processes
on this machine; without either, cases run one after another in this process. ``vqkv.study`` sets the first.

The rows are the same whoever computes them, in whatever order: a case draws all its random numbers from seeds among
its arguments, and what cases share (``per_process``) depends on its own arguments alone. The order in which torch sums
depends on the number of threads, so a worker computes one case at a time, on as many threads as the process that sweeps
has; several workers on one machine are fastest with ``OMP_NUM_THREADS=1``. What is assumed beyond that: workers have
this library's version (checked), the same packages, models (checked) and texts (checked), and the same kind of
processor or GPU.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps

import torch
from tqdm import tqdm

from vqkv.allocator import give_back, keep_freed_memory
from vqkv.cases import CODE, PACKAGE, Case, Kept
from vqkv.cluster import local_cluster, run
from vqkv.errors import DataError
from vqkv.tables import plain

_one_at_a_time = threading.Lock()
_held: list[OrderedDict] = []  # what ``per_process`` keeps in this process


def sweep(compute: Callable, cases: list[dict], settings: dict, desc: str) -> tuple[list[dict], dict]:
    """The rows of every case, in the order of ``cases``, and the sources of all of them.

    ``compute``, a function of a module, is called as ``compute(**settings, **case)`` and returns (rows, sources): dicts
    of numbers, booleans and words, and the hashes of the models and texts behind them. All arguments are plain
    literals. Within ``vqkv.tables.table`` a finished case is kept beside the table until that is stored: a run that was
    killed goes on from there, unless code, arguments, local files or sources have changed. ``desc`` is the bar's.

    What a case raises ends the sweep, with the case in a note. Raises ``DataError`` for arguments or rows that are no
    plain literals, sources that change on the way, or steering that makes no sense; ``vqkv.cluster.ClusterError``
    naming a case whose workers die one after another.
    """
    cases = [
        Case(compute, plain(settings | case, f"{desc}: {case}"), f"{desc}, case {i} of {len(cases)} ({_listed(case)})")
        for i, case in enumerate(cases, 1)
    ]
    with cluster() as address, tqdm(total=len(cases), desc=desc, unit="case", disable=None) as bar:
        kept = Kept(torch.get_num_threads())
        found = {i: result for i, case in enumerate(cases) if (result := kept.get(case)) is not None}
        bar.update(len(found))
        missing = [i for i in range(len(cases)) if i not in found]
        fresh = _compute(cases, missing, address, kept, bar)
        known = _sources(cases, fresh)
        if stale := [i for i, result in found.items() if known != known | _shared(result["sources"], known)]:
            bar.total += len(stale)
            fresh |= _compute(cases, stale, address, kept, bar)
    found |= fresh
    kept.spent(sum(result["seconds"] for i, result in found.items() if i not in fresh))
    return [row for i in range(len(cases)) for row in found[i]["rows"]], _sources(cases, found)


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


def cluster():
    """A context manager that gives the address of the scheduler that the environment names, or starts, and None where
    it names none. Raises ``DataError`` if it says both, or no number of workers."""
    scheduler, workers = (os.environ.get(f"VQKV_{name}", "").strip() for name in ("SCHEDULER", "WORKERS"))
    if scheduler and workers:
        raise DataError(f"VQKV_SCHEDULER={scheduler} and VQKV_WORKERS={workers}: set one of them")
    if not workers:
        return nullcontext(scheduler or None)
    return local_cluster(int(workers) if workers.isdecimal() else workers)


def _compute(cases: list[Case], numbers: list[int], address: str | None, kept: Kept, bar) -> dict[int, dict]:
    """{number: result} of these cases, each kept when it has finished."""
    results = {}
    for number, result in _here(cases, numbers) if address is None else _elsewhere(cases, numbers, address):
        kept.put(cases[number], result)
        results[number] = result
        bar.update()
    return results


def _here(cases: list[Case], numbers: list[int]) -> Iterator[tuple[int, dict]]:
    keep_freed_memory()
    try:
        for number in numbers:
            try:
                result = cases[number].result()
            except Exception as error:
                error.add_note(f"in {cases[number].name}")
                raise
            yield number, result
    finally:
        forget()


def _elsewhere(cases: list[Case], numbers: list[int], address: str) -> Iterator[tuple[int, dict]]:
    by_name = {cases[number].name: number for number in numbers}
    calls = {name: (cases[number], CODE, torch.get_num_threads()) for name, number in by_name.items()}
    for name, result in run(address, _on_worker, calls, afterwards=forget):
        yield by_name[name], result


def _on_worker(case: Case, code: str, threads: int) -> dict:
    """What a worker does: one case at a time, also where a worker has several threads, which would share models."""
    if code != CODE:
        raise DataError(f"a worker has another version of vqkv in {PACKAGE}: restart it with the one of this sweep")
    keep_freed_memory()
    with _one_at_a_time:
        torch.set_num_threads(threads)
        return case.result()  # Dask sends back what this raises, and its name and words where that is all it can send


def _sources(cases: list[Case], results: dict[int, dict]) -> dict:
    """All sources. Raises ``DataError`` if one of them was not the same for two cases."""
    known, first = {}, {}
    for number, result in results.items():
        for name, value in result["sources"].items():
            if known.setdefault(name, value) != value:
                raise DataError(
                    f"{name} is {value} for {cases[number].name} but {known[name]} for {first[name]}: "
                    "it changed meanwhile, or workers have another one"
                )
            first.setdefault(name, cases[number].name)
    return known


def _shared(sources: dict, known: dict) -> dict:
    return {name: value for name, value in sources.items() if name in known}


def _listed(case: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in case.items())
