"""New processes that have everything imported already, which takes a fresh one six seconds: they are forked from a
server that has run nothing else, so they know nothing of the test's process."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

SECONDS = 300  # before a process that does not end fails its test


def context():
    """To start processes with; the first call in a test process decides what is imported."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["vqkv", "datasets", "transformers.models.llama.modeling_llama"])
    return server


def call(function, *arguments):
    """What ``function`` of a module returns, or raises, in a new process."""
    with ProcessPoolExecutor(1, context()) as pool:
        return pool.submit(function, *arguments).result(SECONDS)
