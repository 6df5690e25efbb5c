"""Machine code for loops that torch would need several passes over memory for: numba compiles it at first use, and
keeps it on disk next to the source or for the user (``NUMBA_CACHE_DIR``)."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import numba
import numpy as np
import torch

Result = TypeVar("Result")
SUMS = {"contract", "reassoc", "nsz"}  # sums in any order and fused, where error bounds allow it. NaN and infinity stay
WORTH = 1 << 22  # additions from which on a second thread helps

index = np.uint64  # signed positions are tested for negative ones, and loops over them are not vectorised


def serves(*tensors: torch.Tensor) -> bool:
    """Tell whether compiled loops can take these: tensors on a CPU, and not being traced."""
    return not torch.compiler.is_compiling() and all(x.device.type == "cpu" for x in tensors)


def compiled(fast: bool = False, inline: bool = False):
    """Decorator: compile at the first call, to run without the GIL. ``fast``: sums may be taken in any order;
    ``inline``: into every loop that calls it."""

    fastmath: Any = SUMS if fast else False
    jit = partial(numba.njit, nogil=True, error_model="numpy", fastmath=fastmath, forceinline=inline)

    def compile_lazily(function):
        try:
            return jit(function, cache=True)
        except RuntimeError:  # no folder that can be written to: compiled in every process
            return jit(function)

    return compile_lazily


def spread(run: Callable[[int, int], Result], rows: int, cost: int) -> list[Result]:
    """Call ``run(start, stop)`` for parts of the rows, on as many threads as torch may take if ``cost`` a row pays."""
    count = min(torch.get_num_threads(), rows * cost // WORTH + 1)
    if count == 1:
        return [run(0, rows)]
    ends = [rows * i // count for i in range(count + 1)]
    return [*_pool(count).map(run, ends[:-1], ends[1:])]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="vqkv")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
