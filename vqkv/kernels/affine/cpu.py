"""Affine quantization on a CPU in compiled loops, one pass over the values. The arithmetic is that of ``naive``,
operation by operation, and so are the bits."""

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.affine import naive
from vqkv.kernels.machine import compiled, index, serves, spread
from vqkv.kernels.packing.cpu import pack_codes
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
