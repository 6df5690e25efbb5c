"""n-bit integers <-> bytes: one contiguous little-endian bit string per row, padded to a whole byte."""

import torch
from torch import Tensor

from vqkv.errors import DataError, FormatError
from vqkv.kernels import pack_codes, unpack_codes

MAX_BITS = 16


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., count) of any integer type -> uint8 (..., ceil(count * bits / 8)).

    Code i occupies bits i*bits to (i+1)*bits of its row. Raises ``DataError`` for a code that ``bits`` cannot hold.
    """
    _check_bits(bits)
    if codes.numel() and not (codes.dtype == torch.uint8 and bits >= 8):
        low, high = (int(value) for value in torch.aminmax(codes))
        if low < 0 or high >= 1 << bits:
            raise DataError(f"codes from {low} to {high} do not fit {bits} bits (0 to {(1 << bits) - 1})")
    return pack_codes(codes, bits)


def unpack(packed: Tensor, bits: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """The inverse of ``pack``: uint8 (..., ceil(count * bits / 8)) -> codes (..., count) of type ``dtype``.

    At 8 bits in uint8 they share ``packed``'s storage. Raises ``FormatError`` if the rows are not as long as ``count``
    codes make them.
    """
    check_packed(packed, bits, count)
    return unpack_codes(packed, bits, count).to(dtype).contiguous()


def check_packed(packed: Tensor, bits: int, count: int) -> None:
    """Raise ``FormatError`` unless ``packed`` is bytes, as many in a row as ``count`` codes of ``bits`` bits take."""
    _check_bits(bits)
    size = packed_size(count, bits)
    if packed.dtype != torch.uint8 or packed.shape[-1] != size:
        raise FormatError(f"{count} codes of {bits} bits take {size} bytes, got {packed.shape[-1]} of {packed.dtype}")


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise DataError(f"{bits} bits per code: 1 to {MAX_BITS} are possible")
