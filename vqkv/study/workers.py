"""Calls in processes of this machine, or on a Dask cluster (``pip install 'vqkv[cluster]'``)."""

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from urllib.parse import urlsplit

from vqkv.errors import DataError

CONNECT_SECONDS = 5


def check(scheduler: str, workers: int) -> None:
    """Raise ``DataError`` for both, or a scheduler that does not answer, ``ImportError`` without ``distributed``."""
    if scheduler and workers:
        raise DataError(f"scheduler {scheduler} and {workers} workers: name one of them")
    if scheduler and not find_spec("distributed"):
        raise ImportError("a cluster needs the package distributed: pip install 'vqkv[cluster]'")
    if scheduler:
        _reach(scheduler)


def in_processes(workers: int, function: Callable, calls: dict[str, tuple]) -> Iterator[tuple[str, object]]:
    """Yields (name, ``function(*arguments)``) for every ``{name: arguments}``, as they finish, of fresh processes.

    What a call raises is raised here, with its name in a note; ``RuntimeError`` when a process died."""
    context = multiprocessing.get_context("spawn")
    count = min(workers, len(calls))  # a process takes seconds to start
    with ProcessPoolExecutor(count, context, _end_with_parent) as pool:
        names = {pool.submit(function, *arguments): name for name, arguments in calls.items()}
        try:
            yield from _results(as_completed(names), names)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker died. Most often that is memory: use fewer workers, or smaller settings. What has finished "
                "is kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _results(futures: Iterable, names: dict) -> Iterator[tuple[str, object]]:
    for future in futures:
        try:
            yield names[future], future.result()
        except Exception as error:
            error.add_note(f"in {names[future]}")
            raise


def on_cluster(
    address: str, function: Callable, calls: dict[str, tuple], afterwards: Callable
) -> Iterator[tuple[str, object]]:
    """``in_processes``, on the workers of the Dask scheduler at ``address``; ``afterwards`` is called once on each.
    Dask gives a dead worker's calls to others."""
    import distributed

    with distributed.Client(address, timeout=CONNECT_SECONDS, name="vqkv") as client:
        names = dict(zip(client.map(function, *zip(*calls.values()), pure=False), calls))
        yield from _results(distributed.as_completed(names), names)
        client.run(afterwards, on_error="ignore")


def _reach(address: str) -> None:
    """Raise ``DataError`` if nothing listens there. A client is worse at it: one that finds no scheduler is left to the
    garbage collector, where it can wait for ever for the lock of the next (distributed's LoopRunner)."""
    try:
        where = urlsplit(address)
        socket.create_connection((where.hostname or "", where.port or 0), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise DataError(
            f"no Dask scheduler answers at {address!r} ({error}): start one with `dask scheduler`, and give the "
            "address that it prints (tcp://...)"
        ) from error


def _end_with_parent() -> None:
    """A process of the pool ends when the process that started it was killed."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
