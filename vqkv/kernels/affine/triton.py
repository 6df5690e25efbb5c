"""Uniform quantization of groups of channels on a GPU: ends, codes and packing in one pass over the values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.view import Affine

VALUES = 4096  # of a program of four warps: 32 a thread, whole groups


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """``naive.affine_encode``, any strides, for what ``serves`` accepts."""
    batch, heads, tokens, head_dim = x.shape
    groups = head_dim // group_size
    codes = torch.empty(batch, heads, tokens, head_dim * bits // 8, dtype=torch.uint8, device=x.device)
    low, high = (torch.empty(batch, heads, tokens, groups, dtype=torch.float16, device=x.device) for _ in range(2))
    if x.numel():
        width = triton.next_power_of_2(group_size)
        vectors = max(1, min(VALUES // width, triton.next_power_of_2(tokens * groups)))
        grid = (triton.cdiv(tokens * groups, vectors) * batch * heads,)
        with torch.cuda.device_of(x):
            _encode[grid](x, codes, low, high, heads, tokens, *x.stride(), groups, group_size, bits, vectors, width)
    return Affine(codes, low, high, bits)


def serves(x: Tensor, bits: int, group_size: int) -> bool:
    """Tell whether it can encode x (..., head_dim): whole groups of whole bytes that a program has room for."""
    return bits in (2, 4, 8) and x.shape[-1] % group_size == group_size * bits % 8 == 0 and group_size <= VALUES


@triton.jit
def _encode(
    x, packed, lows, highs, heads, tokens, batch_stride, head_stride, token_stride, stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
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
    values = tl.load(x, mask=there, other=float("inf")).to(tl.float32)
    low = half(tl.min(values, axis=1))
    high = half(tl.max(tl.where(there, values, float("-inf")), axis=1))
    vector = head * tokens * GROUPS + group
    tl.store(lows + vector, low, mask=group < tokens * GROUPS)
    tl.store(highs + vector, high, mask=group < tokens * GROUPS)
    codes = nearest_level(values, low.to(tl.float32)[:, None], high.to(tl.float32)[:, None], 2**BITS - 1)
    shifts = (tl.arange(0, 8 // BITS) * BITS)[None, None, :]
    octets = tl.sum(codes.reshape(V, W * BITS // 8, 8 // BITS) << shifts, axis=2)
    byte = tl.arange(0, W * BITS // 8)[None, :]
    there = (group < tokens * GROUPS)[:, None] & (byte < SIZE * BITS // 8)
    tl.store(packed + vector[:, None] * (SIZE * BITS // 8) + byte, octets.to(tl.uint8), mask=there)


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
