"""Speed of an operation at best on this machine: what it must move over the rate of a copy, or what it must
multiply over the rate of a matrix product, whichever takes longer. Both rates are measured beside the operations."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vqkv.cache.meter import tensor_bytes
from vqkv.kernels.view import Affine, KernelView, Mapped
from vqkv.study.bench.timing import measure

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes: far more than any cache holds
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices that are multiplied
HOPELESS = 10  # times slower than the fastest product: a dtype that the processor has no instructions for


@dataclass(frozen=True)
class Demand:
    """Demand of one call on the machine: ``flops`` (two for a multiplication that is added to a sum), ``bytes`` (inputs
    read once, results written once), and for how many ``values`` (of the tensor that is packed or read back)."""

    flops: float
    bytes: float
    values: int
    exact: bool = False  # products in fp32; else in whatever dtype is fastest


@dataclass(frozen=True)
class Roofline:
    """Measured rates: ``copy`` in bytes/s, read and written ones both counted, ``matmul`` in flop/s by dtype."""

    copy: float
    matmul: dict[str, float]

    @classmethod
    def of(cls, probed: dict[str, tuple[float, list[float]]]) -> "Roofline":
        """The rates of the fastest repetitions of ``probe``."""
        rates = {label: count / min(taken) * 1e3 for label, (count, taken) in probed.items()}
        copy = rates.pop("copy")
        return cls(copy, {label.removeprefix("matmul "): rate for label, rate in rates.items()})

    def bound(self, work: Demand) -> tuple[float, str]:
        """The least milliseconds that the work takes, and what limits it: ``copy`` or ``matmul``."""
        rate = self.matmul["float32"] if work.exact else max(self.matmul.values())
        times = {"copy": work.bytes / self.copy * 1e3, "matmul": work.flops / rate * 1e3}
        limit = max(times, key=times.get)
        return times[limit], limit


def probes(device: str) -> dict[str, tuple]:
    """Calls that measure the rates: label -> (call, what it moves in bytes or does in flops)."""
    source = torch.ones(COPIED[device] // 4, device=device)
    target, side = torch.empty_like(source), SIDE[device]
    made = {"copy": (lambda: target.copy_(source), 2 * source.nbytes)}
    for name, dtype in DTYPES.items():
        a, out = torch.ones(2, side, side, dtype=dtype, device=device)
        made[f"matmul {name}"] = (partial(torch.mm, a, a, out=out), 2 * side**3)
    return made


def probe(device: str, repetitions: int, leave_out: Collection[str]) -> dict[str, tuple[float, list[float]]]:
    """On as many threads as torch has now, by label: what was counted, and the milliseconds of every repetition."""
    made = {label: each for label, each in probes(device).items() if label not in leave_out}
    times = measure([call for call, _ in made.values()], repetitions, device)
    return {label: (count, taken) for (label, (_, count)), taken in zip(made.items(), times, strict=True)}


def hopeless(probed: dict[str, tuple[float, list[float]]]) -> set[str]:
    """Labels of products that are so slow in their dtype that they bound nothing, and need not be probed again; fp32
    ones bound what is exact."""
    rates = {label: count / min(taken) for label, (count, taken) in probed.items() if label.startswith("matmul")}
    return {label for label, rate in rates.items() if rate * HOPELESS < max(rates.values())} - {"matmul float32"}


def encode(x: Tensor, codebooks: Tensor, beam: int = 1, code_bytes: float = 8) -> Demand:
    """Residual VQ of x (rows, dim): a product of every residual with every code; with a beam one more for each further
    candidate from the second stage on. fp32 in, ``code_bytes`` a code out."""
    rows, (num_quantizers, codebook_size, dim) = len(x), codebooks.shape
    searches = 1 + (num_quantizers - 1) * beam
    moved = 4 * (rows * dim + codebooks.numel()) + code_bytes * rows * num_quantizers
    return Demand(2 * rows * dim * codebook_size * searches, moved, rows * dim, exact=True)


def sum_of_codes(codes: Tensor, codebooks: Tensor) -> Demand:
    """Codes (rows, num_quantizers) -> fp32 sums of codes: one addition a value and stage."""
    values = len(codes) * codebooks.shape[-1]
    return Demand(values * len(codebooks), codes.nbytes + codebooks.nbytes + 4 * values, values)


def statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> Demand:
    """Counts and sums of residuals by code: a subtraction and an addition a value and stage, fp32 results."""
    results = 4 * (codebooks.numel() + codebooks.shape[0] * codebooks.shape[1])
    flops = 2 * x.numel() * len(codebooks)
    return Demand(flops, x.nbytes + codes.nbytes + codebooks.nbytes + results, x.numel())


def pack(codes: Tensor, bits: int) -> Demand:
    """Codes -> bits, or back: no arithmetic that counts."""
    return Demand(0, codes.nbytes + codes.numel() * bits / 8, codes.numel())


def affine_encode(x: Tensor, packed: Affine) -> Demand:
    """Two comparisons for the ends, a subtraction and a multiplication a value."""
    return Demand(4 * x.numel(), x.nbytes + tensor_bytes(packed), x.numel())


def decode(packed: KernelView, itemsize: int = 4, base: Tensor | None = None, turned: bool = False) -> Demand:
    """KernelView -> values of ``itemsize`` bytes, added to ``base`` and rotated (cos and sin in fp32 are read)."""
    values = packed.shape.numel()
    angles = 8 * packed.shape[2] * packed.shape[3] if turned else 0
    flops = values * (_flops(packed) + (base is not None) + 4 * turned)
    moved = tensor_bytes(packed) + itemsize * values + (0 if base is None else base.nbytes) + angles
    return Demand(flops, moved, values)


def attention(query: Tensor, keys, values, turned: bool = False) -> Demand:
    """Query (batch, heads, new_tokens, head_dim) against keys and values, packed or plain: two products a query and
    key; what is packed is decoded once. The result has the query's size."""
    seq_len, stored = keys.shape[2], keys.shape.numel()
    products = 4 * query.shape[0] * query.shape[1] * query.shape[2] * seq_len * query.shape[3]
    decoding = 0 if isinstance(keys, Tensor) else stored * (_flops(keys) + _flops(values) + 4 * turned)
    return Demand(products + decoding, tensor_bytes(keys, values) + 2 * query.nbytes, 2 * stored)


def _flops(packed: KernelView) -> int:
    """To decode one value: offset and span, or an addition a stage and the scale; what is only looked up takes none."""
    if isinstance(packed, Mapped):
        return 0
    return 2 if isinstance(packed, Affine) else packed.codebooks.shape[1] + (packed.scale is not None)
