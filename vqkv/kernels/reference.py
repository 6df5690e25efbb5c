"""The truth that every fast kernel is tested against: residual VQ by brute force in float64, codes bit by bit."""

import torch
import torch.nn.functional as F
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


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., count), integers below 2^bits, -> uint8 (..., ceil(count * bits / 8)): code i is the bits i * bits to
    (i + 1) * bits of its row's string, lowest first; zeros fill the last byte."""
    string = (codes.to(torch.int32).unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1).flatten(-2)
    octets = F.pad(string, (0, -string.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, device=codes.device)).sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_codes``: uint8 (..., ceil(count * bits / 8)) -> int64 (..., count)."""
    string = (packed.to(torch.int32).unsqueeze(-1) >> torch.arange(8, device=packed.device) & 1).flatten(-2)
    codes = string[..., : count * bits].unflatten(-1, (count, bits))
    return (codes << torch.arange(bits, device=packed.device)).sum(dim=-1)


def lookup(packed: Tensor, table: Tensor) -> Tensor:
    """Every byte replaced by its row of a table: uint8 (..., size), (256, values) -> (..., size * values)."""
    return table[packed.long()].flatten(-2)
