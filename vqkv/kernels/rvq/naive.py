"""Residual VQ by brute force in float64: what every other search is tested against."""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # differences held at a time, so that memory stays bounded


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Nearest code, subtract, repeat; of equally near codes the lowest. x (..., dim) and codebooks (num_quantizers,
    codebook_size, dim), any float dtype -> int64 codes (..., num_quantizers). With ``beam`` > 1, so many sequences of
    codes with the smallest squared residuals are kept from stage to stage and extended by every code. Of equally good
    extensions the naive search takes that of the better sequence, then the lower code."""
    if beam > 1:
        rows = [_beam_search(row, codebooks.double(), beam) for row in x.reshape(-1, x.shape[-1]).double()]
        return torch.stack(rows).view(*x.shape[:-1], len(codebooks))
    residual = x.reshape(-1, x.shape[-1]).double()
    codes = []
    for codebook in codebooks.double():
        codes.append(nearest(residual, codebook))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1).view(*x.shape[:-1], len(codebooks))


def _beam_search(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    residuals, codes = x.unsqueeze(0), torch.empty(1, 0, dtype=torch.int64, device=x.device)
    for codebook in codebooks:
        distances = (residuals.unsqueeze(1) - codebook).square_().sum(dim=-1)
        best = distances.flatten().sort(stable=True).indices[:beam]
        parents, chosen = best // len(codebook), best % len(codebook)
        residuals = residuals[parents] - codebook[chosen]
        codes = torch.cat([codes[parents], chosen.unsqueeze(-1)], dim=-1)
    return codes[0]


def nearest(residual: Tensor, codebook: Tensor) -> Tensor:
    """Find each row's nearest code, an index: residual (rows, dim), codebook (codebook_size, dim), both float64."""
    rows = max(1, CHUNK_ELEMENTS // max(1, codebook.numel()))
    distances = [(part[:, None] - codebook).square_().sum(dim=-1) for part in residual.split(rows)]
    return torch.cat([distance.argmin(dim=-1) for distance in distances])


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum the vectors of codes (..., num_quantizers): float32 (..., dim), naive float64."""
    return sum(codebook[codes[..., k]] for k, codebook in enumerate(codebooks.double()))


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Count how often each stage chose each code for x (rows, dim), codes (rows, num_quantizers), and sum the residuals
    for which it did: float64 (num_quantizers, codebook_size) and (num_quantizers, codebook_size, dim)."""
    residual, counts, sums = x.double(), [], []
    for codebook, chosen in zip(codebooks.double(), codes.long().unbind(-1), strict=True):
        counts.append(torch.bincount(chosen, minlength=len(codebook)).double())
        sums.append(torch.zeros_like(codebook).index_add_(0, chosen, residual))
        residual = residual - codebook[chosen]
    return torch.stack(counts), torch.stack(sums)
