"""Attention to components in groups of a byte on a CPU, which maps queries and the sum of values, not keys and values.

A block's keys are read through codebooks while they are in the L1 cache; the sum of values is made of how much weight
each byte's 256 vectors got.
"""

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.attention.naive import mapped_queries
from vqkv.kernels.machine import compiled, index, spread
from vqkv.kernels.view import Grouped, Rope

TILE = 16  # tokens at a time
MIN_BLOCK = 8  # tokens for which a query is mapped again; for fewer it is cheaper to decode keys
COST = 16  # additions that a byte is worth


def serves(keys, values, rope: Rope | None) -> bool:
    """Tell whether these are such components, of keys that rotate in blocks or not at all."""
    rotates_in_blocks = rope is None or (rope.block >= MIN_BLOCK and 2 * len(rope.inv_freq) == keys.shape[3])
    return rotates_in_blocks and all(isinstance(x, Grouped) and x.matrix is not None for x in (keys, values))


def decode_attention(
    query: Tensor, keys: Grouped, values: Grouped, scaling: float, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """Compute ``naive.decode_attention``."""
    batch, heads, seq_len, head_dim = keys.shape
    rows = query.float().reshape(batch, heads, -1, head_dim) * scaling
    shift, block = (0, seq_len) if rope is None else (rope.start % rope.block, rope.block)
    logits = torch.empty(*rows.shape[:3], seq_len)
    _run(_logits, keys, mapped_queries(rows, keys, rope).contiguous(), logits, shift, block, keys.scale.shape[1])
    largest = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    sums = torch.zeros(*rows.shape[:3], values.scale.shape[1])
    _run(_summed, values, weights, sums)
    out = sums.div_(total) @ values.scaled_matrix[:, :-1] + values.scaled_matrix[:, -1:]
    return out.reshape(query.shape), total.log_().add_(largest).reshape(query.shape[:3])


def _run(loop, packed: Grouped, *about) -> None:
    codes = packed.codes.contiguous()
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in (codes, packed.table, *packed.layout, *about)]
    heads = codes.shape[0] * codes.shape[1]
    spread(lambda i, j: loop(i, j, *arrays), heads, COST * codes.numel() // max(1, heads))


@compiled(fast=True)
def _logits(first, stop, codes, table, sizes, starts, firsts, mapped, logits, shift, block, components):
    heads, seq_len, groups = codes.shape[1:]
    queries, width = mapped.shape[3], mapped.shape[4]
    tile = np.zeros((TILE, width), np.float32)
    for one in range(first, stop):
        b, h, done = one // heads, one % heads, 0
        tile[:] = 0
        tile[:, components:] = 1  # of the offset
        while done < seq_len:
            rotation = (done + shift) // block
            end = min(seq_len, (rotation + 1) * block - shift, done + TILE)
            here, count = index(done), index(end - done)
            for j in range(index(groups)):
                start, to = index(starts[h, j]), index(firsts[h, j])
                for i in range(index(sizes[h, j])):
                    row = table[start + i * index(256) :]
                    for n in range(count):
                        tile[n, to + i] = row[index(codes[b, h, here + n, j])]
            for n in range(count):
                for q in range(index(queries)):
                    query, total = mapped[b, h, rotation, q], np.float32(0)
                    for i in range(width):
                        total += tile[n, i] * query[i]
                    logits[b, h, q, here + n] = total
            done = end


@compiled(fast=True)
def _summed(first, stop, codes, table, sizes, starts, firsts, weights, sums):
    heads, seq_len, groups = codes.shape[1:]
    seen = np.empty((groups, 256), np.float32)
    for one in range(first, stop):
        b, h = one // heads, one % heads
        for q in range(weights.shape[2]):
            seen[:] = 0
            for n in range(index(seq_len)):
                weight = weights[b, h, q, n]
                for j in range(index(groups)):
                    seen[j, index(codes[b, h, n, j])] += weight
            for j in range(index(groups)):
                for i in range(index(sizes[h, j])):
                    row, total = table[index(starts[h, j]) + i * index(256) :], np.float32(0)
                    for k in range(256):
                        total += row[k] * seen[j, k]
                    sums[b, h, q, index(firsts[h, j]) + i] = total
