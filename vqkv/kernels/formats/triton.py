"""Values <-> packed tokens on a GPU, in one pass: ends, codes and packing; or codes, table look-ups and scales.

To decode, a row is made of chunks, neighbouring channels of one group, for each of which a lane reads one code and a
vector of the table: a power of two of them, so that any group size is a multiple. Strided groups are transposed after.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.packing.triton import code_at, spanned, words_of
from vqkv.kernels.view import Affine, Coded, KernelView

VALUES = 4096  # of a program of four warps: 32 a thread
VECTOR = 8  # channels of a chunk, at most: 16 bytes of an fp16 table


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """Compute ``naive.affine_encode``, any strides, of what ``can_affine_encode`` accepts."""
    batch, heads, tokens, head_dim = x.shape
    groups = head_dim // group_size
    codes = torch.empty(batch, heads, tokens, head_dim * bits // 8, dtype=torch.uint8, device=x.device)
    low, high = (torch.empty(batch, heads, tokens, groups, dtype=torch.float16, device=x.device) for _ in range(2))
    if x.numel():
        width = triton.next_power_of_2(group_size)
        vectors = max(1, min(VALUES // width, triton.next_power_of_2(tokens * groups)))
        grid = (triton.cdiv(tokens * groups, vectors) * batch * heads,)
        with torch.cuda.device_of(x):
            _affine_encode[grid](
                x, codes, low, high, heads, tokens, *x.stride(), groups, group_size, bits, vectors, width
            )
    return Affine(codes, low, high, bits)


def can_affine_encode(x: Tensor, bits: int, group_size: int) -> bool:
    """Tell whether it can encode x (..., head_dim): whole groups of whole bytes that a program has room for."""
    return bits in (2, 4, 8) and x.shape[-1] % group_size == group_size * bits % 8 == 0 and group_size <= VALUES


@triton.jit
def _affine_encode(
    x, packed, lows, highs, heads, tokens, batch_stride, head_stride, token_stride, stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Encode V groups of one head, one after the other through its tokens; each padded to W channels."""
    blocks = tl.cdiv(tokens * GROUPS, V)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    group = tl.program_id(0) % blocks * V + tl.arange(0, V)
    channel = tl.arange(0, W)
    there = (group < tokens * GROUPS)[:, None] & (channel < SIZE)[None, :]
    x += head // heads * batch_stride + head % heads * head_stride
    x += (group // GROUPS).to(tl.int64)[:, None] * token_stride
    x += (group % GROUPS * SIZE)[:, None] * stride + (channel * stride)[None, :]
    values = tl.load(x, mask=there, other=float("inf")).to(tl.float32)
    low = _half(tl.min(values, axis=1))
    high = _half(tl.max(tl.where(there, values, float("-inf")), axis=1))
    vector = head * tokens * GROUPS + group
    tl.store(lows + vector, low, mask=group < tokens * GROUPS)
    tl.store(highs + vector, high, mask=group < tokens * GROUPS)
    codes = _nearest_level(values, low.to(tl.float32)[:, None], high.to(tl.float32)[:, None], 2**BITS - 1)
    shifts = (tl.arange(0, 8 // BITS) * BITS)[None, None, :]
    octets = tl.sum(codes.reshape(V, W * BITS // 8, 8 // BITS) << shifts, axis=2)
    byte = tl.arange(0, W * BITS // 8)[None, :]
    there = (group < tokens * GROUPS)[:, None] & (byte < SIZE * BITS // 8)
    tl.store(packed + vector[:, None] * (SIZE * BITS // 8) + byte, octets.to(tl.uint8), mask=there)


@triton.jit
def _half(end):
    """Round to fp16, but finite."""
    return tl.minimum(tl.maximum(end, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _nearest_level(values, low, high, LEVELS: tl.constexpr):
    """Round (value - low) / (high - low) * LEVELS half to even, from 0 to LEVELS, int32. The division rounds as IEEE
    says. Adding 1.5 * 2^23 leaves an integer in the last bits; the limits before it keep the compiler from fusing it
    with the product, which would round once, not twice."""
    span = high - low
    scaled = tl.div_rn(values - low, tl.where(span > 0, span, 1.0)) * LEVELS
    scaled = tl.minimum(tl.maximum(scaled, 0.0), LEVELS * 1.0)
    return (scaled + 12582912.0).to(tl.int32, bitcast=True) & 255


@dataclass(frozen=True)
class Tile:
    """What a program decodes: ROWS, each of CHUNKS of V channels; chunks are padded to a power of two."""

    ROWS: int
    CHUNKS: int
    PADDED: int
    V: int


def decode(packed: KernelView) -> Tensor:
    """Compute ``naive.decode``. A code that its codebook does not have stands for the last one."""
    out = torch.empty(packed.shape, dtype=torch.float32, device=packed.codes.device)
    with torch.cuda.device_of(out):
        if isinstance(packed, Affine) and out.numel():
            _decode_affine(packed, out)
        elif isinstance(packed, Coded) and out.numel():
            _decode_coded(packed, out)
    if isinstance(packed, Coded) and packed.strided:
        return out.unflatten(-1, (packed.groups, -1)).mT.flatten(-2)
    return out


def can_decode(packed: KernelView) -> bool:
    """Tell whether the kernels can decode these: all that ``packed`` describes, with codes of up to 16 bits."""
    if isinstance(packed, Affine):
        return packed.bits in (2, 4, 8)
    return isinstance(packed, Coded) and packed.bits <= 16


def _decode_coded(packed: Coded, out: Tensor) -> None:
    tables, num_quantizers, size, dim = packed.codebooks.shape
    words, word = words_of(packed.codes.contiguous())
    scale = None if packed.scale is None else packed.scale.contiguous()
    tile, rows = _tile(out.shape, gcd(dim, VECTOR)), out.shape[:3].numel()
    _coded[(triton.cdiv(rows, tile.ROWS),)](
        words, packed.codebooks.contiguous(), scale, out, rows, out.shape[2], words.shape[-1],
        packed.tokens_per_scale, 0 if scale is None else scale.shape[-1], packed.groups, dim, tables, num_quantizers,
        size, packed.bits, word, T=tile, num_stages=1,
    )  # fmt: skip


def _decode_affine(packed: Affine, out: Tensor) -> None:
    codes = packed.codes.contiguous()
    words, word = words_of(codes) if packed.bits < 8 else (codes, 8)
    vector = gcd(packed.group_size, VECTOR if packed.bits == 8 else min(VECTOR, word // packed.bits))
    tile, rows = _tile(out.shape, vector), out.shape[:3].numel()
    _affine[(triton.cdiv(rows, tile.ROWS),)](
        words, packed.low.contiguous(), packed.high.contiguous(), out, rows, words.shape[-1], packed.group_size,
        packed.bits, word, T=tile, num_stages=1,
    )  # fmt: skip


def _tile(shape: torch.Size, vector: int) -> Tile:
    """Choose a tile for an output of ``shape``, about VALUES values a program."""
    chunks = shape[3] // vector
    padded = triton.next_power_of_2(chunks)
    height = VALUES * min(vector, 4) // 4 // (padded * vector)
    return Tile(max(1, min(height, triton.next_power_of_2(shape[:3].numel()))), chunks, padded, vector)


@triton.jit
def _rows(rows, ROWS: tl.constexpr):
    """Return this program's rows; one that is not there is the last once more, and ``there`` says so."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return tl.minimum(row, rows - 1), row < rows


@triton.jit
def _store(values, row, there, out, T: tl.constexpr):
    """Store values (rows, padded chunks, V)."""
    channel = tl.arange(0, T.PADDED * T.V)
    out += row.to(tl.int64)[:, None] * (T.CHUNKS * T.V) + channel[None, :]
    values = values.reshape(values.shape[0], T.PADDED * T.V)
    tl.store(out, values, mask=there[:, None] & (channel < T.CHUNKS * T.V)[None, :])


@triton.jit
def _coded(
    words, tables, scale, out, rows, tokens, length, tokens_per_scale,
    SCALES: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, TABLES: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sum the codes of K quantizers in a rolled loop: unrolled, the look-ups of all would be held at once."""
    V: tl.constexpr = T.V
    row, there = _rows(rows, T.ROWS)
    chunk = tl.arange(0, T.PADDED)
    start = tl.where(chunk < T.CHUNKS, chunk * V, 0)  # of no chunk, the first once more
    group, first = start // DIM, tl.multiple_of(start % DIM, V)
    words += (row.to(tl.int64) * length)[:, None]
    table = tables + (group % TABLES * (K * SIZE * DIM) + first)[None, :]
    element = tl.arange(0, T.V)[None, None, :]
    values = tl.zeros([row.shape[0], chunk.shape[0], V], tl.float32)
    for k in range(K):
        code = code_at(words, ((group * K + k) * BITS)[None, :], length - 1, BITS, WORD, spanned(BITS, WORD))
        if SIZE < 2**BITS:
            code = tl.minimum(code, SIZE - 1)
        values += tl.load((table + (k * SIZE + code) * DIM)[:, :, None] + element).to(tl.float32)
    if SCALES:
        line = row // tokens * tl.cdiv(tokens, tokens_per_scale) + row % tokens // tokens_per_scale
        scale += (line.to(tl.int64) * SCALES)[:, None] + (group // (GROUPS // SCALES))[None, :]
        values *= tl.load(scale).to(tl.float32)[:, :, None]
    _store(values, row, there, out, T)


@triton.jit
def _affine(
    words, lows, highs, out, rows, length, GROUP: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Decode affine codes. A chunk's lie in one word, or each of them is a byte."""
    V: tl.constexpr = T.V
    row, there = _rows(rows, T.ROWS)
    chunk = tl.arange(0, T.PADDED)
    start = tl.where(chunk < T.CHUNKS, chunk * T.V, 0)
    words += (row.to(tl.int64) * length)[:, None]
    element = tl.arange(0, T.V)[None, None, :]
    if BITS == 8:
        codes = tl.load((words + tl.multiple_of(start, V)[None, :])[:, :, None] + element)
    else:
        word = tl.load(words + (start * BITS // WORD)[None, :]).to(tl.int32)
        codes = (word[:, :, None] >> (start * BITS % WORD)[None, :, None] + element * BITS) & (2**BITS - 1)
    end = (row.to(tl.int64) * (T.CHUNKS * T.V // GROUP))[:, None] + (start // GROUP)[None, :]
    low = tl.load(lows + end).to(tl.float32)
    step = (tl.load(highs + end).to(tl.float32) - low) * (1 / (2**BITS - 1))
    _store(low[:, :, None] + codes.to(tl.float32) * step[:, :, None], row, there, out, T)
