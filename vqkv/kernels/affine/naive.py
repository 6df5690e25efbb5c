"""Affine quantization, one operation after the other."""

import torch
from torch import Tensor

from vqkv.kernels.packing.naive import pack_codes
from vqkv.kernels.view import Affine


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """x (batch, num_kv_heads, seq_len, head_dim): the ends of every group rounded to fp16, and codes between them."""
    groups = x.float().unflatten(-1, (-1, group_size))
    low, high = (end.clamp(-65504, 65504).half() for end in torch.aminmax(groups, dim=-1))
    start, span = low.float().unsqueeze(-1), (high.float() - low.float()).unsqueeze(-1)
    levels = 2**bits - 1
    codes = ((groups - start) / span.where(span > 0, torch.ones_like(span)) * levels).round().clamp(0, levels)
    return Affine(pack_codes(codes.flatten(-2).to(torch.uint8), bits), low, high, bits)
