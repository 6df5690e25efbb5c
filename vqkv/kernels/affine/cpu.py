"""Affine quantization on a CPU in one pass over memory, in compiled loops: the ends of groups, scaling, codes to bytes.

The arithmetic is that of ``naive``, operation by operation, and so are the bits.
"""

import math

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.affine import naive
from vqkv.kernels.machine import compiled, index, serves, spread
from vqkv.kernels.packed import Affine

BUFFER, THREE = index(2048), index(3)  # codes that are packed at a time; bits of a byte's number
COST = 8  # additions that a value is worth
HALF = np.float32(1 << 23)  # a float32 that large has no fraction
LARGEST, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # bits of a float
MOST = np.int32(0x477FE000)  # of 65504, the largest fp16
FLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # numba knows no fp16 on a CPU


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """``naive.affine_encode``."""
    groups = x.detach().float().contiguous().unflatten(-1, (-1, group_size))
    found = pack_between_ends(groups, bits) if packs(groups, bits) else None
    return Affine(*found, bits) if found else naive.affine_encode(x, bits, group_size)


def takes(x: Tensor) -> bool:
    """Tell whether x is for compiled loops: contiguous float32 on a CPU."""
    return serves(x) and x.dtype is torch.float32 and x.is_contiguous() and x.numel() > 0


def ends(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Smallest and largest of the last axis, of 0 and -0 the first; None if there is a NaN."""
    low, high = (torch.empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    arrays = [each.view(torch.int32).numpy() for each in (_rows(x), low.view(-1), high.view(-1))]
    return (low, high) if all(_spread(find_ends, x, *arrays)) else None


def shift_and_divide(x: Tensor, low: Tensor, span: Tensor) -> Tensor:
    """(x - low) / span, and x - low where the span is not above 0: low and span of each last axis."""
    out = torch.empty_like(x)
    _spread(divide, x, _rows(x).numpy(), _rows(out).numpy(), *_flat(low, span))
    return out


def multiply_and_shift(y: Tensor, low: Tensor, span: Tensor) -> None:
    """y = y * span + low, in place."""
    _spread(multiply, y, _rows(y).numpy(), *_flat(low, span))


def rounded(y: Tensor, bits: int) -> Tensor:
    """round(y * (2^bits - 1)), at least 0 and at most that: uint8, the shape of y."""
    codes = torch.empty(y.shape, dtype=torch.uint8)
    round_all(y.detach().view(-1).numpy(), np.float32(2**bits - 1), codes.view(-1).numpy())
    return codes


def packs(x: Tensor, bits: int) -> bool:
    """Whether ``pack_between_ends`` does rows like x's (batch, num_kv_heads, rows, ...): they fill whole bytes."""
    return bits in (1, 2, 4, 8) and takes(x) and x.ndim > 3 and math.prod(x.shape[3:]) * bits % 8 == 0


def pack_between_ends(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Ends and codes in one pass over rows like x's (see ``packs``): bit strings, uint8 (batch, num_kv_heads, rows,
    bytes), and low and high in fp16, the shape of x without its last axis; None if there is a NaN."""
    packed = torch.empty(*x.shape[:3], math.prod(x.shape[3:]) * bits // 8, dtype=torch.uint8)
    low, high = (torch.empty(x.shape[:-1], dtype=torch.float16) for _ in range(2))
    rows, groups = _rows(x), math.prod(x.shape[3:-1])
    numbers = rows.view(torch.int32).numpy()
    fixed = (rows.numpy(), numbers, FLOAT16, groups, bits, packed.view(-1).numpy(), *_halves(low, high))
    cost = COST * groups * x.shape[-1]
    done = spread(lambda i, j: pack_rows(i * groups, j * groups, *fixed), len(rows) // groups, cost)
    return (packed, low, high) if all(done) else None


def _rows(x: Tensor) -> Tensor:
    return x.detach().view(-1, x.shape[-1])


def _flat(*each: Tensor) -> list[np.ndarray]:
    return [x.contiguous().view(-1).numpy() for x in each]


def _halves(*each: Tensor) -> list[np.ndarray]:
    return [x.view(-1).numpy().view(np.uint16) for x in each]


def _spread(loop, x: Tensor, *arrays: np.ndarray) -> list:
    """``loop`` over parts of arrays that each have a row for every last axis of x."""
    return spread(lambda i, j: loop(*(each[i:j] for each in arrays)), x.numel() // x.shape[-1], COST * x.shape[-1])


@compiled()
def pack_rows(start, stop, x, numbers, float16, groups, bits, packed, low, high):
    """Codes of (x - low) / span by rows start, ..., stop - 1 of x (rows, size), of which ``groups`` fill whole bytes,
    the first code in the lowest bits of a byte, about 2,048 at a time; and each row's ends. ``numbers``: x's bits."""
    size, width, most = index(x.shape[1]), index(bits), np.float32((1 << bits) - 1)
    period = index(groups) * max(index(1), BUFFER // (index(groups) * size))
    codes, other = np.empty(period * size, np.uint8), np.empty(period * size, np.uint8)
    for first in range(index(start), index(stop), period):
        rows = min(period, index(stop) - first)
        for i in range(rows):
            row = first + i
            least, largest = extremes(numbers, row)
            if least < np.int32(~INFINITE) or largest > INFINITE:
                return False
            low[row], high[row] = half(end(numbers, row, least)), half(end(numbers, row, largest))
            bottom = float16[low[row]]
            step = float16[high[row]] - bottom
            step = step if step > 0 else np.float32(1)
            for j in range(size):
                codes[i * size + j] = code_of((x[row, j] - bottom) / step, most)
        join(codes, other, rows * size, bits, packed, first * size * width >> THREE)
    return True


@compiled()
def half(bits):
    """The bits of a float32, not NaN, -> those of the nearest fp16 number, ties to even, of at most 65504."""
    size = min(bits & LARGEST, MOST)
    sign = np.int32(bits >> np.int32(16)) & np.int32(0x8000)
    shift = max(np.int32(13), np.int32(126) - np.int32(size >> np.int32(23)))  # bits to drop; more below 2^-14
    if shift > 24:
        return np.uint16(sign)
    tail = size if shift == 13 else size & np.int32(0x7FFFFF) | np.int32(0x800000)
    whole = np.int32(tail >> shift)
    rest, tie = tail & np.int32((np.int32(1) << shift) - 1), np.int32(1) << np.int32(shift - 1)
    whole += np.int32(rest > tie or (rest == tie and whole & 1))
    return np.uint16(sign | (whole - np.int32(0x1C000) if shift == 13 else whole))


@compiled()
def extremes(numbers, row):
    """The least and largest of a row, as ``in_order``."""
    least, most = LARGEST, np.int32(~LARGEST)
    for j in range(index(numbers.shape[1])):
        key = in_order(numbers[row, j])
        least = key if key < least else least
        most = key if key > most else most
    return least, most


@compiled()
def find_ends(x, low, high):
    """Bits of low and high (rows,) of x (rows, size), all as integers, of which 16 are compared at a time; False for a
    NaN."""
    for i in range(index(len(x))):
        least, most = extremes(x, i)
        if least < np.int32(~INFINITE) or most > INFINITE:
            return False
        low[i], high[i] = end(x, i, least), end(x, i, most)
    return True


@compiled()
def in_order(bits):
    """A float's bits -> an integer that is smaller for smaller ones; its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & LARGEST))


@compiled()
def end(x, i, key):
    """The bits of that key; for a zero's, those of the first zero in the row."""
    if key == 0 or key == -1:
        for j in range(index(x.shape[1])):
            if x[i, j] & LARGEST == 0:
                return x[i, j]
    return in_order(key)


@compiled()
def divide(x, out, low, span):
    """out = (x - low) / span by rows."""
    for i in range(index(len(x))):
        start, step = low[i], span[i] if span[i] > 0 else np.float32(1)
        for j in range(index(x.shape[1])):
            out[i, j] = (x[i, j] - start) / step


@compiled()
def multiply(y, low, span):
    """y = y * span + low by rows."""
    for i in range(index(len(y))):
        start, step = low[i], span[i]
        for j in range(index(y.shape[1])):
            y[i, j] = y[i, j] * step + start


@compiled()
def round_all(y, most, codes):
    """Codes (values,) of y (values,)."""
    for j in range(index(len(y))):
        codes[j] = code_of(y[j], most)


@compiled()
def code_of(value, most):
    """round(value * most) within 0 and ``most``; 0 for a NaN."""
    value = value * most
    value = value if value > 0 else np.float32(0)
    value = value if value < most else most
    return np.uint8(np.int32(value + HALF))


@compiled()
def join(codes, other, size, width, packed, first):
    """Codes of so many bits, one a byte, side by side in packed[first:]. Overwrites ``codes`` and ``other``."""
    while width < 8:
        size >>= index(1)
        for j in range(size):
            other[j] = codes[j + j] | codes[j + j + index(1)] << np.uint8(width)
        codes, other, width = other, codes, 2 * width
    for j in range(size):
        packed[first + j] = codes[j]
