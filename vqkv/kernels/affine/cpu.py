"""Affine quantization on a CPU in compiled loops, one pass over the values. The arithmetic is that of ``naive``,
operation by operation, and so are the bits."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.affine import naive
from vqkv.kernels.machine import compiled, index, serves, spread
from vqkv.kernels.packed import Affine
from vqkv.kernels.packing.cpu import pack_codes

COST = 8  # additions that a value is worth
WHOLE = np.float32(1 << 23)  # a float32 that large has no fraction


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """``naive.affine_encode``."""
    groups = x.detach().float().contiguous().unflatten(-1, (-1, group_size))
    if not serves(groups) or not groups.numel():
        return naive.affine_encode(x, bits, group_size)
    low, high = (end.clamp(-65504, 65504).half() for end in ends(groups))
    codes = torch.empty(groups.shape, dtype=torch.uint8)
    arrays = groups.view(-1, group_size), low.float().view(-1), high.float().view(-1), codes.view(-1, group_size)
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _encode(i, j, bits, *fixed), low.numel(), COST * group_size)
    return Affine(pack_codes(codes.flatten(-2), bits), low, high, bits)


def ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of the last axis, of 0 and -0 the first."""
    low, high = x.amin(dim=-1), x.amax(dim=-1)
    if (low * high).all():
        return low, high
    return torch.aminmax(x, dim=-1)  # several times slower, but knows which zero comes first


def decodes(bits: int, out: Tensor) -> bool:
    """Tell whether ``affine_decode`` is for codes of so many bits and memory like ``out``, which has its last axis."""
    return serves(out) and out.dtype is torch.float32 and bits in (1, 2, 4) and out.shape[-1] * bits % 8 == 0


def affine_decode(packed: Tensor, bits: int, low: Tensor, high: Tensor, out: Tensor) -> None:
    """out = code / (2^bits - 1) * (high - low) + low, for what ``decodes`` accepts.

    ``packed`` uint8 (batch, num_kv_heads, rows, bytes); ``low`` and ``high`` float16 (batch, num_kv_heads, rows,
    groups), each for equally many bytes in a row; ``out`` float32 (batch, num_kv_heads, rows, groups, values of a
    group), any strides.
    """
    low = low.float()
    arrays = packed.contiguous(), low.contiguous(), (high.float() - low).contiguous(), out
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _decode(bits)(i, j, *fixed), out.shape[2], COST * out.numel() // out.shape[2])


@compiled()
def _encode(first, stop, bits, x, low, high, codes):
    """Codes (rows, values), one a byte, of rows first, ..., stop - 1 of x between their ends."""
    most = np.float32((1 << bits) - 1)
    for i in range(index(first), index(stop)):
        start, step = low[i], high[i] - low[i]
        step = step if step > 0 else np.float32(1)
        for j in range(index(x.shape[1])):
            value = (x[i, j] - start) / step * most
            value = value if value > 0 else np.float32(0)
            value = value if value < most else most
            codes[i, j] = np.uint8(np.int32(value + WHOLE))


@cache
def _decode(bits: int):
    """Compiled for codes of so many bits, whose shifts are then constants."""
    each, mask = 8 // bits, 2**bits - 1

    @compiled()
    def decode(first, stop, packed, low, span, out):
        batch, heads, _, groups = low.shape
        size, table = packed.shape[3] // groups, np.empty(mask + 1, np.float32)
        for b in range(batch):
            for h in range(heads):
                for n in range(index(first), index(stop)):
                    for g in range(groups):
                        codes, values = packed[b, h, n, g * size : (g + 1) * size], out[b, h, n, g]
                        for k in range(mask + 1):
                            table[k] = np.float32(k) / np.float32(mask) * span[b, h, n, g] + low[b, h, n, g]
                        for i in range(size):
                            for j in range(each):
                                values[i * each + j] = table[codes[i] >> j * bits & mask]

    return decode
