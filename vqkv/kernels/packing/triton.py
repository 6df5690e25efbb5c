"""n-bit codes <-> bytes on a GPU, in one pass: a lane makes one word of the string from the codes in it, or one code
from the words that it lies in."""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM = 1024  # words packed or codes unpacked by a program of four warps: eight a thread


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., count), integers below 2^bits, into uint8 (..., ceil(count * bits / 8)); bits: 1 to 16."""
    count = codes.shape[-1]
    size = (count * bits + 7) // 8
    if bits == 8:
        return codes.to(torch.uint8, copy=True).contiguous()
    packed = torch.empty(*codes.shape[:-1], size, dtype=torch.uint8, device=codes.device)
    if not codes.numel():
        return packed
    rows, count, size = _rows(codes.numel() // count, count, size, bits)
    codes = codes.contiguous()
    out, word = words_of(packed.view(rows, size))
    length = out.shape[-1]
    grid, tile = _tile(rows, length, PROGRAM)
    with torch.cuda.device_of(codes):
        _pack[grid](codes, out, rows, count, length, bits, word, touched(bits, word), *tile)
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo it, in the types of ``packing.cpu``."""
    if bits == 8:
        return packed
    dtype = torch.uint8 if bits < 8 else torch.int16 if bits < 16 else torch.int32
    codes = torch.empty(*packed.shape[:-1], count, dtype=dtype, device=packed.device)
    packed = packed.contiguous()
    if not codes.numel():
        return codes
    size = packed.shape[-1]
    rows, count, size = _rows(codes.numel() // count, count, size, bits)
    words, word = words_of(packed.view(rows, size))
    grid, tile = _tile(rows, count, PROGRAM)
    with torch.cuda.device_of(codes):
        _unpack[grid](words, codes, rows, count, words.shape[-1], bits, word, spanned(bits, word), *tile)
    return codes


def words_of(packed: Tensor) -> tuple[Tensor, int]:
    """View strings of bytes as 32-bit words where each starts and ends at one; return them and a word's bits."""
    strides = packed.stride()
    aligned = packed.shape[-1] % 4 == packed.data_ptr() % 4 == packed.storage_offset() % 4 == 0
    if aligned and strides[-1] == 1 and all(stride % 4 == 0 for stride in strides[:-1]):
        return packed.view(torch.int32), 32
    return packed, 8


@triton.constexpr_function
def spanned(bits: int, word: int) -> int:
    """Count words that a code may lie in: it begins at most word - gcd(word, bits) after a word's start."""
    return -(-(word - min(word, bits & -bits) + bits) // word)


def touched(bits: int, word: int) -> int:
    """Count codes that may lie in a word."""
    return -(-(bits - gcd(word, bits) + word) // bits)


def _rows(rows: int, count: int, size: int, bits: int) -> tuple[int, int, int]:
    """Return rows, codes and bytes of each: rows that end with a complete byte are one long row."""
    return (1, rows * count, rows * size) if count * bits % 8 == 0 else (rows, count, size)


def _tile(rows: int, length: int, most: int) -> tuple[tuple[int], tuple[int, int]]:
    """Return the grid, and a program's rows and part of their length."""
    width = min(triton.next_power_of_2(length), most)
    height = min(triton.next_power_of_2(rows), most // width)
    return (triton.cdiv(rows, height) * triton.cdiv(length, width),), (height, width)


@triton.jit
def _part_of(length, R: tl.constexpr, W: tl.constexpr):
    """Return this program's rows (R, 1) and the start in them; 64 bits, as strings may be long."""
    blocks = tl.cdiv(length, W)
    row = (tl.program_id(0) // blocks).to(tl.int64) * R + tl.arange(0, R)[:, None]
    return row, (tl.program_id(0) % blocks).to(tl.int64) * W


@triton.jit
def code_at(words, bit, last, BITS: tl.constexpr, WORD: tl.constexpr, SPANNED: tl.constexpr):
    """Read the code that begins ``bit`` bits after ``words``. No word after ``last`` is read: a code that ends in
    the last one has its bits all the same, and lanes without a code read anything."""
    at = bit // WORD
    string = tl.load(words + tl.minimum(at, last)).to(tl.uint32, bitcast=WORD == 32)
    if SPANNED == 1:
        code = string >> (bit % WORD)
    else:
        wide = string.to(tl.uint64 if WORD == 32 else tl.uint32)
        for n in tl.static_range(1, SPANNED):
            further = tl.load(words + tl.minimum(at + n, last)).to(tl.uint32, bitcast=WORD == 32)
            wide = wide | (further.to(wide.dtype) << (n * WORD))
        code = wide >> (bit % WORD).to(wide.dtype)
    return code.to(tl.int32) & ((1 << BITS) - 1)


@triton.jit
def _pack(
    codes, words, rows, count, length,
    BITS: tl.constexpr, WORD: tl.constexpr, TOUCHED: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row, start = _part_of(length, R, W)
    lane = tl.arange(0, W)[None, :]
    first = start * WORD // BITS  # code of the program's first bit
    bit = (start * WORD % BITS).to(tl.int32) + lane * WORD
    codes += row * count + first
    left = tl.minimum(count - first, 1 << 30).to(tl.int32)
    word = tl.zeros([R, W], tl.int32)
    for n in tl.static_range(TOUCHED):  # the first code begins in an earlier word, or here
        index, shift = bit // BITS + n, n * BITS - bit % BITS
        there = (row < rows) & (index < left) & (shift < WORD)
        code = tl.load(codes + index, mask=there, other=0).to(tl.int32)
        word |= (code >> -shift) if n == 0 else (code << tl.minimum(shift, WORD - 1))
    there = (row < rows) & (start + lane < length)
    tl.store(words + row * length + start + lane, word.to(words.dtype.element_ty), mask=there)


@triton.jit
def _unpack(
    words, codes, rows, count, length,
    BITS: tl.constexpr, WORD: tl.constexpr, SPANNED: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row, start = _part_of(count, R, W)
    lane = tl.arange(0, W)[None, :]
    first = start * BITS // WORD  # word of the program's first bit
    bit = (start * BITS % WORD).to(tl.int32) + lane * BITS
    last = tl.minimum(length - 1 - first, 1 << 30).to(tl.int32)
    code = code_at(words + tl.minimum(row, rows - 1) * length + first, bit, last, BITS, WORD, SPANNED)
    there = (row < rows) & (start + lane < count)
    tl.store(codes + row * count + start + lane, code.to(codes.dtype.element_ty), mask=there)
