"""Attention to packed tokens on a CPU, piece by piece, while what is decoded of a piece is in the cache."""

import torch
from torch import Tensor

from vqkv.kernels.attention import affine, grouped
from vqkv.kernels.attention.naive import merge
from vqkv.kernels.formats.cpu import decode
from vqkv.kernels.machine import serves
from vqkv.kernels.view import Coded, KernelView, Rope

PIECE = 1 << 18  # values of keys decoded at a time: 1 MB


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``naive.decode_attention``, with no more than a piece of keys and values decoded."""
    if serves(query) and not query.requires_grad:
        for form in (grouped, affine):
            if form.serves(keys, values, rope):
                return form.decode_attention(query, keys, values, scaling, rope)
    rows = query.float().reshape(*keys.shape[:2], -1, keys.shape[3]) * scaling
    block = max([x.tokens_per_scale for x in (keys, values) if isinstance(x, Coded)], default=1)
    step = max(1, PIECE // (keys.shape.numel() // max(1, keys.shape[2]) * block)) * block
    outputs, sums = [], []
    for start in range(0, keys.shape[2], step):
        stop = min(start + step, keys.shape[2])
        k, v = decode(keys.tokens(start, stop)), decode(values.tokens(start, stop))
        scores = rows @ (k if rope is None else rope.rotated(k, start)).mT
        outputs.append(scores.softmax(dim=-1) @ v)
        sums.append(scores.logsumexp(dim=-1))
    out, total = merge(torch.stack(outputs), torch.stack(sums))
    return out.view(query.shape), total.view(query.shape[:3])
