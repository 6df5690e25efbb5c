"""Packed affine codes -> values in one pass over memory, in a compiled loop; the bits of ``decoding.naive``."""

from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.affine.cpu import COST, FLOAT16
from vqkv.kernels.machine import index, serves, spread


def takes(bits: int, out: Tensor) -> bool:
    """Whether ``affine`` is for codes of so many bits and memory like ``out``."""
    return serves(out) and out.dtype is torch.float32 and bits in (1, 2, 4)


def serves_affine(packed: Tensor, levels: Tensor, low: Tensor, out: Tensor) -> bool:
    """Whether ``affine`` can decode these."""
    bits = len(levels).bit_length() - 1
    if not takes(bits, out) or out.ndim != 5 or out.shape[4] * bits % 8:
        return False
    *rows, groups, size = out.shape
    return (
        packed.dtype is torch.uint8
        and low.dtype is torch.float16
        and low.shape == (*rows, groups)
        and packed.shape == (*rows, groups * size * bits // 8)
    )


def affine(packed: Tensor, levels: Tensor, low: Tensor, high: Tensor, out: Tensor) -> None:
    """out = levels[code] * (high - low) + low, for codes of 1, 2 or 4 bits.

    ``packed`` uint8 (batch, num_kv_heads, rows, bytes); ``levels`` float32 (2^bits); ``low`` and ``high`` float16
    (batch, num_kv_heads, rows, groups), each for equally many bytes in a row; ``out`` float32 (batch, num_kv_heads,
    rows, groups, values of a group), any strides. See ``serves_affine``.
    """
    packed, low, high = (x if x.is_contiguous() else x.contiguous() for x in (packed, low, high))
    decode, ends = _affine(len(levels).bit_length() - 1), [x.numpy().view(np.uint16) for x in (low, high)]
    fixed = (packed.numpy(), levels.numpy(), *ends, FLOAT16, out.numpy())
    spread(lambda i, j: decode(i, j, *fixed), out.shape[2], COST * out.numel() // out.shape[2])


@cache
def _affine(bits: int):
    """Compiled for codes of so many bits, whose shifts are then constants."""
    each, mask = 8 // bits, 2**bits - 1

    @numba.njit("(i8, i8, u1[:,:,:,::1], f4[::1], u2[:,:,:,::1], u2[:,:,:,::1], f4[::1], f4[:,:,:,:,:])", nogil=True)
    def decode(first, stop, packed, levels, low, high, float16, out):
        batch, heads, _, groups = low.shape
        size = packed.shape[3] // groups
        table = np.empty(mask + 1, np.float32)
        for b in range(batch):
            for h in range(heads):
                for n in range(index(first), index(stop)):
                    for g in range(groups):
                        start = float16[low[b, h, n, g]]
                        span = float16[high[b, h, n, g]] - start
                        codes, values = packed[b, h, n, g * size : (g + 1) * size], out[b, h, n, g]
                        for k in range(mask + 1):
                            table[k] = levels[k] * span + start
                        for i in range(size):
                            for j in range(each):
                                values[i * each + j] = table[codes[i] >> j * bits & mask]

    return decode
