"""Attention to affine codes and sums of codes on a GPU, which are decoded in registers and nowhere else.

A head is decoded as two half tiles: so a channel and its RoPE partner meet in one thread, and so the ends or the scale
of a token multiply a score rather than every channel. A column of a half tile is a channel, in the order in which codes
come out of their words (``_channels_of``). Keys at position n = n0 + j, n0 the first of a tile, are rotated by j only,
with a table that stays in registers; the query is rotated back by n0, once a tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from vqkv.kernels.packing.triton import code_at, spanned

LN2 = tl.constexpr(0.6931471805599453)


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
def _columns(width):
    """Return columns of a half tile: a power of two, as many as a matrix product needs at least."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def _words(codes, row, FIRST: tl.constexpr, COUNT: tl.constexpr, F: tl.constexpr):
    """Load the words of each row's codes FIRST, ..., FIRST + COUNT - 1: int32 (tokens, words), zeros after the end."""
    EACH: tl.constexpr = 32 // F.BITS
    word = FIRST // EACH + tl.arange(0, COUNT // EACH)
    words = codes.to(tl.pointer_type(tl.int32)) + row[:, None] * (F.ROW_BYTES // 4) + word[None, :]
    return tl.load(words, (word < F.ROW_BYTES // 4)[None, :], 0)


@triton.jit
def _spread(words, STEP: tl.constexpr, BITS: tl.constexpr):
    """Join words with themselves, shifted by STEP, STEP / 2, ... BITS: a word's codes stay in one thread."""
    for i in tl.static_range(4):
        if STEP >> i >= BITS:
            words = tl.reshape(tl.join(words, words >> (STEP >> i)), (words.shape[0], words.shape[1] * 2))
    return words


@triton.jit
def _numbers(words, BITS: tl.constexpr):
    """Take codes of up to 8 bits as the bits of fp16 numbers: code * 2^-24 exactly, and tensor cores take them. Return
    fp16 (tokens, codes), each word's two halves in turns, as they lie in a register; see ``_channels_of``."""
    MASK: tl.constexpr = (1 << BITS) - 1
    pairs = _spread(words, 8, BITS) & (MASK << 16 | MASK)
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, (words.shape[0], words.shape[1] * 32 // BITS)).to(tl.float16, bitcast=True)


@triton.jit
def _channels_of(HALF: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, F: tl.constexpr):
    """Return the channel of each column of a half tile, and whether there is one."""
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
def _half_tile(codes, a, b, table, head, token, seq_len, HALF: tl.constexpr, WIDTH: tl.constexpr,
              HEAD_DIM: tl.constexpr, ROPE: tl.constexpr, F: tl.constexpr):  # fmt: skip
    """Load half HALF of a head's tokens (N,): fp16 (N, WIDTH), and factor and offset (N,) that make values of it."""
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
    """Load half a tile of affine codes: fp16 (tokens, WIDTH), and each token's factor and offset."""
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
    """Load half a tile of sums of codes, fp16 (tokens, WIDTH)."""
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


@triton.jit
def attend(
    query, out, lse, k_codes, k_a, k_b, k_table, v_codes, v_a, v_b, v_table,
    first_cos, first_sin, inside_cos, inside_sin, seq_len, per_split, scaling, rows,
    K: tl.constexpr, V: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = _columns(HEAD_DIM // 2)
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k0, there = _channels_of(0, WIDTH, HEAD_DIM, K)
    k1, _ = _channels_of(1, WIDTH, HEAD_DIM, K)
    asked = (m < rows)[None, :] & there[:, None]
    begin = query + (head * rows + m)[None, :] * HEAD_DIM
    q0 = tl.load(begin + k0[:, None], asked, 0).to(tl.float16).to(tl.float32)  # rounded in the sums as in products
    q1 = tl.load(begin + k1[:, None], asked, 0).to(tl.float16).to(tl.float32)
    sum0, sum1 = tl.sum(q0, 0), tl.sum(q1, 0)
    inside = tl.arange(0, BLOCK_N)
    if ROPE:
        local = inside[:, None] * (HEAD_DIM // 2) + k0[None, :]
        cos = tl.load(inside_cos + local, there[None, :], 0)
        sin = tl.load(inside_sin + local, there[None, :], 0)
    best = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a share of no tokens must not make NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((WIDTH, BLOCK_M), tl.float32)
    acc1 = tl.zeros((WIDTH, BLOCK_M), tl.float32)
    add0 = tl.zeros((BLOCK_M,), tl.float32)
    add1 = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(split * per_split, min((split + 1) * per_split, seq_len), BLOCK_N):
        token = start + inside
        valid = token < seq_len
        x0, a0, b0 = _half_tile(k_codes, k_a, k_b, k_table, head, token, seq_len, 0, WIDTH, HEAD_DIM, ROPE, K)
        x1, a1, b1 = _half_tile(k_codes, k_a, k_b, k_table, head, token, seq_len, 1, WIDTH, HEAD_DIM, ROPE, K)
        if ROPE:
            first = (start // BLOCK_N) * (HEAD_DIM // 2) + k0
            c = tl.load(first_cos + first, there, 0)[:, None]
            s = tl.load(first_sin + first, there, 0)[:, None]
            p0, p1 = (q0 * c + q1 * s).to(tl.float16), (q1 * c - q0 * s).to(tl.float16)
            y0 = (x0 * cos - x1 * sin).to(tl.float16)
            y1 = (x1 * cos + x0 * sin).to(tl.float16)
        else:
            p0, p1, y0, y1 = q0.to(tl.float16), q1.to(tl.float16), x0, x1
        scores = tl.dot(y0, p0) * a0[:, None] + tl.dot(y1, p1) * a1[:, None]
        scores += sum0[None, :] * b0[:, None] + sum1[None, :] * b1[:, None]
        scores = tl.where(valid[:, None], scores * scaling, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[None, :])
        best, total = higher, total * shrink + tl.sum(weights, 0)
        x0, a0, b0 = _half_tile(v_codes, v_a, v_b, v_table, head, token, seq_len, 0, WIDTH, HEAD_DIM, False, V)
        x1, a1, b1 = _half_tile(v_codes, v_a, v_b, v_table, head, token, seq_len, 1, WIDTH, HEAD_DIM, False, V)
        acc0, add0 = _added(acc0, add0, shrink, weights, x0, a0, b0)
        acc1, add1 = _added(acc1, add1, shrink, weights, x1, a1, b1)
    v0, there = _channels_of(0, WIDTH, HEAD_DIM, V)
    v1, _ = _channels_of(1, WIDTH, HEAD_DIM, V)
    row = (split * tl.num_programs(0) + head) * rows + m
    stored = (m < rows)[None, :] & there[:, None]
    tl.store(out + row[None, :] * HEAD_DIM + v0[:, None], (acc0 + add0[None, :]) / total[None, :], stored)
    tl.store(out + row[None, :] * HEAD_DIM + v1[:, None], (acc1 + add1[None, :]) / total[None, :], stored)
    tl.store(lse + row, (best + tl.log2(total)) * LN2, m < rows)


@triton.jit
def _added(acc, add, shrink, weights, tile, factor, offset):
    """Add a tile of weighted values, factors over their largest: fp16 products shall not underflow."""
    largest = tl.max(tl.abs(factor), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    product = tl.dot(tl.trans(tile), (weights * (factor / largest)[:, None]).to(tl.float16))
    acc = acc * shrink[None, :] + product * largest
    return acc, add * shrink + tl.sum(weights * offset[:, None], 0)
