"""Cases of a bench: every implementation of an operation on one problem is a case, and a row of the table."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vqkv import kernels
from vqkv.kernels import naive
from vqkv.study.bench.roofline import Demand


@dataclass(frozen=True)
class Sizes:
    """Shapes of what is timed: ``rows`` vectors for residual VQ, ``tokens`` of one layer's keys for what packs and
    reads them, ``runs`` [batch size, context] for attention. A row of ``sweep`` is timed for each of
    ``codebook_sizes`` (largest depth) and ``depths`` (largest codebooks)."""

    num_attention_heads: int
    num_key_value_heads: int
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
        return 1, self.num_key_value_heads, self.tokens, self.head_dim


@dataclass(eq=False)
class Case:
    """One implementation that solves a problem.

    ``equal``: the share of its results (codes of a vector, bytes of a token) that equal the reference's; ``error``: how
    far its values are from the expected ones, relative in the root mean square.
    """

    problem: "Problem"
    implementation: str
    call: Callable
    equal: float | None = None
    error: float | None = None


@dataclass
class Problem:
    """Inputs of one operation, and the cases that solve it. ``format`` says what is stored: int4, 8x2048 d=32, ..."""

    operation: str
    format: str
    shape: str
    work: Demand
    dtype: str = "float32"
    cases: list[Case] = field(default_factory=list)

    def add(
        self, implementation: str, call: Callable, expected: Tensor | None = None, read: Callable | None = None
    ) -> None:
        """Time ``call``. Its result, made a tensor by ``read``, is compared with ``expected``, or its first rows."""
        case = Case(self, implementation, call)
        if expected is not None:
            result = (read(call()) if read else call())[: len(expected)].to(expected.device)
            if expected.is_floating_point():
                case.error = float((result.double() - expected).norm() / expected.double().norm())
            else:
                case.equal = float((result == expected).all(dim=-1).double().mean())
        self.cases.append(case)

    def add_ours(self, kernel: str, like: Tensor, *arguments, expected: Tensor, **more) -> None:
        """Time our kernel of this name, of the twin that serves a tensor like ``like``, and plain torch."""
        self.add(ours(kernel, like), partial(getattr(kernels, kernel), *arguments), expected, **more)
        self.add("plain torch", partial(PLAIN.get(kernel) or getattr(naive, kernel), *arguments), expected, **more)

    def add_peer(self, name: str, prepare: Callable, expected: Tensor | None = None) -> None:
        """Time the call that ``prepare()`` returns with its ``read``; where that fails, a warning says so."""
        try:
            call, read = prepare()
            self.add(name, call, expected, read)
        except Exception as error:  # of code that is not ours, on a device that it may not know
            warnings.warn(f"{name} is not timed: {type(error).__name__}: {error}", stacklevel=2)


def plain_encode(x: Tensor, codebooks: Tensor) -> Tensor:
    """Find codes (rows, num_quantizers) of x (rows, dim) by torch's distances, a stage at a time."""
    residual, codes = x, []
    for codebook in codebooks:
        codes.append(torch.cat([torch.cdist(part, codebook).argmin(dim=-1) for part in residual.split(8192)]))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1)


Operation = Callable[[Sizes], Iterator[Problem]]
# For other kernels plain torch is their naive twin.
PLAIN: dict[str, Callable] = {"rvq_encode": plain_encode}


def ours(kernel: str, like: Tensor, *about) -> str:
    """Name ``vqkv`` and which twin of the kernel serves a tensor like this; ``about``: see ``kernels.which``."""
    return f"vqkv ({kernels.which(kernel, like, *about)})"


def gaussian(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Draw standard normal float32, the same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)
