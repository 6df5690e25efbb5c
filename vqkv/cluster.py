"""Calls on a Dask cluster: the room of ``distributed``, an extra (``pip install 'vqkv[cluster]'``).

Dask finds a worker for each call, and another one when a worker dies. A call is handed out only when a worker is free,
so that a dying worker takes no other call down with it, and its result is fetched as soon as it is there.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from vqkv.errors import DataError

TRIES = 3  # workers of a local cluster that a call may kill
CONNECT_SECONDS = 5
POLL_SECONDS = 5  # how soon a new worker gets work
PATIENCE_SECONDS = 60  # without any worker


class ClusterError(RuntimeError):
    """The cluster could not do its part: a call that kills its workers, no worker left, the scheduler gone."""


@contextmanager
def local_cluster(workers: int) -> Iterator[str]:
    """The address of a scheduler with so many worker processes on this machine, a call at a time each, until the
    ``with`` ends or this process dies. Dask sets no memory limit: it would pause a worker that holds a large model.

    Raises ``DataError`` for no number of workers, ``ImportError`` without ``distributed``.
    """
    if type(workers) is not int or workers < 1:
        raise DataError(f"{workers!r} workers: use a whole number from 1 on")
    distributed = _distributed()
    from dask import config

    with config.set({"distributed.nanny.pre-spawn-environ.OMP_WAIT_POLICY": "PASSIVE"}):
        cluster = distributed.LocalCluster(  # threads that wait leave the cores to other workers
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=None,
            dashboard_address=None,
            silence_logs=logging.ERROR,
            scheduler_kwargs={"allowed_failures": TRIES - 1, "dashboard_address": "127.0.0.1:0"},
        )
    with cluster:
        yield cluster.scheduler_address


def check(scheduler: str, workers: int) -> None:
    """Raise what using them would: ``DataError`` for both, or a scheduler that does not answer, ``ImportError`` without
    ``distributed``."""
    if scheduler and workers:
        raise DataError(f"scheduler {scheduler} and {workers} workers: name one of them")
    if workers:
        _distributed()
    if scheduler:
        with connected(scheduler):
            pass


@contextmanager
def connected(address: str) -> Iterator:
    """A client of the scheduler at ``address``. Raises ``DataError`` within seconds where there is none."""
    distributed = _distributed()
    try:
        _reach(address)
        client = distributed.Client(address, timeout=CONNECT_SECONDS, name="vqkv")
    except (OSError, ValueError, TypeError) as error:  # whatever an address can be wrong in
        raise DataError(
            f"no Dask scheduler answers at {address!r} ({str(error) or type(error).__name__}): "
            "start one with `dask scheduler`, and give the address that it prints (tcp://...)"
        ) from error
    with client:
        yield client


def _reach(address: str) -> None:
    """Raise what connecting does. Without a client: one that finds no scheduler is left to the garbage collector, and
    collected amid the making of another waits for a lock that this one holds (distributed's LoopRunner)."""
    from distributed.comm import connect

    async def greet() -> None:
        comm = await connect(address, timeout=CONNECT_SECONDS)
        await comm.close()

    with ThreadPoolExecutor(1) as pool:  # this thread may have a running loop, as a notebook's has
        pool.submit(lambda: asyncio.run(greet())).result()


def run(
    address: str, function: Callable, calls: dict[str, tuple], afterwards: Callable | None = None
) -> Iterator[tuple[str, object]]:
    """Yields (name, ``function(*arguments)``) for every ``{name: arguments}``, as they finish; ``afterwards`` is then
    called once on every worker.

    What a call raises is raised here, with its name in a note. Raises ``DataError`` where no scheduler answers, and
    ``ClusterError`` naming the call whose workers died one after another (``TRIES`` of a local cluster, the scheduler's
    ``allowed-failures`` of another), or when a minute has passed without any worker, or the scheduler is gone.
    """
    with connected(address) as client:
        waiting, running, seen = deque(calls), {}, time.monotonic()
        while waiting or running:
            with _scheduler_there(address):
                workers = len(client.nthreads())
                while waiting and len(running) < max(1, workers):
                    future = client.submit(function, *calls[waiting[0]], pure=False)
                    running[future] = waiting.popleft()
                results, failed = _finished(running)
            for future, result in results.items():
                yield running.pop(future), result
            for future in failed:
                raise _failure(future, running[future])
            seen = time.monotonic() if workers else seen
            if time.monotonic() - seen > PATIENCE_SECONDS:
                raise ClusterError(_no_workers(address, running))
        if afterwards is not None:
            client.run(afterwards, on_error="ignore")


def _finished(running: dict) -> tuple[dict, list]:
    """Results of those that end first, and those that failed; nothing if none does within ``POLL_SECONDS``, or its
    worker died with the result, which Dask then computes again."""
    results, failed = {}, []
    with suppress(TimeoutError):
        for future in _distributed().wait([*running], POLL_SECONDS, "FIRST_COMPLETED").done:
            if future.status == "error":
                failed.append(future)
            else:
                results[future] = future.result(timeout=POLL_SECONDS)
    return results, failed


def _failure(future, name: str) -> Exception:
    error = future.exception()
    if isinstance(error, _distributed().KilledWorker):
        return ClusterError(
            f"{name} killed every worker that ran it, {error.allowed_failures + 1} one after another. Most often that "
            "is memory: use fewer workers, or smaller settings"
        )
    error.add_note(f"in {name}")
    return error.with_traceback(future.traceback())


@contextmanager
def _scheduler_there(address: str):
    from distributed.client import CancelledError, FuturesCancelledError

    try:
        yield
    except (OSError, CancelledError, FuturesCancelledError) as error:
        raise ClusterError(f"lost the Dask scheduler at {address} ({type(error).__name__}: {error})") from error


def _no_workers(address: str, running: dict) -> str:
    begun = f"; begun: {', '.join(running.values())}" if running else ""
    return (
        f"the Dask scheduler at {address} has had no worker for {PATIENCE_SECONDS} seconds{begun}. "
        f"Start some with `dask worker {address} --nthreads 1`"
    )


def _distributed():
    try:
        import distributed
    except ImportError as error:
        raise ImportError("a cluster needs the package distributed: pip install 'vqkv[cluster]'") from error
    return distributed
