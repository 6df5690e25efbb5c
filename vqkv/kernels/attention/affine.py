"""Attention to affine codes on a CPU: products with the codes themselves, whose ends join once a token and group."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.machine import compiled, index, spread
from vqkv.kernels.view import Affine, Rope

COST = 8  # additions that a byte is worth


def serves(keys, values, rope: Rope | None) -> bool:
    """Tell whether these are such codes, of whole bytes a group, and of keys that need no rotation."""
    return rope is None and all(isinstance(x, Affine) and x.group_size * x.bits % 8 == 0 for x in (keys, values))


def decode_attention(query: Tensor, keys: Affine, values: Affine, scaling: float, rope: None) -> tuple[Tensor, Tensor]:
    """Compute ``naive.decode_attention``."""
    batch, heads, seq_len, head_dim = keys.shape
    rows = query.float().reshape(batch, heads, -1, head_dim) * scaling
    parts = rows.unflatten(-1, (keys.low.shape[3], -1))  # (batch, num_kv_heads, queries, groups, channels)
    logits = torch.zeros(*rows.shape[:3], seq_len)
    apart = parts.unflatten(-1, (-1, 8 // keys.bits)).mT.flatten(-2).contiguous()  # as codes come out of bytes
    _run(_multiplied, keys, apart, parts.sum(dim=-1), logits)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lows = torch.zeros(*rows.shape[:3], values.low.shape[3])
    sums = lows.new_zeros(*lows.shape, values.group_size)
    _run(_added, values, weights, sums, lows)
    sums = sums.unflatten(-1, (8 // values.bits, -1)).mT.flatten(-2).add_(lows.unsqueeze(-1)).flatten(-2)
    return sums.div_(total).reshape(query.shape), total.log_().add_(largest).reshape(query.shape[:3])


def _run(step, packed: Affine, *about: Tensor) -> None:
    low, heads = packed.low.float(), packed.low.shape[0] * packed.low.shape[1]
    span = packed.high.float().sub_(low).div_(2**packed.bits - 1)
    arrays, loop = [x.numpy() for x in (packed.codes.contiguous(), low, span, *about)], _loop(packed.bits, step)
    spread(lambda i, j: loop(i, j, *arrays), heads, COST * packed.codes.numel() // max(1, heads))


@cache
def _loop(bits: int, step):
    """Compile ``step`` over each token's and group's codes for so many bits, whose shifts are then constants."""
    each, mask = 8 // bits, 2**bits - 1

    @compiled(fast=True)
    def run(first, stop, packed, low, span, a, b, c):
        heads, seq_len, groups = low.shape[1:]
        size = packed.shape[3] // groups
        row = np.empty(each * size, np.float32)
        for one in range(first, stop):
            i, h = one // heads, one % heads
            for n in range(index(seq_len)):
                for g in range(index(groups)):
                    codes = packed[i, h, n, g * size : (g + 1) * size]
                    for j in range(each):
                        for k in range(size):
                            row[j * size + k] = codes[k] >> j * bits & mask
                    step(row, low[i, h, n, g], span[i, h, n, g], a[i, h], b[i, h], c[i, h], n, g)

    return run


@compiled(fast=True, inline=True)
def _multiplied(row, low, span, query, sums, logits, n, g):
    for q in range(index(len(query))):
        mine, total = query[q, g], np.float32(0)
        for i in range(len(row)):
            total += row[i] * mine[i]
        logits[q, n] += total * span + sums[q, g] * low


@compiled(fast=True, inline=True)
def _added(row, low, span, weights, sums, lows, n, g):
    for q in range(index(len(weights))):
        weight, mine = weights[q, n], sums[q, g]
        lows[q, g] += weight * low
        weight *= span
        for i in range(len(row)):
            mine[i] += weight * row[i]
