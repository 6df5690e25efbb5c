"""Beam search for residual VQ in plain torch, on any device.

``argmin`` over the scores, not the matrix product, is what costs: so the minimum is found in two levels, blocks first.
"""

import torch
from torch import Tensor

from vqkv.kernels.precision import full_precision
from vqkv.kernels.rvq.tables import SearchTables, prepare

CHUNK = 2048  # candidates at a time: fewer calls than 1,024, and their scores (16 MB for 2,048 codes) still stay in L3
SAFE = 2.0**50  # scores keep to fp32 while values are below this and some code is above its inverse
WIDE = 4096  # from here on, a position takes so many of a gap's 24 bits that the rest orders gaps too coarsely


def rvq_candidates(x: Tensor, codebooks: Tensor, beam: int, keep: int | None = None) -> Tensor:
    """The ``keep`` best candidates of ``naive.rvq_candidates``, (..., candidates, num_quantizers), by scores in fp32,
    where nearly equal ones may change places, or in float64, if squares might leave fp32."""
    rows, keep = x.detach().reshape(-1, x.shape[-1]), keep or beam
    tables = prepare(codebooks)
    if len(rows) == 0:
        count = min(keep, codebooks.shape[1] ** len(codebooks))
        return torch.empty(*x.shape[:-1], count, len(codebooks), dtype=torch.int64, device=x.device)
    if float(rows.abs().max()) > SAFE or not 1 / SAFE < tables.largest.max() < SAFE:
        tables = prepare(codebooks, torch.float64)
    size = max(1, CHUNK // beam)
    scores = tables.weights.new_empty(min(size, len(rows)) * beam, tables.weights.shape[-1])
    with full_precision(x.device):
        codes = torch.cat([_search(part, tables, scores, beam, keep) for part in rows.split(size)])
    return codes.view(*x.shape[:-1], *codes.shape[1:])


def _search(x: Tensor, tables: SearchTables, scores: Tensor, beam: int, keep: int) -> Tensor:
    """Codes (rows, candidates, K). A GEMM for every candidate's residual: Gram tables of the codebooks would spare it,
    but then each score adds a number from memory for every earlier stage, and that measured 4 times slower."""
    rows, dim = x.shape
    num_quantizers, codebook_size = len(tables.weights), len(tables.flat) // len(tables.weights)
    residual = x.to(scores.dtype).unsqueeze(1)  # (rows, candidates, dim), best first
    codes = torch.empty(rows, 1, 0, dtype=torch.int64, device=x.device)
    for k, weights in enumerate(tables.weights):
        candidates = residual.shape[1]
        extended = torch.cat([residual, residual.new_ones(rows, candidates, 1)], dim=-1).view(-1, dim + 1)
        distances = torch.mm(extended, weights, out=scores[: len(extended)]).view(rows, candidates, -1, tables.block)
        count = min(keep if k == num_quantizers - 1 else beam, candidates * codebook_size)
        parents, chosen = _best_pairs(distances, torch.linalg.vecdot(residual, residual), count)
        taken = tables.flat.index_select(0, chosen.flatten() + tables.offsets[k]).view(rows, count, dim)
        residual = _rows_of(residual, parents) - taken
        codes = torch.cat([_rows_of(codes, parents), chosen.unsqueeze(-1)], dim=-1)
    return codes


def _rows_of(values: Tensor, parents: Tensor) -> Tensor:
    """values (rows, candidates, ...) of each row's ``parents`` (rows, count)."""
    return values.gather(1, parents.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _best_pairs(distances: Tensor, energies: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best (candidate, code) pairs, best first: two (rows, count), from the blocks with the smallest
    minima. ``distances`` (rows, candidates, blocks, block) lack the candidates' energies (rows, candidates)."""
    rows, _, blocks, block = distances.shape
    minima = (distances.amin(dim=-1) + energies.unsqueeze(-1)).view(rows, -1)
    near = _smallest(minima, min(count, minima.shape[1])).sort(dim=-1).values  # sorted: ties go to the lowest index
    first = torch.arange(rows, device=near.device).unsqueeze(-1) * minima.shape[1]
    inside = distances.view(-1, block).index_select(0, (near + first).flatten()).view(rows, -1, block)
    inside = inside + energies.gather(1, near // blocks).unsqueeze(-1)
    places = _smallest(inside.view(rows, -1), count)
    chosen = near.gather(1, places // block)
    return chosen // blocks, chosen % blocks * block + places % block


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` smallest of every row (rows, width), smallest first, ties by the lowest position.
    ``amin`` of integers is vectorised, ``argmin`` and ``topk`` are not. Gaps to the minimum order like their bits; the
    lowest bits make room for the position, which blurs a gap by at most width / 2^23 of itself."""
    width = scores.shape[-1]
    gaps = scores - scores.amin(dim=-1, keepdim=True)
    gaps = gaps.double() if width > WIDE else gaps
    integer = torch.int32 if gaps.dtype == torch.float32 else torch.int64
    low = (1 << (width - 1).bit_length()) - 1
    keys = gaps.view(integer) & ~low | torch.arange(width, dtype=integer, device=scores.device)
    found = []
    for _ in range(count):
        found.append((keys.amin(dim=-1, keepdim=True) & low).long())
        keys.scatter_(1, found[-1], torch.iinfo(integer).max)
    return torch.cat(found, dim=-1)
