"""Plain torch as one would write it first: what kernels have to beat. Else naive twins are that."""

import torch
from torch import Tensor

from vqkv.kernels import naive
from vqkv.kernels.decoding.naive import decode_affine
from vqkv.kernels.view import Affine, KernelView

ROWS = 8192  # whose distances are held at a time


def rvq_encode(x: Tensor, codebooks: Tensor) -> Tensor:
    """Find codes (rows, num_quantizers) of x (rows, dim), a stage at a time."""
    residual, codes = x, []
    for codebook in codebooks:
        nearest = [torch.cdist(part, codebook).argmin(dim=-1) for part in residual.split(ROWS)]
        codes.append(torch.cat(nearest))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1)


def rvq_encode_packed(vectors: Tensor, points: Tensor, bits: int) -> Tensor:
    """Pack the codes of the nearest of points (1, codes, dim) to vectors (..., dim)."""
    codes = rvq_encode(vectors.reshape(-1, vectors.shape[-1]), points.float()).view(vectors.shape[:-1])
    return pack_codes(codes.to(torch.uint8), bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes of 2, 4 or 8 bits, a strided slice for each place in a byte; others bit by bit."""
    if 8 % bits:
        return naive.pack_codes(codes, bits)
    each = 8 // bits
    packed = codes[..., ::each].clone()
    for place in range(1, each):
        packed |= codes[..., place::each] << place * bits
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Invert ``pack_codes``."""
    if 8 % bits:
        return naive.unpack_codes(packed, bits, count)
    places = [packed >> place * bits & 2**bits - 1 for place in range(8 // bits)]
    return torch.stack(places, dim=-1).flatten(-2)[..., :count]


def decode(packed: KernelView) -> Tensor:
    """Restore values as ``naive.decode`` does."""
    return decode_affine(packed, unpack_codes) if isinstance(packed, Affine) else naive.decode(packed)
