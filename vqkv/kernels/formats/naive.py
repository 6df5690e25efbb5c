"""Values <-> packed tokens, one operation after the other."""

import torch
from torch import Tensor

from vqkv.kernels.packing.naive import pack_codes, unpack_codes
from vqkv.kernels.view import Affine, Coded, Grouped, KernelView


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """Round each group's ends to fp16 and x (batch, num_kv_heads, seq_len, head_dim) to codes of 1 to 8 bits between
    them."""
    groups = x.float().unflatten(-1, (-1, group_size))
    low, high = (end.clamp(-65504, 65504).half() for end in torch.aminmax(groups, dim=-1))
    start, span = low.float().unsqueeze(-1), (high.float() - low.float()).unsqueeze(-1)
    levels = 2**bits - 1
    codes = ((groups - start) / span.where(span > 0, torch.ones_like(span)) * levels).round().clamp(0, levels)
    return Affine(pack_codes(codes.flatten(-2).to(torch.uint8), bits), low, high, bits)


def grouped_encode(x: Tensor, like: Grouped) -> Tensor:
    """Find each group's nearest vector in fp32, in the tables of ``like``: uint8 codes (batch, num_kv_heads, rows,
    groups) of components x (batch, num_kv_heads, rows, components)."""
    y = x[..., : like.scale.shape[1]].float() / like.scale.float().unsqueeze(1)
    codes = torch.empty(*x.shape[:3], like.layout.shape[2], dtype=torch.uint8, device=x.device)
    for h in range(x.shape[1]):
        for j, (size, start, first) in enumerate(like.layout[:, h].T.tolist()):
            book = like.table[start : start + 256 * size].view(size, 256)
            scores = book.square().sum(0) - 2 * y[:, h, :, first : first + size] @ book
            codes[:, h, :, j] = scores.argmin(-1)
    return codes


def decode(packed: KernelView) -> Tensor:
    """Decode to values (batch, num_kv_heads, seq_len, head_dim), float32."""
    if isinstance(packed, Grouped):
        return mapped(packed, _components(packed))
    return decode_affine(packed) if isinstance(packed, Affine) else _coded(packed)


def decode_affine(packed: Affine, unpack=unpack_codes) -> Tensor:
    """Decode affine codes, which ``unpack`` takes out of their bytes."""
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


def mapped(packed: Grouped, components: Tensor) -> Tensor:
    """Map components over their scale (batch, num_kv_heads, seq_len, components) to values."""
    values = components.mul_(packed.scale.float().unsqueeze(1))
    values = values if packed.matrix is None else values @ packed.matrix
    return values if packed.offset is None else values + packed.offset.float().unsqueeze(1)


def _components(packed: Grouped) -> Tensor:
    out = torch.zeros(*packed.codes.shape[:3], packed.scale.shape[1], device=packed.codes.device)
    for h in range(out.shape[1]):
        for j, (size, start, first) in enumerate(packed.layout[:, h].T.tolist()):
            book = packed.table[start : start + 256 * size].view(size, 256)
            out[:, h, :, first : first + size] = book.T[packed.codes[:, h, :, j].long()]
    return out
