"""Calls in processes of this machine, or on a Dask cluster (``pip install 'vqkv[cluster]'``)."""

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from urllib.parse import urlsplit

from vqkv.errors import DataError

CONNECT_SECONDS = 5


def check(scheduler: str, workers: int) -> None:
    """Raise ``DataError`` for both, or a scheduler that does not answer, ``ImportError`` without ``distributed``."""
    if scheduler and workers:
        raise DataError(f"scheduler {scheduler} and {workers} workers: name one of them")
    if scheduler:
        _distributed()
        _reach(scheduler)


def in_processes(workers: int, function: Callable, calls: dict[str, tuple]) -> Iterator[tuple[str, object]]:
    """Yields (name, ``function(*arguments)``) for every ``{name: arguments}``, as they finish, of fresh processes.

    What a call raises is raised here, with its name in a note. Raises ``RuntimeError`` naming the calls under way when
    a process died."""
    waiting, running = iter(calls.items()), {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        while True:
            for name, arguments in islice(waiting, workers - len(running)):
                running[pool.submit(function, *arguments)] = name
            if not running:
                return
            done = wait(running, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=lambda future: future.exception() is not None):  # results first
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        f"a worker died during {' or '.join(running.values())}. Most often that is memory: use fewer "
                        "workers, or smaller settings. What has finished is kept"
                    ) from error
                except Exception as error:
                    error.add_note(f"in {running[future]}")
                    raise
                yield running.pop(future), result


def on_cluster(
    address: str, function: Callable, calls: dict[str, tuple], afterwards: Callable
) -> Iterator[tuple[str, object]]:
    """``in_processes``, on the workers of the Dask scheduler at ``address``; ``afterwards`` is called once on each.
    Dask gives a dead worker's calls to others. Raises ``DataError`` where no scheduler answers."""
    distributed = _distributed()
    _reach(address)
    with distributed.Client(address, timeout=CONNECT_SECONDS, name="vqkv") as client:
        names = dict(zip(client.map(function, *zip(*calls.values()), pure=False), calls))
        for future in distributed.as_completed(names):
            try:
                result = future.result()
            except Exception as error:
                error.add_note(f"in {names[future]}")
                raise
            yield names[future], result
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


def _distributed():
    try:
        import distributed
    except ImportError as error:
        raise ImportError("a cluster needs the package distributed: pip install 'vqkv[cluster]'") from error
    return distributed


def _end_with_parent() -> None:
    """A process of the pool ends when the process that started it was killed."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
