"""Queries mapped to the components that keys are stored as, rotated back by the angle of each block of tokens."""

import torch
from torch import Tensor

from vqkv.kernels.view import Mapped, Rope


def mapped_queries(rows: Tensor, keys: Mapped, rope: Rope | None) -> Tensor:
    """Queries (batch, num_kv_heads, queries, head_dim) -> their products with what each component stands for in the
    blocks that ``keys`` are in, and last with the offset: (batch, num_kv_heads, blocks, queries, components + 1); one
    block where nothing rotates. Products of query and matrix are rotated, which are as few as there are angles, and not
    a query for each block."""
    matrix = keys.scaled
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
