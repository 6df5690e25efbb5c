"""Plain torch as one would write it first, an operation a line: the implementation that every kernel has to beat."""

import torch
from torch import Tensor

from vqkv.kernels import naive as reference
from vqkv.kernels.decoding.naive import decode_affine
from vqkv.kernels.view import Affine, Coded, KernelView

ROWS = 8192  # whose distances are held at a time


def nearest(rows: Tensor, codebook: Tensor) -> Tensor:
    """rows (n, dim), codebook (codebook_size, dim) -> (n,)."""
    return torch.cat([torch.cdist(part, codebook).argmin(dim=-1) for part in rows.split(ROWS)])


def rvq_encode(x: Tensor, codebooks: Tensor) -> Tensor:
    """x (rows, dim) -> codes (rows, num_quantizers)."""
    residual, codes = x, []
    for codebook in codebooks:
        codes.append(nearest(residual, codebook))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1)


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """codes (rows, num_quantizers) -> (rows, dim)."""
    return sum(codebook[codes[:, k]] for k, codebook in enumerate(codebooks))


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and sums of residuals in fp32, see ``reference.rvq_statistics``."""
    residual, counts, sums = x, [], []
    for codebook, chosen in zip(codebooks, codes.unbind(-1), strict=True):
        counts.append(torch.bincount(chosen, minlength=len(codebook)))
        sums.append(torch.zeros_like(codebook).index_add_(0, chosen, residual))
        residual = residual - codebook[chosen]
    return torch.stack(counts), torch.stack(sums)


def rvq_encode_packed(vectors: Tensor, points: Tensor, bits: int) -> Tensor:
    """vectors (..., dim), points (1, codes, dim) -> packed codes of the nearest."""
    codes = nearest(vectors.reshape(-1, vectors.shape[-1]), points[0].float()).view(vectors.shape[:-1])
    return pack_codes(codes.to(torch.uint8), bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes of 2, 4 or 8 bits: one strided slice a place of a byte; others bit by bit."""
    if 8 % bits:
        return reference.pack_codes(codes, bits)
    each = 8 // bits
    packed = codes[..., ::each].clone()
    for place in range(1, each):
        packed |= codes[..., place::each] << place * bits
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_codes``."""
    if 8 % bits:
        return reference.unpack_codes(packed, bits, count)
    places = [packed >> place * bits & 2**bits - 1 for place in range(8 // bits)]
    return torch.stack(places, dim=-1).flatten(-2)[..., :count]


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """Pack values as ``reference.affine_encode`` does."""
    groups = x.unflatten(-1, (-1, group_size))
    low, high = groups.amin(dim=-1).half(), groups.amax(dim=-1).half()
    start, span = low.float().unsqueeze(-1), (high.float() - low.float()).unsqueeze(-1)
    codes = ((groups - start) / span * (2**bits - 1)).round().clamp(0, 2**bits - 1)
    return Affine(pack_codes(codes.to(torch.uint8).flatten(-2), bits), low, high, bits)


def decode(packed: KernelView) -> Tensor:
    """Restore values as ``reference.decode`` does."""
    return decode_affine(packed, unpack_codes) if isinstance(packed, Affine) else _coded(packed)


def _coded(packed: Coded) -> Tensor:
    tables, num_quantizers, _, _ = packed.codebooks.shape
    codes = unpack_codes(packed.codes, packed.bits, packed.groups * num_quantizers).long()
    codes = codes.unflatten(-1, (packed.groups // tables, tables, num_quantizers))
    stages = range(num_quantizers)
    pieces = [sum(book[k][codes[..., t, k]] for k in stages) for t, book in enumerate(packed.codebooks.float())]
    values = torch.stack(pieces, dim=-2).flatten(3, 4)  # (batch, num_kv_heads, seq_len, groups, dim)
    if packed.scale is not None:
        scale = packed.scale.float().repeat_interleave(packed.tokens_per_scale, dim=2)[:, :, : packed.shape[2]]
        values = values * scale.repeat_interleave(packed.groups // scale.shape[-1], dim=-1).unsqueeze(-1)
    return values.mT.flatten(-2) if packed.strided else values.flatten(-2)
