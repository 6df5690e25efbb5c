"""Affine quantization on a CPU in compiled loops, one pass over the values. The arithmetic is that of ``naive``,
operation by operation, and so are the bits."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.affine import naive
from vqkv.kernels.decoding.naive import decode_affine
from vqkv.kernels.machine import compiled, index, serves, spread
from vqkv.kernels.packing.cpu import pack_codes, unpack_codes
from vqkv.kernels.view import Affine

COST = 8  # additions that a value is worth
WHOLE = np.float32(1 << 23)  # a float32 that large has no fraction


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """``naive.affine_encode``."""
    groups = x.detach().float().contiguous().unflatten(-1, (-1, group_size))
    if not serves(groups) or not groups.numel():
        return naive.affine_encode(x, bits, group_size)
    low, high = (end.clamp(-65504, 65504).half() for end in _ends(groups))
    codes = torch.empty(groups.shape, dtype=torch.uint8)
    arrays = groups.view(-1, group_size), low.float().view(-1), high.float().view(-1), codes.view(-1, group_size)
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _encode(i, j, bits, *fixed), low.numel(), COST * group_size)
    return Affine(pack_codes(codes.flatten(-2), bits), low, high, bits)


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of the last axis, of 0 and -0 the first."""
    low, high = x.amin(dim=-1), x.amax(dim=-1)
    if (low * high).all():
        return low, high
    return torch.aminmax(x, dim=-1)  # several times slower, but knows which zero comes first


def affine_decode(packed: Affine) -> Tensor:
    """``decoding.naive.decode_affine``, in one pass where groups are whole bytes of up to 4 bits a code."""
    size = packed.group_size
    if not serves(packed.codes) or packed.bits not in (1, 2, 4) or size * packed.bits % 8:
        return decode_affine(packed, unpack_codes)
    low, out = packed.low.float(), torch.empty(*packed.low.shape, size, dtype=torch.float32)
    arrays = packed.codes.contiguous(), low.contiguous(), (packed.high.float() - low).contiguous(), out
    fixed, rows = [array.numpy() for array in arrays], out.shape[2]
    spread(lambda i, j: _decode(packed.bits)(i, j, *fixed), rows, COST * out.numel() // max(1, rows))
    return out.flatten(-2)


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
