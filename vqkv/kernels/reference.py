"""The truth that every fast kernel is tested against: residual VQ by brute force in float64."""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # differences held at a time, so that memory stays bounded


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Algorithm 1 of the residual VQ paper: nearest code, subtract, repeat.

    x (..., dim) and codebooks (num_quantizers, codebook_size, dim), any float dtype -> codes (..., num_quantizers),
    int64. All arithmetic is in float64; of equally near codes the lowest index wins. With ``beam`` > 1, the
    first of ``rvq_candidates``.
    """
    if beam > 1:
        return rvq_candidates(x, codebooks, beam)[..., 0, :]
    residual = x.reshape(-1, x.shape[-1]).double()
    codes = []
    for codebook in codebooks.double():
        codes.append(nearest(residual, codebook))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1).view(*x.shape[:-1], len(codebooks))


def rvq_candidates(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    """Beam search: keep the ``beam`` sequences of codes with the smallest squared residual, stage by stage extend each
    by every code, and return all that are left, best first: (..., min(beam, codebook_size^num_quantizers), K).

    Of equally good extensions, the one of the better candidate, then the lower code, comes first.
    """
    rows = [_beam_search(row, codebooks.double(), beam) for row in x.reshape(-1, x.shape[-1]).double()]
    return torch.stack(rows).view(*x.shape[:-1], *rows[0].shape)


def _beam_search(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    residuals, codes = x.unsqueeze(0), torch.empty(1, 0, dtype=torch.int64, device=x.device)
    for codebook in codebooks:
        distances = (residuals.unsqueeze(1) - codebook).square_().sum(dim=-1)
        best = distances.flatten().sort(stable=True).indices[:beam]
        parents, chosen = best // len(codebook), best % len(codebook)
        residuals = residuals[parents] - codebook[chosen]
        codes = torch.cat([codes[parents], chosen.unsqueeze(-1)], dim=-1)
    return codes


def nearest(residual: Tensor, codebook: Tensor) -> Tensor:
    """Index of the nearest code of every row: residual (rows, dim), codebook (codebook_size, dim), both float64."""
    rows = max(1, CHUNK_ELEMENTS // max(1, codebook.numel()))
    distances = [(part[:, None] - codebook).square_().sum(dim=-1) for part in residual.split(rows)]
    return torch.cat([distance.argmin(dim=-1) for distance in distances])


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum of the chosen codes: codes (..., num_quantizers) -> float64 (..., dim)."""
    return sum(codebook[codes[..., k]] for k, codebook in enumerate(codebooks.double()))
