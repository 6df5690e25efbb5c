"""Speed of an operation at best on this machine: what it must move over the rate of a copy, or what it must
multiply over the rate of a matrix product, whichever takes longer. Both rates are measured in turn with operations."""

from dataclasses import dataclass

from torch import Tensor

from vqkv.cache.meter import tensor_bytes
from vqkv.kernels.view import Coded, Grouped, KernelView


@dataclass(frozen=True)
class Demand:
    """Demand of a call: ``flops``, ``bytes`` (inputs read and results written once), for so many packed ``values``."""

    flops: float
    bytes: float
    values: int
    exact: bool = False  # products in fp32; else in whatever dtype is fastest


@dataclass(frozen=True)
class Roofline:
    """Measured rates: ``copy`` in bytes/s, read and written ones both counted, ``matmul`` in flop/s by dtype."""

    copy: float
    matmul: dict[str, float]

    def bound(self, work: Demand) -> float:
        """Return the least milliseconds that the work takes."""
        rate = self.matmul["float32"] if work.exact else max(self.matmul.values())
        return 1e3 * max(work.bytes / self.copy, work.flops / rate)


def encode(x: Tensor, codebooks: Tensor, beam: int = 1, code_bytes: float = 8) -> Demand:
    """Count residual VQ of x (rows, dim): a product of every residual (with a beam, of every candidate) and code."""
    rows, (num_quantizers, codebook_size, dim) = len(x), codebooks.shape
    searches = 1 + (num_quantizers - 1) * beam
    moved = 4 * (rows * dim + codebooks.numel()) + code_bytes * rows * num_quantizers
    return Demand(2 * rows * dim * codebook_size * searches, moved, rows * dim, exact=True)


def decode(packed: KernelView) -> Demand:
    """Decode a KernelView to values in fp32."""
    values = packed.shape.numel()
    return Demand(values * _flops(packed), tensor_bytes(packed) + 4 * values, values)


def attention(query: Tensor, keys, values, rotated: bool = False) -> Demand:
    """Query (batch, heads, new_tokens, head_dim) against keys and values, packed or plain: two products a query and
    key; what is packed is decoded once, and keys are ``rotated``. The result has the query's size."""
    stored = keys.shape.numel()
    products = 4 * query.numel() * keys.shape[2]
    decoding = 0 if isinstance(keys, Tensor) else stored * (_flops(keys) + _flops(values) + 4 * rotated)
    return Demand(products + decoding, tensor_bytes(keys, values) + 2 * query.nbytes, 2 * stored)


def _flops(packed: KernelView) -> int:
    """To decode one value: offset and span, or an addition a stage and the scale; what is only looked up takes none."""
    if isinstance(packed, Grouped):
        return 0
    return packed.codebooks.shape[1] + (packed.scale is not None) if isinstance(packed, Coded) else 2
