"""Packed tokens -> operands of attention's matrix products: half a head of a tile's tokens, decoded in registers.

A column of a half tile is a channel, in the order in which codes come out of their words (``channels_of``); what a
token is scaled by, and what is added to it, stay beside the tile where they can.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from vqkv.kernels.packing.triton import code_at, spanned


@dataclass(frozen=True)
class Format:
    """What a kernel is compiled for: an ``Affine`` or ``Coded`` view but for its tensors."""

    KIND: str  # affine or coded
    LIGHT: bool  # whether decoding takes few registers
    BITS: int  # of a code
    ROW_BYTES: int
    GROUPS: int
    DIM: int = 0
    QUANTIZERS: int = 0
    SIZE: int = 0
    TABLES: int = 0
    SCALE_TOKENS: int = 0  # tokens that share a scale, 0 without one
    STRIDED: bool = False


UNIT = tl.constexpr(2.0**24)  # the smallest fp16 number, which the code 1 is read as, is 1 over this


@triton.constexpr_function
def columns(width):
    """Columns of a half tile: a power of two, as many as a matrix product needs at least."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def _words(codes, row, FIRST: tl.constexpr, COUNT: tl.constexpr, F: tl.constexpr):
    """The words of codes FIRST, ..., FIRST + COUNT - 1 of each row: int32 (tokens, words); zeros beyond the end."""
    EACH: tl.constexpr = 32 // F.BITS
    word = FIRST // EACH + tl.arange(0, COUNT // EACH)
    words = codes.to(tl.pointer_type(tl.int32)) + row[:, None] * (F.ROW_BYTES // 4) + word[None, :]
    return tl.load(words, (word < F.ROW_BYTES // 4)[None, :], 0)


@triton.jit
def _spread(words, STEP: tl.constexpr, BITS: tl.constexpr):
    """Words side by side with themselves, shifted by STEP, STEP / 2, ... BITS: a word's codes stay in one thread."""
    for i in tl.static_range(4):
        if STEP >> i >= BITS:
            words = tl.reshape(tl.join(words, words >> (STEP >> i)), (words.shape[0], words.shape[1] * 2))
    return words


@triton.jit
def _numbers(words, BITS: tl.constexpr):
    """Codes of up to 8 bits, as they are the bits of fp16 numbers: code * 2^-24 exactly, and tensor cores take them.
    fp16 (tokens, codes), each word's two halves in turns, as they lie in a register; see ``channels_of``."""
    MASK: tl.constexpr = (1 << BITS) - 1
    pairs = _spread(words, 8, BITS) & (MASK << 16 | MASK)
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, (words.shape[0], words.shape[1] * 32 // BITS)).to(tl.float16, bitcast=True)


@triton.jit
def channels_of(HALF: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, F: tl.constexpr):
    """Channel of each column of a half tile, and whether there is one."""
    column = tl.arange(0, WIDTH)
    if F.KIND == "affine":
        EACH: tl.constexpr = 32 // F.BITS
        inside = column % EACH // 2 + column % 2 * (EACH // 2)
        channel = HALF * (HEAD_DIM // 2) + column // EACH * EACH + inside
    elif F.STRIDED:
        channel = (HALF * (F.DIM // 2) + column % (F.DIM // 2)) * F.GROUPS + column // (F.DIM // 2)
    else:
        channel = HALF * (HEAD_DIM // 2) + column
    return channel, column < HEAD_DIM // 2


@triton.jit
def half_tile(codes, a, b, table, head, token, seq_len, HALF: tl.constexpr, WIDTH: tl.constexpr,
              HEAD_DIM: tl.constexpr, ROPE: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """Half HALF of tokens (N,) of a head: fp16 (N, WIDTH), and the factor and offset (N,) that make values of it."""
    token = tl.minimum(token, seq_len - 1)  # where there is none, the last one once more: cheaper than to mask loads
    row = head * seq_len + token
    if F.KIND == "affine":
        return _affine_half(codes, a, b, row, HALF, WIDTH, HEAD_DIM, ROPE, F)
    else:
        factor = tl.full(row.shape, 1.0, tl.float32)
        if F.SCALE_TOKENS > 0:
            scale = a + head * tl.cdiv(seq_len, F.SCALE_TOKENS)
            factor = tl.load(scale + token // F.SCALE_TOKENS).to(tl.float32)
        return _coded_half(codes, table, row, HALF, WIDTH, F), factor, tl.zeros(row.shape, tl.float32)


@triton.jit
def _affine_half(codes, low, high, row, HALF: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
                 ROPE: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """Half a tile of affine codes: fp16 (tokens, WIDTH), and what each token's is to be multiplied by and added to."""
    SIZE: tl.constexpr = HEAD_DIM // F.GROUPS
    FIRST: tl.constexpr = HALF * (HEAD_DIM // 2)
    LEVELS: tl.constexpr = (1 << F.BITS) - 1
    number = _numbers(_words(codes, row, FIRST, WIDTH, F), F.BITS)
    if SIZE % (HEAD_DIM // 2) == 0 and not ROPE:  # the half has one pair of ends, which can wait
        bottom = tl.load(low + row * F.GROUPS + FIRST // SIZE).to(tl.float32)
        top = tl.load(high + row * F.GROUPS + FIRST // SIZE).to(tl.float32)
        return number, (top - bottom) * (UNIT / LEVELS), bottom
    EACH: tl.constexpr = 32 // F.BITS if SIZE % (HEAD_DIM // 2) != 0 else WIDTH
    part = tl.arange(0, WIDTH // EACH)
    group = (FIRST + part * EACH) // SIZE
    there = (group < F.GROUPS)[None, :]
    bottom = tl.load(low + row[:, None] * F.GROUPS + group[None, :], there, 0).to(tl.float32)[:, :, None]
    top = tl.load(high + row[:, None] * F.GROUPS + group[None, :], there, 0).to(tl.float32)[:, :, None]
    number = tl.reshape(number, (row.shape[0], WIDTH // EACH, EACH)).to(tl.float32)
    tile = tl.reshape(bottom + number * ((top - bottom) * (UNIT / LEVELS)), (row.shape[0], WIDTH))
    return tile.to(tl.float16), tl.full(row.shape, 1.0, tl.float32), tl.zeros(row.shape, tl.float32)


@triton.jit
def _coded_half(codes, table, row, HALF: tl.constexpr, WIDTH: tl.constexpr, F: tl.constexpr):
    """Half a tile of sums of codes, fp16 (tokens, WIDTH)."""
    INNER: tl.constexpr = F.DIM // 2 if F.STRIDED else F.DIM
    COUNT: tl.constexpr = WIDTH // INNER
    OUTER: tl.constexpr = F.GROUPS if F.STRIDED else F.GROUPS // 2
    FIRST: tl.constexpr = 0 if F.STRIDED else HALF * OUTER
    BEGIN: tl.constexpr = HALF * INNER if F.STRIDED else 0
    WORD: tl.constexpr = 32 if F.ROW_BYTES % 4 == 0 else 8
    group = FIRST + tl.arange(0, COUNT)
    inner = BEGIN + tl.arange(0, INNER)
    there = (group < FIRST + OUTER)[None, :, None]
    string = codes.to(tl.pointer_type(tl.int32)) if WORD == 32 else codes
    string += row[:, None] * (F.ROW_BYTES * 8 // WORD)
    total = tl.zeros((row.shape[0], COUNT, INNER), tl.float32)
    for k in range(F.QUANTIZERS):
        if F.QUANTIZERS == 1 and 8 % F.BITS == 0 and OUTER * F.BITS % 32 == 0 and COUNT * F.BITS % 32 == 0:
            code = _spread(_words(codes, row, FIRST, COUNT, F), 16, F.BITS) & ((1 << F.BITS) - 1)
        else:
            bit = ((group * F.QUANTIZERS + k) * F.BITS)[None, :]
            code = code_at(string, bit, F.ROW_BYTES * 8 // WORD - 1, F.BITS, WORD, spanned(F.BITS, WORD))
        at = ((group % F.TABLES) * F.QUANTIZERS + k)[None, :] * F.SIZE + tl.minimum(code, F.SIZE - 1)
        vector = tl.load(table + at[:, :, None] * F.DIM + inner[None, None, :], there, 0)
        total += vector.to(tl.float32)
    return tl.reshape(total, (row.shape[0], WIDTH)).to(tl.float16)
