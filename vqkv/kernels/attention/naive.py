"""Attention over everything decoded at once, and what joins shares of it."""

import torch
from torch import Tensor

from vqkv.kernels.decoding.naive import decode
from vqkv.kernels.view import KernelView, Rope


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of query (batch, num_heads, new_tokens, head_dim) to all of ``keys`` and ``values``, unmasked: float32
    output of the query's shape, and its log-sum-exp (batch, num_heads, new_tokens), for ``merge``. Query head h reads
    KV head h // (num_heads / num_kv_heads). ``rope``: of keys stored before it; the query comes rotated."""
    k, v = decode(keys), decode(values)
    k = k if rope is None else rope.turned(k)
    repeats = query.shape[1] // k.shape[1]
    scores = query.float() @ k.repeat_interleave(repeats, dim=1).mT * scaling
    return scores.softmax(dim=-1) @ v.repeat_interleave(repeats, dim=1), scores.logsumexp(dim=-1)


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from attention to some of them each: outputs (..., head_dim) and log-sum-exps (...)."""
    outputs, sums = (torch.stack(x) for x in zip(*parts, strict=True))
    total = sums.logsumexp(dim=0)
    return ((sums - total).exp().unsqueeze(-1) * outputs).sum(dim=0), total
