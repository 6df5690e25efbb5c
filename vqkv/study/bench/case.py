"""Cases of a bench: an operation on one problem, by every implementation that there is, in turn."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from vqkv import kernels
from vqkv.study.bench import plain
from vqkv.study.bench.roofline import Demand

SLOW = 0.3  # seconds


@dataclass(frozen=True)
class Sizes:
    """Shapes of what is timed: ``rows`` vectors for residual VQ, ``tokens`` of one layer's keys for what packs and
    reads them, ``runs`` [batch size, context] for attention. A row of ``sweep`` is timed for each of
    ``codebook_sizes`` (largest depth) and ``depths`` (largest codebooks)."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 8192
    sweep_rows: int = 2048
    tokens: int = 1024
    runs: tuple = ((1, 256), (1, 1024), (1, 4096), (4, 256), (4, 1024))
    codebook_sizes: tuple = (256, 512, 1024, 2048)
    depths: tuple = (1, 2, 4, 8)
    group: int = 32  # channels that residual VQ quantizes together
    device: str = "cpu"
    seed: int = 0

    @property
    def stored(self) -> tuple[int, int, int, int]:
        """One layer's keys."""
        return 1, self.kv_heads, self.tokens, self.head_dim


@dataclass
class Contender:
    """One implementation of one operation: a row of the table.

    ``equal``: the share of its results (codes of a vector, bytes of a token) that equal the reference's; ``error``: how
    far its values are from the expected ones, relative in the root mean square.
    """

    operation: str
    format: str
    implementation: str
    shape: str
    work: Demand
    call: Callable[[], object]
    dtype: str = "float32"
    ready: bool = False  # has run, and for so long that it needs no more warming up
    equal: float | None = None
    error: float | None = None


@dataclass
class BenchCase:
    """One problem, and the entries that solve it. ``format`` says what is stored: int4, 8x2048 d=32, ..."""

    operation: str
    format: str
    shape: str
    work: Demand
    dtype: str = "float32"
    entries: list[Contender] = field(default_factory=list)

    def add(
        self, implementation: str, call: Callable[[], object], expected: Tensor | None = None,
        read: Callable = lambda found: found,
    ) -> None:  # fmt: skip
        """Time ``call`` under this name; what ``read`` makes of its result is compared with ``expected``, which may
        have the first rows only."""
        entry = Contender(self.operation, self.format, implementation, self.shape, self.work, call, self.dtype)
        if expected is not None:
            start = time.perf_counter()
            _compare(entry, read(call()), expected)
            entry.ready = time.perf_counter() - start > SLOW
        self.entries.append(entry)

    def add_both(self, operation: str, like: Tensor, *arguments, expected: Tensor, **more) -> None:
        """Time our kernel of this name, of the twin that serves a tensor like ``like``, and plain torch's."""
        self.add(ours(operation, like), partial(getattr(kernels, operation), *arguments), expected, **more)
        self.add("plain torch", partial(getattr(plain, operation), *arguments), expected, **more)


def _compare(entry: Contender, found: Tensor, expected: Tensor) -> None:
    found = found[: len(expected)].to(expected.device)
    if expected.is_floating_point():
        entry.error = float((found.double() - expected).norm() / expected.double().norm())
    else:
        entry.equal = float((found == expected).all(dim=-1).double().mean())


def ours(name: str, x: Tensor, *about) -> str:
    """``vqkv`` and which twin of the kernel serves a tensor like ``x``; ``about``: see ``kernels.which``."""
    return f"vqkv ({kernels.which(name, x, *about)})"


def gaussian(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Standard normal float32, the same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@cache
def skip(name: str, reason: str) -> None:
    """Say once a process that something is not timed, and why."""
    print(f"skipped {name}: {reason}")
