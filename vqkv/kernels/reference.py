"""The truth that every fast kernel is tested against: residual VQ by brute force in float64."""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # differences held at a time, so that memory stays bounded


def rvq_encode(x: Tensor, codebooks: Tensor) -> Tensor:
    """Algorithm 1 of the residual VQ paper: nearest code, subtract, repeat.

    x (..., dim) and codebooks (num_quantizers, codebook_size, dim), any float dtype -> codes (..., num_quantizers),
    int64. All arithmetic is in float64; of equally near codes the lowest index wins.
    """
    residual = x.reshape(-1, x.shape[-1]).double()
    codes = []
    for codebook in codebooks.double():
        codes.append(nearest(residual, codebook))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1).view(*x.shape[:-1], len(codebooks))


def nearest(residual: Tensor, codebook: Tensor) -> Tensor:
    """Index of the nearest code of every row: residual (rows, dim), codebook (codebook_size, dim), both float64."""
    rows = max(1, CHUNK_ELEMENTS // max(1, codebook.numel()))
    distances = [(part[:, None] - codebook).square_().sum(dim=-1) for part in residual.split(rows)]
    return torch.cat([distance.argmin(dim=-1) for distance in distances])


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum of the chosen codes: codes (..., num_quantizers) -> float64 (..., dim)."""
    return sum(codebook[codes[..., k]] for k, codebook in enumerate(codebooks.double()))
