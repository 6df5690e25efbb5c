"""Packed tokens -> values, code by code."""

import torch
from torch import Tensor

from vqkv.kernels.packing.naive import unpack_codes
from vqkv.kernels.view import Affine, Coded, KernelView


def decode(packed: KernelView) -> Tensor:
    """Values (batch, num_kv_heads, seq_len, head_dim), float32."""
    return decode_affine(packed) if isinstance(packed, Affine) else _coded(packed)


def decode_affine(packed: Affine, unpack=unpack_codes) -> Tensor:
    """Values of affine codes, which ``unpack`` takes out of their bytes."""
    codes = unpack(packed.codes, packed.bits, packed.shape[-1]).unflatten(-1, (-1, packed.group_size))
    low, high = packed.low.float().unsqueeze(-1), packed.high.float().unsqueeze(-1)
    return codes.float().div_(2**packed.bits - 1).mul_(high - low).add_(low).flatten(-2)


def _coded(packed: Coded) -> Tensor:
    tables, num_quantizers, _, dim = packed.codebooks.shape
    codes = unpack_codes(packed.codes, packed.bits, packed.groups * num_quantizers)
    codes = codes.unflatten(-1, (packed.groups, num_quantizers))
    values = torch.zeros(*codes.shape[:-1], dim, dtype=torch.float32, device=codes.device)
    for group in range(packed.groups):
        for k in range(num_quantizers):
            values[..., group, :] += packed.codebooks[group % tables, k].float()[codes[..., group, k]]
    if packed.scale is not None:
        scale = packed.scale.float().repeat_interleave(packed.tokens_per_scale, dim=2)[:, :, : packed.shape[2]]
        values *= scale.repeat_interleave(packed.groups // scale.shape[-1], dim=-1).unsqueeze(-1)
    return values.mT.flatten(-2) if packed.strided else values.flatten(-2)
