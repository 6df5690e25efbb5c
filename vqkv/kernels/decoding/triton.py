"""Packed tokens -> values on a GPU, in one pass: codes, table look-ups, scales, a prediction added, RoPE.

RoPE needs channel i and its partner i + rotary_dim / 2 in one lane, so a row is two half tiles that go through all
steps side by side; they consist of chunks (``chunks``), for each of which a lane reads one code and a vector of the
table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.decoding.triton_chunks import chunks_of, halve, rows_of, tile_of
from vqkv.kernels.packing.triton import code_at, spanned, words_of
from vqkv.kernels.tiles import DECODE
from vqkv.kernels.view import Affine, Coded, KernelView, Turn


def decode(packed: KernelView, base: Tensor | None = None, turn: Turn | None = None, dtype=torch.float32) -> Tensor:
    """``naive.decode``: values (batch, num_kv_heads, seq_len, head_dim) in ``dtype``, fp32 until the end.

    A code that its codebook does not have stands for the last one.
    """
    out = torch.empty(packed.shape, dtype=dtype, device=packed.codes.device)
    if out.numel():
        with torch.cuda.device_of(out):
            (_decode_affine if isinstance(packed, Affine) else _decode_coded)(packed, out, base, turn)
    return out


def serves(packed: KernelView) -> bool:
    """Tell whether the kernels can decode these: all that ``packed`` describes, with codes of up to 16 bits."""
    return packed.bits in (2, 4, 8) if isinstance(packed, Affine) else packed.bits <= 16


def _most(bits: int, word: int) -> int:
    """Channels of an affine chunk: those of a word, or whole bytes."""
    return DECODE["vector"] if bits == 8 else min(DECODE["vector"], word // bits)


def _decode_coded(packed: Coded, out: Tensor, base: Tensor | None, turn: Turn | None) -> None:
    tables, num_quantizers, size, dim = packed.codebooks.shape
    scale = packed.scale
    words, word = words_of(packed.codes if packed.codes.stride(-1) == 1 else packed.codes.contiguous())
    halves = halve(packed, turn.cos.shape[-1] if turn else 0, DECODE["vector"])
    grid, constants = tile_of(out.shape, halves, turn is not None, DECODE["coded"]["values"])
    _coded[grid](
        words, packed.codebooks.contiguous(), scale if scale is not None else words, *_frame(out, base, turn),
        words.shape[-1], *words.stride()[:3], *(scale.stride() if scale is not None else (0, 0, 0, 0)),
        packed.tokens_per_scale, scale.shape[-1] if scale is not None else 0,
        packed.groups, dim, tables, num_quantizers, size, packed.bits, word, spanned(packed.bits, word), packed.strided,
        *constants, num_warps=DECODE["coded"]["num_warps"], num_stages=1,
    )  # fmt: skip


def _decode_affine(packed: Affine, out: Tensor, base: Tensor | None, turn: Turn | None) -> None:
    low, high = packed.low, packed.high
    if low.stride() != high.stride():
        low, high = low.contiguous(), high.contiguous()
    codes = packed.codes if packed.codes.stride(-1) == 1 else packed.codes.contiguous()
    words, word = words_of(codes) if packed.bits < 8 else (codes, 8)
    halves = halve(packed, turn.cos.shape[-1] if turn else 0, _most(packed.bits, word))
    grid, constants = tile_of(out.shape, halves, turn is not None, DECODE["affine"]["values"])
    _affine[grid](
        words, low, high, *_frame(out, base, turn), *words.stride()[:3], *low.stride(),
        packed.group_size, packed.bits, word,
        *constants, num_warps=DECODE["affine"]["num_warps"], num_stages=1,
    )  # fmt: skip


def _frame(out: Tensor, base: Tensor | None, turn: Turn | None) -> tuple:
    """The arguments that all kinds of codes share: where values go, what is added, how they turn. Absent: None."""
    cos, sin = (turn.cos, turn.sin) if turn else (None, None)
    if turn:
        cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
    turns = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)) if turn else (0, 0)
    strides = base.stride() if base is not None else (0, 0, 0, 0)
    return out, base, cos, sin, *out.shape[1:3], *out.stride()[:3], *strides, *turns


@triton.jit
def _finish(
    low, high, batch, head, token, there, out, base, cos, sin,
    out_batch, out_head, out_token, base_batch, base_head, base_token, base_stride, turn_batch, turn_token,
    RUNS: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr,
    RUNS_PADDED: tl.constexpr, PAIRS_PADDED: tl.constexpr,
):  # fmt: skip
    """Halves (rows, RUNS_PADDED, PAIRS_PADDED * V) -> added to the base, turned, stored. Channels of runs alternate."""
    W: tl.constexpr = RUNS_PADDED * PAIRS_PADDED * V
    low = low.permute(0, 2, 1).reshape(low.shape[0], W)
    high = high.permute(0, 2, 1).reshape(high.shape[0], W)
    lane = tl.arange(0, W)
    run, place = lane % RUNS_PADDED, lane // RUNS_PADDED
    first, second = chunks_of(place // V, CHUNKS, TURNED, PAIRS)
    is_low, is_high = tl.full([1, W], 1, tl.int1), tl.full([1, W], 1, tl.int1)
    if RUNS < RUNS_PADDED or PAIRS < PAIRS_PADDED or CHUNKS < 2 * PAIRS:
        is_low, is_high = ((run < RUNS) & (first < CHUNKS))[None, :], ((run < RUNS) & (second < CHUNKS))[None, :]
    first, second = (first * V + place % V) * RUNS + run, (second * V + place % V) * RUNS + run
    RUN: tl.constexpr = V * (PAIRS & -PAIRS) if TURNED == 0 or TURNED == PAIRS else V
    ALIKE: tl.constexpr = RUN * RUNS if RUNS == RUNS_PADDED else 1  # aligned channels side by side, at least
    first = tl.max_contiguous(tl.multiple_of(first, ALIKE), ALIKE)[None, :]
    second = tl.max_contiguous(tl.multiple_of(second, ALIKE), ALIKE)[None, :]
    if base is not None:
        base += (batch * base_batch + head * base_head + token * base_token)[:, None]
        low = tl.load(base + first * base_stride, mask=is_low, other=0).to(tl.float32) + low
        high = tl.load(base + second * base_stride, mask=is_high, other=0).to(tl.float32) + high
    if cos is not None:
        turn = (batch * turn_batch + token * turn_token)[:, None]
        turns = is_low if TURNED == PAIRS else is_low & (first < 2 * TURNED * V * RUNS)
        a = tl.load(cos + turn + first, mask=turns, other=1)
        b = tl.load(sin + turn + first, mask=turns, other=0)
        c = tl.load(cos + turn + second, mask=turns, other=1)
        d = tl.load(sin + turn + second, mask=turns, other=0)
        turned_low, turned_high = low * a - high * b, high * c + low * d
        if TURNED == PAIRS:
            low, high = turned_low, turned_high
        else:
            low, high = tl.where(turns, turned_low, low), tl.where(turns, turned_high, high)
    out += (batch * out_batch + head * out_head + token * out_token)[:, None]
    tl.store(out + first, low.to(out.dtype.element_ty), mask=is_low & there[:, None])
    tl.store(out + second, high.to(out.dtype.element_ty), mask=is_high & there[:, None])


@triton.jit
def _coded(
    words, tables, scale, out, base, cos, sin, heads, tokens,
    out_batch, out_head, out_token, base_batch, base_head, base_token, base_stride, turn_batch, turn_token,
    length, word_batch, word_head, word_token, scale_batch, scale_head, scale_token, scale_stride, tokens_per_scale,
    SCALES: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, TABLES: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr, SPANNED: tl.constexpr, STRIDED: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
    RUNS: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr,
    RUNS_PADDED: tl.constexpr, PAIRS_PADDED: tl.constexpr,
):  # fmt: skip
    """The codes of K quantizers are summed in a rolled loop: unrolled, the look-ups of all would be held at once."""
    R: tl.constexpr = HEADS * TOKENS
    N: tl.constexpr = RUNS_PADDED * PAIRS_PADDED
    batch, head, token, there = rows_of(heads, tokens, HEADS, TOKENS)
    words += (batch * word_batch + head * word_head + token * word_token)[:, None]
    run, pair = tl.arange(0, N) // PAIRS_PADDED, tl.arange(0, N) % PAIRS_PADDED
    first, second = chunks_of(pair, CHUNKS, TURNED, PAIRS)
    group_low, start_low = _group(first, run, GROUPS, DIM, RUNS, CHUNKS, V, STRIDED)
    group_high, start_high = _group(second, run, GROUPS, DIM, RUNS, CHUNKS, V, STRIDED)
    table_low = tables + (group_low % TABLES * (K * SIZE * DIM) + start_low)[None, :]
    table_high = tables + (group_high % TABLES * (K * SIZE * DIM) + start_high)[None, :]
    element = tl.arange(0, V)[None, None, :]
    low, high = tl.zeros([R, N, V], tl.float32), tl.zeros([R, N, V], tl.float32)
    for k in range(K):
        code_low = code_at(words, ((group_low * K + k) * BITS)[None, :], length - 1, BITS, WORD, SPANNED)
        code_high = code_at(words, ((group_high * K + k) * BITS)[None, :], length - 1, BITS, WORD, SPANNED)
        if SIZE < 2**BITS:
            code_low, code_high = tl.minimum(code_low, SIZE - 1), tl.minimum(code_high, SIZE - 1)
        low += tl.load((table_low + (k * SIZE + code_low) * DIM)[:, :, None] + element).to(tl.float32)
        high += tl.load((table_high + (k * SIZE + code_high) * DIM)[:, :, None] + element).to(tl.float32)
    if SCALES:
        scale += (batch * scale_batch + head * scale_head + token.to(tl.int32) // tokens_per_scale * scale_token)[
            :, None
        ]
        SHARE: tl.constexpr = GROUPS // SCALES  # groups with one scale
        low *= tl.load(scale + (group_low // SHARE * scale_stride)[None, :]).to(tl.float32)[:, :, None]
        high *= tl.load(scale + (group_high // SHARE * scale_stride)[None, :]).to(tl.float32)[:, :, None]
    _finish(
        low.reshape(R, RUNS_PADDED, PAIRS_PADDED * V), high.reshape(R, RUNS_PADDED, PAIRS_PADDED * V),
        batch, head, token, there, out, base, cos, sin,
        out_batch, out_head, out_token, base_batch, base_head, base_token, base_stride, turn_batch, turn_token,
        RUNS, CHUNKS, V, TURNED, PAIRS, RUNS_PADDED, PAIRS_PADDED,
    )  # fmt: skip


@triton.jit
def _group(
    chunk, run, GROUPS: tl.constexpr, DIM: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr,
    STRIDED: tl.constexpr,
):  # fmt: skip
    """Group of a chunk, and its first element in it; of no chunk, group 0."""
    start = tl.where((chunk < CHUNKS) & (run < RUNS), chunk * V, 0)
    if not STRIDED:
        group, element = start // DIM, start % DIM
    elif RUNS > 1:
        group, element = tl.where(run < RUNS, run, 0), start
    else:  # chunks of one channel, in the channels' order
        group, element = start % GROUPS, start // GROUPS
    return group, tl.multiple_of(element, V)


@triton.jit
def _affine(
    words, lows, highs, out, base, cos, sin, heads, tokens,
    out_batch, out_head, out_token, base_batch, base_head, base_token, base_stride, turn_batch, turn_token,
    word_batch, word_head, word_token, end_batch, end_head, end_token, end_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    RUNS: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr,
    RUNS_PADDED: tl.constexpr, PAIRS_PADDED: tl.constexpr,
):  # fmt: skip
    """A chunk's codes lie in one word, or each of them is a byte."""
    R: tl.constexpr = HEADS * TOKENS
    batch, head, token, there = rows_of(heads, tokens, HEADS, TOKENS)
    words += (batch * word_batch + head * word_head + token * word_token)[:, None]
    ends = (batch * end_batch + head * end_head + token * end_token)[:, None]
    first, second = chunks_of(tl.arange(0, PAIRS_PADDED), CHUNKS, TURNED, PAIRS)
    low = _levels(first, words, lows + ends, highs + ends, end_stride, GROUP, BITS, WORD, CHUNKS, V)
    high = _levels(second, words, lows + ends, highs + ends, end_stride, GROUP, BITS, WORD, CHUNKS, V)
    _finish(
        low.reshape(R, 1, PAIRS_PADDED * V), high.reshape(R, 1, PAIRS_PADDED * V),
        batch, head, token, there, out, base, cos, sin,
        out_batch, out_head, out_token, base_batch, base_head, base_token, base_stride, turn_batch, turn_token,
        RUNS, CHUNKS, V, TURNED, PAIRS, RUNS_PADDED, PAIRS_PADDED,
    )  # fmt: skip


@triton.jit
def _levels(
    chunk, words, lows, highs, end_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """(rows, chunks, V) values between the ends of their groups."""
    start = tl.where(chunk < CHUNKS, chunk * V, 0)
    element = tl.arange(0, V)[None, None, :]
    if BITS == 8:
        codes = tl.load((words + tl.multiple_of(start, V)[None, :])[:, :, None] + element)
    else:
        word = tl.load(words + (start * BITS // WORD)[None, :]).to(tl.int32)
        codes = (word[:, :, None] >> (start * BITS % WORD)[None, :, None] + element * BITS) & (2**BITS - 1)
    group = (start // GROUP * end_stride)[None, :]
    low = tl.load(lows + group).to(tl.float32)
    step = (tl.load(highs + group).to(tl.float32) - low) * (1 / (2**BITS - 1))
    return low[:, :, None] + codes.to(tl.float32) * step[:, :, None]
