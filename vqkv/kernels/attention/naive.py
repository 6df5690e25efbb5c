"""Attention over everything decoded at once, and what the fast ones share."""

import torch
from torch import Tensor

from vqkv.kernels.formats.naive import decode
from vqkv.kernels.view import Grouped, KernelView, Rope


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of query (batch, num_heads, new_tokens, head_dim) to all of ``keys`` and ``values``, unmasked: float32
    output of the query's shape, and its log-sum-exp (batch, num_heads, new_tokens), for ``merge``. Query head h reads
    KV head h // (num_heads / num_kv_heads). ``rope``: of keys stored before it; the query comes rotated."""
    k, v = decode(keys), decode(values)
    k = k if rope is None else rope.rotated(k)
    repeats = query.shape[1] // k.shape[1]
    scores = query.float() @ k.repeat_interleave(repeats, dim=1).mT * scaling
    return scores.softmax(dim=-1) @ v.repeat_interleave(repeats, dim=1), scores.logsumexp(dim=-1)


def merge(outputs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to all keys from attention to some each: outputs (shares, ..., head_dim) and log-sum-exps."""
    total = sums.logsumexp(dim=0)
    return ((sums - total).exp().unsqueeze(-1) * outputs).sum(dim=0), total


def mapped_queries(rows: Tensor, keys: Grouped, rope: Rope | None) -> Tensor:
    """Multiply queries (batch, num_kv_heads, queries, head_dim) by what each component stands for in the blocks that
    ``keys`` are in, and last by the offset: (batch, num_kv_heads, blocks, queries, components + 1); one block where
    nothing rotates. Products of query and matrix are rotated, as few as there are angles, not a query a block."""
    matrix = keys.scaled_matrix
    if rope is None:
        return (rows @ matrix.mT).unsqueeze(2)
    cos, sin = rope.by_block(keys.shape[2])
    half = rows.shape[-1] // 2
    (a, b), (x, y) = ((z[..., :half], z[..., half:]) for z in (rows.unsqueeze(3), matrix.unsqueeze(1).unsqueeze(0)))
    parts = rows.new_empty(*rows.shape[:3], matrix.shape[1], 2 * half)
    torch.mul(a, x, out=parts[..., :half]).addcmul_(b, y)
    torch.mul(b, x, out=parts[..., half:]).addcmul_(a, y, value=-1)
    table = torch.cat([cos[:, :half], sin[:, :half]], dim=-1)
    return (table @ parts.flatten(2, 3).mT).unflatten(-1, parts.shape[2:4])
