"""Attention to packed tokens on a CPU, piece by piece, while what is decoded of a piece is in the cache."""

from torch import Tensor

from vqkv.kernels.attention import affine, grouped
from vqkv.kernels.attention.naive import merge
from vqkv.kernels.decoding.cpu import decode
from vqkv.kernels.machine import serves
from vqkv.kernels.view import Coded, KernelView, Rope

PIECE = 1 << 18  # values of keys decoded at a time: 1 MB


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """``naive.decode_attention`` that holds no more than a piece of keys and values decoded."""
    if serves(query) and not query.requires_grad:
        for form in (grouped, affine):
            if form.serves(keys, values, rope):
                return form.decode_attention(query, keys, values, scaling, rope)
    rows = query.float().reshape(*keys.shape[:2], -1, keys.shape[3]) * scaling
    parts = []
    whole = max([x.tokens_per_scale for x in (keys, values) if isinstance(x, Coded)], default=1)
    batch, num_kv_heads, seq_len, head_dim = keys.shape
    step = max(1, PIECE // (batch * num_kv_heads * head_dim * whole)) * whole
    for start in range(0, seq_len, step):
        stop = min(start + step, seq_len)
        k, v = decode(keys.tokens(start, stop)), decode(values.tokens(start, stop))
        k = k if rope is None else rope.turned(k, start)
        scores = rows @ k.mT
        parts.append((scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)))
    out, total = merge(parts)
    return out.view(query.shape), total.view(query.shape[:3])
