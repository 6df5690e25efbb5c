"""Attention to affine codes on a CPU: products with the codes themselves, whose ends join once a token and group."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.machine import compiled, index, spread
from vqkv.kernels.view import Affine, Rope

COST = 8  # additions that a byte is worth


def serves(keys, values, rope: Rope | None) -> bool:
    """Tell whether these are such codes, of whole bytes a group, and of keys that need not turn."""
    return rope is None and all(isinstance(x, Affine) and x.group_size * x.bits % 8 == 0 for x in (keys, values))


def decode_attention(query: Tensor, keys: Affine, values: Affine, scaling: float, rope: None) -> tuple[Tensor, Tensor]:
    """``naive.decode_attention``."""
    batch, heads, seq_len, head_dim = keys.shape
    rows = query.float().reshape(batch, heads, -1, head_dim) * scaling
    parts = rows.unflatten(-1, (keys.low.shape[3], -1))  # (batch, num_kv_heads, queries, groups, channels)
    logits = torch.empty(*rows.shape[:3], seq_len)
    apart = parts.unflatten(-1, (-1, 8 // keys.bits)).mT.flatten(-2).contiguous()  # as codes come out of bytes
    _run(keys, 0, apart, parts.sum(dim=-1), logits)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lows = torch.zeros(*rows.shape[:3], values.low.shape[3])
    sums = lows.new_zeros(*lows.shape, values.group_size)
    _run(values, 1, weights, sums, lows)
    sums = sums.unflatten(-1, (8 // values.bits, -1)).mT.flatten(-2).add_(lows.unsqueeze(-1)).flatten(-2)
    return sums.div_(total).reshape(query.shape), total.log_().add_(largest).reshape(query.shape[:3])


def _run(packed: Affine, which: int, *about: Tensor) -> None:
    low, heads = packed.low.float(), packed.low.shape[0] * packed.low.shape[1]
    span = packed.high.float().sub_(low).div_(2**packed.bits - 1)
    arrays = [x.numpy() for x in (packed.codes.contiguous(), low, span, *about)]
    spread(lambda i, j: _loops(packed.bits)[which](i, j, *arrays), heads, COST * packed.codes.numel() // max(1, heads))


@cache
def _loops(bits: int):
    """Compiled for codes of so many bits, whose shifts are then constants."""
    each, mask = 8 // bits, 2**bits - 1

    @compiled(inline=True)
    def unpack(codes, row):
        size = len(codes)
        for j in range(each):
            for i in range(size):
                row[j * size + i] = codes[i] >> j * bits & mask

    @compiled(fast=True)
    def multiplied(first, stop, packed, low, span, query, sums, logits):
        heads, seq_len, groups = low.shape[1:]
        queries, size = query.shape[2], packed.shape[3] // groups
        row = np.empty(each * size, np.float32)
        for one in range(first, stop):
            b, h = one // heads, one % heads
            for n in range(index(seq_len)):
                for g in range(index(groups)):
                    unpack(packed[b, h, n, g * size : (g + 1) * size], row)
                    for q in range(index(queries)):
                        mine, total = query[b, h, q, g], np.float32(0)
                        for i in range(each * size):
                            total += row[i] * mine[i]
                        total = total * span[b, h, n, g] + sums[b, h, q, g] * low[b, h, n, g]
                        logits[b, h, q, n] = total if g == 0 else logits[b, h, q, n] + total

    @compiled(fast=True)
    def added(first, stop, packed, low, span, weights, sums, lows):
        heads, seq_len, groups = low.shape[1:]
        queries, size = weights.shape[2], packed.shape[3] // groups
        row = np.empty(each * size, np.float32)
        for one in range(first, stop):
            b, h = one // heads, one % heads
            for n in range(index(seq_len)):
                for g in range(index(groups)):
                    unpack(packed[b, h, n, g * size : (g + 1) * size], row)
                    for q in range(index(queries)):
                        weight, mine = weights[b, h, q, n], sums[b, h, q, g]
                        lows[b, h, q, g] += weight * low[b, h, n, g]
                        weight *= span[b, h, n, g]
                        for i in range(each * size):
                            mine[i] += weight * row[i]

    return multiplied, added
