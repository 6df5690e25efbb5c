"""Values <-> packed tokens on a CPU: compiled loops and sums by torch, with the bits of ``naive`` for affine codes.
Plain torch for tensors elsewhere."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.derived import remembered
from vqkv.kernels.formats import naive
from vqkv.kernels.machine import compiled, index, serves, spread
from vqkv.kernels.packing.cpu import pack_codes, unpack_codes
from vqkv.kernels.rvq.cpu import summed
from vqkv.kernels.view import Affine, Coded, Grouped, KernelView

AFFINE_COST = 8  # additions that an affine value is worth
TO_INTEGER = np.float32(1 << 23)  # a float32 that large has no fraction
WIDE = {1: torch.float32, 2: torch.float64, 4: torch.complex128}  # so many fp32 values -> a type of their size


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """Compute ``naive.affine_encode``."""
    groups = x.detach().float().contiguous().unflatten(-1, (-1, group_size))
    if not serves(groups) or not groups.numel():
        return naive.affine_encode(x, bits, group_size)
    low, high = (end.clamp(-65504, 65504).half() for end in _ends(groups))
    codes = torch.empty(groups.shape, dtype=torch.uint8)
    arrays = groups.view(-1, group_size), low.float().view(-1), high.float().view(-1), codes.view(-1, group_size)
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _nearest_levels(i, j, bits, *fixed), low.numel(), AFFINE_COST * group_size)
    return Affine(pack_codes(codes.flatten(-2), bits), low, high, bits)


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return smallest and largest of the last axis, of 0 and -0 the first."""
    low, high = x.amin(dim=-1), x.amax(dim=-1)
    if (low * high).all():
        return low, high
    return torch.aminmax(x, dim=-1)  # several times slower, but knows which zero comes first


@compiled()
def _nearest_levels(first, stop, bits, x, low, high, codes):
    """Fill codes (rows, values), one a byte, of rows first, ..., stop - 1 of x between their ends."""
    most = np.float32((1 << bits) - 1)
    for i in range(index(first), index(stop)):
        start, step = low[i], high[i] - low[i]
        step = step if step > 0 else np.float32(1)
        for j in range(index(x.shape[1])):
            value = (x[i, j] - start) / step * most
            value = value if value > 0 else np.float32(0)
            value = value if value < most else most
            codes[i, j] = np.uint8(np.int32(value + TO_INTEGER))


def decode(packed: KernelView) -> Tensor:
    """Compute ``naive.decode``."""
    if isinstance(packed, Grouped):
        return _grouped(packed)
    return _affine(packed) if isinstance(packed, Affine) else _coded(packed)


def _affine(packed: Affine) -> Tensor:
    """Decode in one pass where groups are complete bytes of up to 4 bits a code."""
    size = packed.group_size
    if not serves(packed.codes) or packed.bits not in (1, 2, 4) or size * packed.bits % 8:
        return naive.decode_affine(packed, unpack_codes)
    low, out = packed.low.float(), torch.empty(*packed.low.shape, size, dtype=torch.float32)
    arrays = packed.codes.contiguous(), low.contiguous(), (packed.high.float() - low).contiguous(), out
    fixed, rows = [array.numpy() for array in arrays], out.shape[2]
    spread(lambda i, j: _affine_loop(packed.bits)(i, j, *fixed), rows, AFFINE_COST * out.numel() // max(1, rows))
    return out.flatten(-2)


@cache
def _affine_loop(bits: int):
    """Compile the loop for codes of so many bits, whose shifts are then constants."""
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


def _coded(packed: Coded) -> Tensor:
    tables, num_quantizers, _, dim = packed.codebooks.shape
    alone = tables == num_quantizers == 1 and 8 % packed.bits == 0 and serves(packed.codes)
    if alone:
        values = _looked_up(packed)
    else:
        codes = unpack_codes(packed.codes, packed.bits, packed.groups * num_quantizers)
        values = summed(codes, packed.codebooks)
    if packed.scale is None and not packed.strided:
        return values if alone else values.view(packed.shape)
    values = values.view(*packed.codes.shape[:3], packed.groups, dim)
    if packed.scale is not None:
        values *= _by_group(packed, packed.scale.float())
    return values.mT.flatten(-2) if packed.strided else values.flatten(-2)


def _looked_up(packed: Coded) -> Tensor:
    """Gather all values of a byte at once, of one codebook whose codes fill bytes evenly."""
    shape, width = packed.codes.shape, packed.groups * packed.codebooks.shape[3]
    table = _by_byte(packed.codebooks, packed.bits)
    values = table.index_select(0, packed.codes.reshape(-1).to(torch.int32)).view(torch.float32)
    values = values.view(*shape[:3], shape[3] * 8 // packed.bits * packed.codebooks.shape[3])
    return values if values.shape[3] == width else values[..., :width].contiguous()


@remembered
def _by_byte(codebooks: Tensor, bits: int) -> Tensor:
    """Tabulate what each of 256 bytes stands for, as one wide element where there is a type of that size."""
    codes = torch.arange(256).unsqueeze(-1) >> torch.arange(0, 8, bits) & (2**bits - 1)
    values = codebooks.float().flatten(0, 2)[codes.clamp_max(codebooks.shape[2] - 1)].flatten(1)
    wide = WIDE.get(values.shape[1])
    return values if wide is None else values.view(wide).view(-1)  # one axis is gathered faster than two


def _by_group(packed: Coded, scale: Tensor) -> Tensor:
    """Repeat the scale for every token and group: (batch, num_kv_heads, seq_len, groups or 1, 1)."""
    if packed.tokens_per_scale > 1:
        scale = scale.repeat_interleave(packed.tokens_per_scale, dim=2)[:, :, : packed.shape[2]]
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(packed.groups // scale.shape[-1], dim=-1)
    return scale.unsqueeze(-1)


def _grouped(packed: Grouped) -> Tensor:
    if not serves(packed.codes):
        return naive.decode(packed)
    out = torch.zeros(*packed.codes.shape[:3], packed.scale.shape[1])
    fixed = [array.numpy() for array in (packed.codes.contiguous(), packed.table, *packed.layout, out)]
    rows = out.shape[2]
    spread(lambda i, j: _gather(i, j, *fixed), rows, out.numel() // max(1, rows))
    return naive.mapped(packed, out)


@compiled()
def _gather(first, stop, codes, table, sizes, starts, firsts, out):
    batch, heads, _, groups = codes.shape
    for b in range(batch):
        for h in range(heads):
            for n in range(index(first), index(stop)):
                for j in range(index(groups)):
                    at, to = index(starts[h, j]) + index(codes[b, h, n, j]), index(firsts[h, j])
                    for i in range(index(sizes[h, j])):
                        out[b, h, n, to + i] = table[at + i * index(256)]


def grouped_encode(x: Tensor, like: Grouped) -> Tensor:
    """Compute ``naive.grouped_encode``."""
    if not serves(x):
        return naive.grouped_encode(x, like)
    y = x[..., : like.scale.shape[1]].float() / like.scale.float().unsqueeze(1)
    codes = torch.empty(*x.shape[:3], like.layout.shape[2], dtype=torch.uint8)
    fixed = [array.numpy() for array in (y.contiguous(), like.table, *like.layout, codes)]
    rows = x.shape[2]
    spread(lambda i, j: _nearest(i, j, *fixed), rows, 256 * y.numel() // max(1, rows))
    return codes


@compiled(fast=True)
def _nearest(first, stop, y, table, sizes, starts, firsts, codes):
    batch, heads, _, groups = codes.shape
    norms, scores = np.empty(256, np.float32), np.empty(256, np.float32)
    for h in range(heads):
        for j in range(index(groups)):
            start, at = index(starts[h, j]), index(firsts[h, j])
            norms[:] = 0
            for i in range(index(sizes[h, j])):
                row = table[start + i * index(256) :]
                for k in range(256):
                    norms[k] += row[k] * row[k]
            for b in range(batch):
                for n in range(index(first), index(stop)):
                    for k in range(256):
                        scores[k] = norms[k]
                    for i in range(index(sizes[h, j])):
                        twice, row = 2 * y[b, h, n, at + i], table[start + i * index(256) :]
                        for k in range(256):
                            scores[k] -= twice * row[k]
                    codes[b, h, n, j] = scores.argmin()
