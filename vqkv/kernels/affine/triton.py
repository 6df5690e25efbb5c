"""Uniform quantization of groups of channels on a GPU: ends, codes and packing in one pass over the values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.packing.triton import join, pack_codes
from vqkv.kernels.view import Affine

VALUES = 4096  # of a program of four warps: 32 a thread, whole groups


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """``naive.affine_encode``, any strides, 2, 4 or 8 bits. Groups that end within a byte take a second pass."""
    batch, heads, tokens, head_dim = x.shape
    groups = head_dim // group_size
    stored = bits if group_size * bits % 8 == 0 else 8
    codes = torch.empty(batch, heads, tokens, head_dim * stored // 8, dtype=torch.uint8, device=x.device)
    low, high = (torch.empty(batch, heads, tokens, groups, dtype=torch.float16, device=x.device) for _ in range(2))
    if x.numel():
        width = max(triton.next_power_of_2(group_size), 8 // stored)
        vectors = max(1, min(VALUES // width, triton.next_power_of_2(tokens * groups)))
        grid = (triton.cdiv(tokens * groups, vectors) * batch * heads,)
        with torch.cuda.device_of(x):
            _encode[grid](
                x, codes, low, high, heads, tokens, *x.stride(), groups, group_size, bits, stored, vectors, width
            )
    return Affine(codes if stored == bits else pack_codes(codes, bits), low, high, bits)


def serves(x: Tensor, bits: int, group_size: int) -> bool:
    """Tell whether it can encode x (..., head_dim): whole groups that a program has room for, and bits of a byte."""
    return bits in (2, 4, 8) and x.shape[-1] % group_size == 0 and group_size <= VALUES


@triton.jit
def _encode(
    x, packed, lows, highs, heads, tokens, batch_stride, head_stride, token_stride, stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, STORED: tl.constexpr,
    V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """V groups of one head, one after the other through its tokens; each padded to W channels."""
    blocks = tl.cdiv(tokens * GROUPS, V)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    group = tl.program_id(0) % blocks * V + tl.arange(0, V)
    channel = tl.arange(0, W)
    there = (group < tokens * GROUPS)[:, None] & (channel < SIZE)[None, :]
    x += head // heads * batch_stride + head % heads * head_stride
    x += (group // GROUPS).to(tl.int64)[:, None] * token_stride
    x += (group % GROUPS * SIZE)[:, None] * stride + (channel * stride)[None, :]
    if SIZE == W:
        values = tl.load(x, mask=there, other=0).to(tl.float32)
        low, high = tl.min(values, axis=1), tl.max(values, axis=1)
    else:
        values = tl.load(x, mask=there, other=float("inf")).to(tl.float32)
        low = tl.min(values, axis=1)
        high = tl.max(tl.where(channel[None, :] < SIZE, values, float("-inf")), axis=1)
    low, high = half(low), half(high)
    vector = head * tokens * GROUPS + group
    tl.store(lows + vector, low, mask=group < tokens * GROUPS)
    tl.store(highs + vector, high, mask=group < tokens * GROUPS)
    codes = nearest_level(values, low.to(tl.float32)[:, None], high.to(tl.float32)[:, None], 2**BITS - 1)
    words = join(codes, STORED, 8 // STORED)
    byte = tl.arange(0, W * STORED // 8)[None, :]
    there = (group < tokens * GROUPS)[:, None] & (byte < SIZE * STORED // 8)
    tl.store(packed + vector[:, None] * (SIZE * STORED // 8) + byte, words.to(tl.uint8), mask=there)


@triton.jit
def half(end):
    """Rounded to fp16, but finite."""
    return tl.minimum(tl.maximum(end, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def nearest_level(values, low, high, LEVELS: tl.constexpr):
    """(value - low) / (high - low) * LEVELS, rounded half to even, from 0 to LEVELS, int32. The division rounds as IEEE
    says. Adding 1.5 * 2^23 leaves an integer in the last bits; the limits before it keep the compiler from fusing it
    with the product, which would round once, not twice."""
    span = high - low
    scaled = tl.div_rn(values - low, tl.where(span > 0, span, 1.0)) * LEVELS
    scaled = tl.minimum(tl.maximum(scaled, 0.0), LEVELS * 1.0)
    return (scaled + 12582912.0).to(tl.int32, bitcast=True) & 255
