"""Codes, or the bit strings that hold them, -> rows of the codebooks one above the other, which torch then adds up."""

import numpy as np
import torch
from torch import Tensor

from vqkv.errors import FormatError
from vqkv.kernels.machine import compiled, index, spread

TYPES = (torch.uint8, torch.int32, torch.int64)
COST = 8  # additions that a code's place is worth


def places(codes: Tensor, offsets: np.ndarray, size: int) -> Tensor:
    """codes (rows, K), of any integer type, -> int32 (rows, K): code + its stage's offset. ``offsets`` int32: those of
    the stages, any number of times over. Raises ``FormatError`` for a code that is not below ``size``."""
    codes = (codes if codes.dtype in TYPES else codes.to(torch.int32)).contiguous()
    out = torch.empty(codes.shape, dtype=torch.int32)
    _check(_move(codes.view(-1).numpy(), offsets, size, out.view(-1).numpy()), size)
    return out


def places_packed(packed: Tensor, bits: int, offsets: np.ndarray, count: int, size: int) -> Tensor:
    """The same from bit strings of ``count`` codes each: packed uint8 (rows, bytes) -> int32 (rows, count)."""
    if bits == 8:
        return places(packed, offsets, size)
    strings, out = packed.contiguous().numpy(), torch.empty(len(packed), count, dtype=torch.int32)
    found = out.numpy()
    parts = spread(lambda i, j: _unpack(strings[i:j], bits, offsets, size, found[i:j]), len(packed), COST * count)
    _check(all(parts), size)
    return out


def _check(fine: bool, size: int) -> None:
    if not fine:
        raise FormatError(f"a code is not below codebook_size {size}: altered payload")


@compiled()
def _move(codes, offsets, size, out):
    """out = codes + offsets, these over and over; whether all codes are in 0 ... size - 1."""
    count, period, most = index(len(codes)), index(len(offsets)), index(size)
    wrong = np.int32(0)
    for start in range(index(0), count, period):
        for j in range(min(period, count - start)):
            code = codes[start + j]
            wrong |= np.int32(index(code) >= most)  # below 0: very large
            out[start + j] = np.int32(code) + offsets[j]
    return wrong == 0


@compiled()
def _unpack(strings, bits, offsets, size, out):
    """The same for bit strings (rows, bytes) and out (rows, count)."""
    length, count = index(strings.shape[1]), index(out.shape[1])
    width, most, mask, three = index(bits), np.int32(size), np.uint32((1 << bits) - 1), index(3)
    wrong, periods = np.int32(0), index(len(offsets))
    for row in range(index(len(strings))):
        position, place = index(0), index(0)
        for i in range(count):
            first = position >> three
            word = np.uint32(strings[row, first])
            if first + index(2) < length:
                word |= np.uint32(strings[row, first + index(1)]) << np.uint32(8)
                word |= np.uint32(strings[row, first + index(2)]) << np.uint32(16)
            elif first + index(1) < length:
                word |= np.uint32(strings[row, first + index(1)]) << np.uint32(8)
            code = np.int32(word >> np.uint32(position & index(7)) & mask)
            wrong |= np.int32(code >= most)
            out[row, i] = code + offsets[place]
            position += width
            place = place + index(1) if place + index(1) < periods else index(0)
    return wrong == 0
