"""Which implementation of a kernel runs. The Triton twins will be chosen here, for tensors on a GPU."""

from torch import Tensor

from vqkv.kernels import bits as bits_kernels
from vqkv.kernels import cpu


def implementation(x: Tensor):
    """The module whose kernels serve tensors on ``x``'s device."""
    return cpu


def name(x: Tensor) -> str:
    """Its name, for reports: ``cpu`` (plain torch, any device)."""
    return implementation(x).__name__.rpartition(".")[2]


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """x (..., dim), codebooks (num_quantizers, codebook_size, dim) -> codes (..., num_quantizers), int64.

    ``beam``: how many partial sequences of codes are kept from stage to stage.
    """
    return implementation(x).rvq_encode(x, codebooks, beam)


def rvq_candidates(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    """All sequences that beam search ends with, best first: (..., candidates, num_quantizers). For learning."""
    return cpu.rvq_candidates(x, codebooks, beam)


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """codes (..., num_quantizers) -> sums of codes (..., dim), float32."""
    return implementation(codes).rvq_decode(codes, codebooks)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., count) of any integer type, all from 0 to 2^bits - 1, -> uint8 (..., ceil(count * bits / 8))."""
    return bits_kernels.pack_codes(codes, bits)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_codes``: codes (..., count) in some integer type; for 8 bits, ``packed`` itself."""
    return bits_kernels.unpack_codes(packed, bits, count)


def by_byte(table: Tensor, bits: int) -> Tensor:
    """What every byte of packed codes stands for: table (2^bits, values), ``bits`` dividing 8 -> (256, values of all
    codes of a byte), for ``lookup``."""
    return bits_kernels.by_byte(table, bits)


def lookup(packed: Tensor, table: Tensor) -> Tensor:
    """Every byte replaced by its row of a table: uint8 (..., size), (256, values) -> (..., size * values)."""
    return bits_kernels.lookup(packed, table)
