"""Attention to components in groups of a byte on a CPU: no token is decoded.

A logit is the sum over a token's bytes of products of query and codebook vector; the sum of the values is made of how
much weight each byte's 256 vectors got. Queries and sums are mapped, not keys and values.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.machine import compiled, spread
from vqkv.kernels.view import Grouped, Mapped, Rope

LANES = 4  # queries at a time
LEAST_BLOCK = 8  # tokens for which a query is mapped anew; for fewer it is cheaper to decode keys
COST = 16  # additions that a byte is worth


def serves(keys, values, rope: Rope | None) -> bool:
    """Tell whether these are such components, of keys that turn in blocks or not at all."""
    return (rope is None or rope.block >= LEAST_BLOCK) and isinstance(keys, Mapped) and isinstance(values, Mapped)


def decode_attention(
    query: Tensor, keys: Mapped, values: Mapped, scaling: float, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """``naive.decode_attention``."""
    batch, heads, seq_len, head_dim = keys.shape
    rows = query.float().reshape(batch, -1, head_dim) * scaling
    turned = rows.unsqueeze(2) if rope is None else rope.by_block(rows, seq_len)
    turned = turned.view(batch, heads, -1, head_dim)  # queries of a KV head, and of each the blocks
    count, blocks = rows.shape[1] // heads, turned.shape[2] * heads // rows.shape[1]
    matrix = keys.matrix * keys.inner.scale.float().unsqueeze(2)
    mapped = _lanes((turned @ matrix.mT).view(batch, heads, count, blocks, -1))
    fixed = _lanes((turned @ _offset(keys).mT).view(batch, heads, count, blocks, 1))
    logits = torch.empty(batch, heads, seq_len, mapped.shape[-1])
    shift, block = (0, seq_len) if rope is None else (rope.start % rope.block, rope.block)
    _run(_logits, keys.inner, mapped, fixed, logits, shift, block)
    weights, total = logits.softmax(dim=2), logits.logsumexp(dim=2)[..., :count]
    sums = torch.zeros(batch, heads, values.inner.shape[3], weights.shape[-1])
    _run(_summed, values.inner, weights, sums)
    sums = (sums * values.inner.scale.float().unsqueeze(2))[..., :count]
    out = sums.mT @ values.matrix + _offset(values)
    return out.reshape(query.shape), total.reshape(query.shape[:3])


def _offset(packed: Mapped) -> Tensor:
    """(num_kv_heads, 1, head_dim)."""
    heads, _, head_dim = packed.matrix.shape
    return torch.zeros(heads, 1, head_dim) if packed.offset is None else packed.offset.float().unsqueeze(1)


def _lanes(x: Tensor) -> Tensor:
    """(batch, heads, queries, ...) -> (batch, heads, ..., queries), filled up to whole ``LANES``."""
    return F.pad(x.movedim(2, -1), (0, -x.shape[2] % LANES)).contiguous()


def _run(loop, packed: Grouped, *about) -> None:
    codes = packed.codes.contiguous()
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in (codes, packed.table, *packed.places, *about)]
    heads = codes.shape[0] * codes.shape[1]
    spread(lambda i, j: loop(i, j, *arrays), heads, COST * codes.numel() // max(1, heads))


@compiled(fast=True)
def _logits(first, stop, codes, table, sizes, starts, firsts, mapped, fixed, logits, shift, block):
    heads, seq_len, groups = codes.shape[1:]
    for one in range(first, stop):
        b, h = one // heads, one % heads
        for lane in range(0, logits.shape[3], LANES):
            for n in range(seq_len):
                place = (n + shift) // block
                query, start = mapped[b, h, place], fixed[b, h, place, 0]
                s0, s1, s2, s3 = start[lane], start[lane + 1], start[lane + 2], start[lane + 3]
                for j in range(groups):
                    size, to = sizes[h, j], firsts[h, j]
                    at = starts[h, j] + np.int64(codes[b, h, n, j]) * size
                    for i in range(size):
                        value, row = table[at + i], query[to + i]
                        s0 += value * row[lane]
                        s1 += value * row[lane + 1]
                        s2 += value * row[lane + 2]
                        s3 += value * row[lane + 3]
                out = logits[b, h, n]
                out[lane], out[lane + 1], out[lane + 2], out[lane + 3] = s0, s1, s2, s3


@compiled(fast=True)
def _summed(first, stop, codes, table, sizes, starts, firsts, weights, sums):
    heads, seq_len, groups = codes.shape[1:]
    seen = np.empty((groups, 256, LANES), np.float32)
    for one in range(first, stop):
        b, h = one // heads, one % heads
        for lane in range(0, weights.shape[3], LANES):
            seen[:] = 0
            for n in range(seq_len):
                row = weights[b, h, n]
                w0, w1, w2, w3 = row[lane], row[lane + 1], row[lane + 2], row[lane + 3]
                for j in range(groups):
                    into = seen[j, codes[b, h, n, j]]
                    into[0] += w0
                    into[1] += w1
                    into[2] += w2
                    into[3] += w3
            for j in range(groups):
                size, to, at = sizes[h, j], firsts[h, j], starts[h, j]
                for code in range(256):
                    weight = seen[j, code]
                    for i in range(size):
                        for k in range(LANES):
                            sums[b, h, to + i, lane + k] += table[at + code * size + i] * weight[k]
