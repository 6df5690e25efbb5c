"""Times by ``torch.utils.benchmark`` of calls that take turns (A B C A B C ...): a busy machine slows all alike."""

from collections.abc import Callable, Sequence

import torch
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.common import set_torch_threads as num_threads

__all__ = ["in_turn", "num_threads"]

SHORTEST = 2e-3  # seconds that one repetition takes at least, in a call or many
PATIENCE = 1e3  # milliseconds: what has taken so long is not repeated
MIN_REPETITIONS = 3  # repetitions that everything gets all the same


def in_turn(calls: Sequence[Callable], repetitions: int, device: str) -> list[list[float]]:
    """Milliseconds of every call, each ``repetitions`` times after a warm-up, slow ones fewer."""
    clock = gpu_times if device.startswith("cuda") else cpu_times
    times: list[list[float]] = [[] for _ in calls]
    for repetition in range(repetitions):
        for call, taken in zip(calls, times, strict=True):
            if repetition < MIN_REPETITIONS or sum(taken) < PATIENCE:
                taken += clock(call)
    return times


def cpu_times(call: Callable) -> list[float]:
    """Milliseconds, by torch's ``Timer``."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return [1e3 * seconds for seconds in timer.blocked_autorange(min_run_time=SHORTEST).times]


def gpu_times(call: Callable) -> list[float]:
    """Time a call in milliseconds on a GPU whose cache is cleared before, which ``Timer`` cannot do."""
    from triton.testing import do_bench

    return do_bench(call, warmup=1, rep=10, return_mode="all")
