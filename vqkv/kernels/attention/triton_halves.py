"""Packed tokens -> operands of attention's matrix products: half a head of a tile's tokens, decoded in registers.

A column of a half tile is a channel, in the order in which codes come out of their words (``channels_of``); what a
token is scaled by, and what is added to it, stay beside the tile where they can.
"""

import triton
import triton.language as tl

from vqkv.kernels.packing.triton import code_at, spanned

UNIT = tl.constexpr(2.0**24)  # the smallest fp16 number, which the code 1 is read as, is 1 over this


@triton.constexpr_function
def columns(width):
    """Columns of a half tile: a power of two, as many as a matrix product needs at least."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def _words(codes, row, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """The words of codes FIRST, ..., FIRST + COUNT - 1 of each row: int32 (tokens, words); zeros beyond the end."""
    EACH: tl.constexpr = 32 // BITS
    word = FIRST // EACH + tl.arange(0, COUNT // EACH)
    words = codes.to(tl.pointer_type(tl.int32)) + row[:, None] * (ROW_BYTES // 4) + word[None, :]
    return tl.load(words, (word < ROW_BYTES // 4)[None, :], 0)


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
def channels_of(HALF: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, KIND: tl.constexpr,
              BITS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STRIDED: tl.constexpr):  # fmt: skip
    """Channel of each column of a half tile, and whether there is one."""
    column = tl.arange(0, WIDTH)
    if KIND == "affine":
        EACH: tl.constexpr = 32 // BITS
        inside = column % EACH // 2 + column % 2 * (EACH // 2)
        channel = HALF * (HEAD_DIM // 2) + column // EACH * EACH + inside
    elif STRIDED:
        channel = (HALF * (DIM // 2) + column % (DIM // 2)) * GROUPS + column // (DIM // 2)
    else:
        channel = HALF * (HEAD_DIM // 2) + column
    return channel, column < HEAD_DIM // 2


@triton.jit
def _affine_half(codes, low, high, row, HALF: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
                 BITS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    """Half a tile of affine codes: fp16 (tokens, WIDTH), and what each token's is to be multiplied by and added to."""
    SIZE: tl.constexpr = HEAD_DIM // GROUPS
    FIRST: tl.constexpr = HALF * (HEAD_DIM // 2)
    LEVELS: tl.constexpr = (1 << BITS) - 1
    number = _numbers(_words(codes, row, FIRST, WIDTH, BITS, ROW_BYTES), BITS)
    if SIZE % (HEAD_DIM // 2) == 0 and not ROPE:  # the half has one pair of ends, which can wait
        bottom = tl.load(low + row * GROUPS + FIRST // SIZE).to(tl.float32)
        top = tl.load(high + row * GROUPS + FIRST // SIZE).to(tl.float32)
        return number, (top - bottom) * (UNIT / LEVELS), bottom
    EACH: tl.constexpr = 32 // BITS if SIZE % (HEAD_DIM // 2) != 0 else WIDTH
    part = tl.arange(0, WIDTH // EACH)
    group = (FIRST + part * EACH) // SIZE
    there = (group < GROUPS)[None, :]
    bottom = tl.load(low + row[:, None] * GROUPS + group[None, :], there, 0).to(tl.float32)[:, :, None]
    top = tl.load(high + row[:, None] * GROUPS + group[None, :], there, 0).to(tl.float32)[:, :, None]
    number = tl.reshape(number, (row.shape[0], WIDTH // EACH, EACH)).to(tl.float32)
    tile = tl.reshape(bottom + number * ((top - bottom) * (UNIT / LEVELS)), (row.shape[0], WIDTH))
    return tile.to(tl.float16), tl.full(row.shape, 1.0, tl.float32), tl.zeros(row.shape, tl.float32)


@triton.jit
def _coded_half(codes, scale, table, row, scale_row, HALF: tl.constexpr, WIDTH: tl.constexpr,
                BITS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
                QUANTIZERS: tl.constexpr, SIZE: tl.constexpr, TABLES: tl.constexpr, SCALE_TOKENS: tl.constexpr,
                STRIDED: tl.constexpr):  # fmt: skip
    """Half a tile of sums of codes; see ``_affine_half``."""
    INNER: tl.constexpr = DIM // 2 if STRIDED else DIM
    COUNT: tl.constexpr = WIDTH // INNER
    OUTER: tl.constexpr = GROUPS if STRIDED else GROUPS // 2
    FIRST: tl.constexpr = 0 if STRIDED else HALF * OUTER
    BEGIN: tl.constexpr = HALF * INNER if STRIDED else 0
    group = FIRST + tl.arange(0, COUNT)
    inner = BEGIN + tl.arange(0, INNER)
    there = (group < FIRST + OUTER)[None, :, None]
    WORD: tl.constexpr = 32 if ROW_BYTES % 4 == 0 else 8
    string = codes.to(tl.pointer_type(tl.int32)) if WORD == 32 else codes
    string += row[:, None] * (ROW_BYTES * 8 // WORD)
    total = tl.zeros((row.shape[0], COUNT, INNER), tl.float32)
    for k in range(QUANTIZERS):
        if QUANTIZERS == 1 and 8 % BITS == 0 and OUTER * BITS % 32 == 0 and COUNT * BITS % 32 == 0:
            words = _words(codes, row, FIRST, COUNT, BITS, ROW_BYTES)
            code = _spread(words, 16, BITS) & ((1 << BITS) - 1)
        else:
            bit = ((group * QUANTIZERS + k) * BITS)[None, :]
            code = code_at(string, bit, ROW_BYTES * 8 // WORD - 1, BITS, WORD, spanned(BITS, WORD))
        at = ((group % TABLES) * QUANTIZERS + k)[None, :] * SIZE + tl.minimum(code, SIZE - 1)
        vector = tl.load(table + at[:, :, None] * DIM + inner[None, None, :], there, 0)
        total += vector.to(tl.float32)
    factor = tl.full(row.shape, 1.0, tl.float32)
    if SCALE_TOKENS > 0:
        factor = tl.load(scale + scale_row).to(tl.float32)
    return tl.reshape(total, (row.shape[0], WIDTH)).to(tl.float16), factor, tl.zeros(row.shape, tl.float32)


@triton.jit
def half_tile(
    codes, a, b, table, head, token, seq_len, HALF: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr,
    DIM: tl.constexpr, QUANTIZERS: tl.constexpr, SIZE: tl.constexpr, TABLES: tl.constexpr, SCALE_TOKENS: tl.constexpr,
    STRIDED: tl.constexpr,
):  # fmt: skip
    """Half HALF of tokens (N,) of a head: fp16 (N, WIDTH), and the factor and offset (N,) that make values of it."""
    token = tl.minimum(token, seq_len - 1)  # where there is none, the last one once more: cheaper than to mask loads
    row = head * seq_len + token
    if KIND == "affine":
        return _affine_half(codes, a, b, row, HALF, WIDTH, HEAD_DIM, BITS, ROW_BYTES, GROUPS, ROPE)
    else:
        EACH: tl.constexpr = SCALE_TOKENS if SCALE_TOKENS > 0 else 1
        scale_row = head * tl.cdiv(seq_len, EACH) + token // EACH
        return _coded_half(codes, a, table, row, scale_row, HALF, WIDTH, BITS, ROW_BYTES, GROUPS, DIM,
                           QUANTIZERS, SIZE, TABLES, SCALE_TOKENS, STRIDED)  # fmt: skip
