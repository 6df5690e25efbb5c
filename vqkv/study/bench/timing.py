"""Wall time of calls that take turns (A B C A B C ...), so that a busy machine slows all of them alike."""

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch

PATIENCE = 1.0  # seconds: what has taken so long is not repeated again
LEAST = 3  # repetitions that everything gets all the same
FLUSHED = 2**28  # bytes written before a call on a GPU: more than its cache holds


def measure(calls: Sequence[Callable], repetitions: int, device: str, ready: Sequence[int] = ()) -> list[list[float]]:
    """Milliseconds of every call, ``repetitions`` of each after one that warms up, which those at the places ``ready``
    do without. Calls so slow that they have used up ``PATIENCE`` are repeated ``LEAST`` times all the same."""
    clock = GpuClock() if device.startswith("cuda") else wall_clock
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repetitions + 1):
        for place, (call, taken) in enumerate(zip(calls, times, strict=True)):
            if turn == 0 and place not in ready:
                clock(call)
            elif turn and not _enough(taken):
                taken.append(clock(call))
    return times


def _enough(taken: list[float]) -> bool:
    return len(taken) >= LEAST and sum(taken) > PATIENCE * 1e3


def wall_clock(call: Callable) -> float:
    """Milliseconds of a call that has ended when it returns."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


class GpuClock:
    """Milliseconds between two events of the GPU, whose cache has been written over before."""

    def __init__(self):
        self._other = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def __call__(self, call: Callable) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._other.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


@contextmanager
def num_threads(threads: int):
    """Within the context torch computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
