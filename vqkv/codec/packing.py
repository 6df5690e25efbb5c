"""n-bit integers <-> bytes: one contiguous little-endian bit string per row, padded to a whole byte."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.errors import DataError, FormatError

MAX_BITS = 16


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., count) of any integer type -> uint8 (..., ceil(count * bits / 8)).

    Code i occupies bits i*bits to (i+1)*bits of its row. Raises ``DataError`` for a code that ``bits`` cannot hold.
    """
    _check_bits(bits)
    count = codes.shape[-1]
    if codes.numel():
        low, high = (int(value) for value in torch.aminmax(codes))
        if low < 0 or high >= 1 << bits:
            raise DataError(f"codes from {low} to {high} do not fit {bits} bits (0 to {(1 << bits) - 1})")
    # Eight codes fill exactly ``bits`` bytes; as columns, every operation below runs over contiguous memory.
    columns = F.pad(codes.to(torch.int32), (0, -count % 8)).reshape(-1, 8).T.contiguous()
    packed = columns.new_zeros((bits, columns.shape[1]))
    for column, byte, shift, span in _layout(bits):
        value = columns[column] << shift
        for part in range(span):
            packed[byte + part] |= (value >> 8 * part) & 255
    rows = packed.to(torch.uint8).T.reshape(*codes.shape[:-1], -(-count // 8) * bits)
    return rows[..., : packed_size(count, bits)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack``: uint8 (..., ceil(count * bits / 8)) -> int64 (..., count).

    Raises ``FormatError`` if the rows are not as long as ``count`` codes make them.
    """
    _check_bits(bits)
    size = packed_size(count, bits)
    if packed.dtype != torch.uint8 or packed.shape[-1] != size:
        raise FormatError(f"{count} codes of {bits} bits take {size} bytes, got {packed.shape[-1]} of {packed.dtype}")
    full = -(-count // 8) * bits
    columns = F.pad(packed, (0, full - size)).reshape(-1, bits).T.to(torch.int32).contiguous()
    codes = columns.new_empty((8, columns.shape[1]))
    for column, byte, shift, span in _layout(bits):
        value = columns[byte].clone()
        for part in range(1, span):
            value |= columns[byte + part] << 8 * part
        codes[column] = (value >> shift) & ((1 << bits) - 1)
    rows = codes.T.to(torch.int64).reshape(*packed.shape[:-1], -(-count // 8) * 8)
    return rows[..., :count].contiguous()


def _layout(bits: int) -> list[tuple[int, int, int, int]]:
    """For each of eight codes: its number, first byte, shift in it, and how many bytes it touches."""
    starts = [(column, column * bits) for column in range(8)]
    return [(column, bit // 8, bit % 8, packed_size(1, bit % 8 + bits)) for column, bit in starts]


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise DataError(f"{bits} bits per code: 1 to {MAX_BITS} are possible")
