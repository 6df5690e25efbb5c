"""Many processes that share one job: each takes its part of every batch, and sums are added up between them.

Within ``launched()``, under ``accelerate launch`` or ``torchrun``, calibration and evaluation share their work (gloo on
a CPU, nccl on GPUs); anywhere else a process is alone and nothing here changes a bit of what it computes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.errors import DataError


@dataclass(frozen=True)
class Processes:
    """This process is number ``rank`` of ``count``. Every method that takes a tensor of all processes must be called by
    all of them, in the same order. ``device``: where sums travel from; None for wherever a tensor is."""

    rank: int = 0
    count: int = 1
    device: torch.device | None = None

    @property
    def first(self) -> bool:
        """True if this one writes files and shows progress."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process's consecutive rows of ``batch``. Raises ``DataError`` for fewer rows than processes."""
        if len(batch) < self.count:
            raise DataError(
                f"a batch of {len(batch)} sequences cannot be shared by {self.count} processes: use fewer processes, "
                f"a larger batch_size, or a number of sequences that leaves no smaller batch at the end"
            )
        return batch.tensor_split(self.count)[self.rank]

    def total(self, x: Tensor) -> Tensor:
        """The sum of all processes' ``x``, of one shape and type."""
        if self.count == 1:
            return x
        summed = x.detach().to(self.device or x.device, copy=True).contiguous()
        torch.distributed.all_reduce(summed)
        return summed.to(x.device)

    def rows(self, x: Tensor) -> Tensor:
        """Rows of all processes' ``x`` (rows, ...), in the order of ranks; exact, as sums of values and zeros."""
        if self.count == 1:
            return x
        lengths = self._told(len(x))
        start = sum(lengths[: self.rank])
        found = x.new_zeros(sum(lengths), *x.shape[1:])
        found[start : start + len(x)] = x
        return self.total(found)

    def exchange(self, message: bytes) -> list[bytes]:
        """Everybody's message, by rank."""
        if self.count == 1:
            return [message]
        lengths = self._told(len(message))
        joined = self.rows(torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)])
        return [part.numpy().tobytes() for part in joined.split(lengths)]

    def _told(self, number: int) -> list[int]:
        """Everybody's number, by rank."""
        numbers = torch.zeros(self.count, dtype=torch.int64)
        numbers[self.rank] = number
        return self.total(numbers).tolist()


ALONE = Processes()
_current: ContextVar[Processes] = ContextVar("vqkv_processes", default=ALONE)


def current() -> Processes:
    """The processes that share the job at hand."""
    return _current.get()


@contextmanager
def launched() -> Iterator[Processes]:
    """Inside, this process shares its work with those that ``accelerate launch`` or ``torchrun`` started with it, if
    there are any. All of them must go through the same calls."""
    token = _current.set(_launched())
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def own_device(device: str) -> str:
    """``device`` of this process's own model: of several processes that were launched on ``cuda``, each has a card."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


def _launched() -> Processes:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from accelerate import PartialState  # a second, which a process of its own need not spend

    state = PartialState(cpu=not torch.cuda.is_available())
    device = state.device if state.backend == "nccl" else torch.device("cpu")
    return Processes(state.process_index, state.num_processes, device)
