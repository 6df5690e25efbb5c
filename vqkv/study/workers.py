"""Calls in this process, in processes of this machine, or on a Dask cluster (``pip install 'vqkv[cluster]'``)."""

import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from urllib.parse import urlsplit

import torch
from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky import get_reusable_executor

from vqkv.errors import DataError

CONNECT_SECONDS = 5


def check(scheduler: str, workers: int) -> None:
    """Raise ``DataError`` for both, or a scheduler that does not answer, ``ImportError`` without ``distributed``."""
    if scheduler and workers:
        raise DataError(f"scheduler {scheduler} and {workers} workers: name one of them")
    if scheduler and not find_spec("distributed"):
        raise ImportError("a cluster needs the package distributed: pip install 'vqkv[cluster]'")
    if not scheduler:
        return
    try:  # not by a client: one without a scheduler may wait for ever for a lock when it is collected
        where = urlsplit(scheduler)
        socket.create_connection((where.hostname or "", where.port or 0), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise DataError(
            f"no Dask scheduler answers at {scheduler!r} ({error}): start one with `dask scheduler`, and give the "
            "address that it prints (tcp://...)"
        ) from error


def results(
    function: Callable,
    calls: Iterable[tuple],
    workers: int = 1,
    scheduler: str = "",
    afterwards: Callable | None = None,
) -> Iterator:
    """Yield ``function(*call)`` of every call as they finish, in so many processes, or on the workers of the Dask
    scheduler at an address, on each of which ``afterwards`` is called once. Raises what a call raises, and
    ``RuntimeError`` when a process died; Dask gives a dead worker's calls to others."""
    waiting = [delayed(function)(*call) for call in calls]
    if scheduler:
        import distributed

        with distributed.Client(scheduler, timeout=CONNECT_SECONDS, name="vqkv") as client, parallel_config("dask"):
            yield from Parallel(return_as="generator_unordered", batch_size=1)(waiting)
            if afterwards:
                client.run(afterwards, on_error="ignore")
        return
    try:
        with parallel_config("loky", inner_max_num_threads=torch.get_num_threads() if workers > 1 else None):
            yield from Parallel(workers, return_as="generator_unordered", batch_size=1)(waiting)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker died. Most often that is memory: use fewer workers, or smaller settings. What has finished "
            "is kept"
        ) from error
    finally:
        if workers > 1:  # they would keep their models for five minutes
            get_reusable_executor().shutdown(kill_workers=True)
