"""New processes that have everything imported already, which takes a fresh one six seconds: they are forked from a
server that has run nothing else, so they know nothing of the test's process."""

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

SECONDS = 300  # before a process that does not end fails its test


def context():
    """To start processes with; the first call in a test process decides what is imported."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["vqkv", "datasets", "transformers.models.llama.modeling_llama"])
    return found


def call(function, *arguments):
    """What ``function`` of a module returns, or raises, in a new process."""
    return share(1, function, *arguments)[0]


def share(count: int, function, *arguments) -> list:
    """What ``function`` returns in each of ``count`` processes at a time, set up as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ProcessPoolExecutor(count, context(), max_tasks_per_child=1) as pool:  # one that fails leaves its group
        ranks = ({**group, "RANK": rank, "LOCAL_RANK": rank} if count > 1 else {} for rank in range(count))
        running = [pool.submit(_call, variables, function, arguments) for variables in ranks]
        return [one.result(SECONDS) for one in running]


def _call(variables: dict, function, arguments: tuple):
    os.environ.update({name: str(value) for name, value in variables.items()})
    return function(*arguments)


def known_parts() -> set[str]:
    """Names of the codec parts that a process knows once it can load a compressor."""
    import vqkv.cache.compressor  # noqa: F401
    from vqkv.codecs.stage import Part

    return set(Part.registry)
