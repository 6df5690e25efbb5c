"""Residual VQ in plain torch, fast on a CPU; greedy codes equal the float64 reference, beam search's nearly always.

``argmin`` over the distances, not the GEMM, is what costs: so the minimum is found in two levels, blocks first.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vqkv.errors import DataError, FormatError
from vqkv.kernels import fused, reference
from vqkv.precision import full_precision

CHUNK = 2048  # rows at a time: fewer calls than 1,024, and their scores (16 MB for 2,048 codes) still stay in L3
MORE_ROWS = 16384  # of small codebooks, whose calls cost more than their arithmetic, so many, with as many scores
TILE = 64  # rows of codes that get their codebooks' offsets at once
BLOCK = 64  # codes per block of the two-level minimum
UNIT = 2.0**-24  # fp32 unit roundoff
UNIT64 = 2.0**-53
HUGE = 2.0**126  # a quarter of the largest fp32: no partial sum below it overflows
TINY = 2.0**-126  # smallest normal fp32: what an underflow may lose
SAFE = 2.0**50  # beam search keeps to fp32 while values are below this and some code is above its inverse
WIDE = 4096  # from here on, a position takes so many of a gap's 24 bits that the rest orders gaps too coarsely


@dataclass
class Tables:
    """Codebooks rearranged for the kernels, with C padded to whole blocks by codes that are infinitely far away."""

    weights: Tensor  # (K, dim + 1, C padded): -2 codebook^T with the squared norms below it
    flat: Tensor  # (K * C, dim)
    offsets: Tensor  # (TILE * K,) first row of every codebook in ``flat``, over and over
    largest: list[float]  # per codebook, the largest norm of a code
    block: int
    machine: fused.encode.Machine | None = None  # the same for machine code, on a CPU


_tables = WeakTensorKeyDictionary()  # codebooks -> (version, Tables): rearranging costs more than encoding a few tokens


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Fast twin of ``reference.rvq_encode``, same arguments and, for ``beam`` 1, the same codes.

    There a row whose winner fp32 cannot prove (see ``_error_bound``) is decided again in float64; exact ties go to the
    lowest index. A wider beam chooses by fp32 scores, so sequences that nearly tie may change places: on Gaussian
    vectors at least 99.9% of the rows get the reference's codes, and the mean squared error agrees to 1e-5 of itself.
    """
    if x.shape[-1] != codebooks.shape[-1]:
        raise DataError(f"vectors of {x.shape[-1]} values for codebooks of {codebooks.shape[-1]}: group them first")
    if beam > 1:
        return rvq_candidates(x, codebooks, beam, keep=1).squeeze(-2)
    rows = x.detach().reshape(-1, x.shape[-1])
    tables = prepare(codebooks)
    if fused.jit.serves(x, codebooks):
        with full_precision(x.device):
            codes = fused.encode.encode(rows, codebooks.detach(), tables.machine)
        return codes.view(*x.shape[:-1], len(codebooks))
    codes = torch.empty(len(rows), len(codebooks), dtype=torch.int64, device=x.device)
    width = tables.weights.shape[-1]
    size = max(CHUNK, min(MORE_ROWS, CHUNK * 1024 // width))
    scores = tables.weights.new_empty(min(size, len(rows)), width)
    with full_precision(x.device):
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            _encode_chunk(rows[part], codebooks, tables, scores, codes[part])
    return codes.view(*x.shape[:-1], len(codebooks))


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Fast twin of ``reference.rvq_decode`` in float32: codes (..., num_quantizers) -> (..., dim)."""
    tables, count = prepare(codebooks), len(codebooks)
    rows = codes.reshape(-1, count)
    if fused.jit.serves(codes, codebooks):
        places = fused.decode.places(rows, tables.machine.offsets, codebooks.shape[1])
        if places is None:
            raise FormatError(f"a code is not in 0 ... {codebooks.shape[1] - 1}: altered payload")
        rows = places
    elif count > 1:  # sums over long rows are faster
        wide = rows.reshape(-1, count * math.gcd(len(rows), TILE))
        rows = (wide + tables.offsets[: wide.shape[1]]).view(-1, count)
    return F.embedding_bag(rows, tables.flat, mode="sum").view(*codes.shape[:-1], codebooks.shape[-1])


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of ``reference.rvq_statistics``, of residuals in x's dtype, as they are quantised."""
    residual, found = x, []
    for codebook, chosen in zip(codebooks.to(x.dtype), codes.long().unbind(-1), strict=True):
        found.append(sums_by_code(residual, chosen, len(codebook)))
        residual = residual - codebook[chosen]
    counts, sums = zip(*found, strict=True)
    return torch.stack(counts), torch.stack(sums)


def sums_by_code(x: Tensor, codes: Tensor, codebook_size: int) -> tuple[Tensor, Tensor]:
    """float64 counts (codebook_size,) of codes (rows,), and the sums of their vectors x (rows, dim). Sorted sums: the
    same order, and so bits, every time."""
    counts = torch.bincount(codes, minlength=codebook_size)
    sums = F.embedding_bag(codes.argsort(stable=True), x.double(), counts.cumsum(0) - counts, mode="sum")
    return counts.double(), sums


def prepare(codebooks: Tensor) -> Tables:
    """The tables of ``codebooks``, kept as long as the tensor lives and is not written to; writing through ``.data`` or
    ``.numpy()`` goes unnoticed."""
    if codebooks.is_inference():
        return _build(codebooks)  # has no version counter to notice writes by
    version, tables = _tables.get(codebooks, (None, None))
    if version != codebooks._version:
        tables = _build(codebooks.detach())
        _tables[codebooks] = (codebooks._version, tables)
    return tables


def _build(codebooks: Tensor, dtype: torch.dtype = torch.float32) -> Tables:
    num_quantizers, codebook_size, dim = codebooks.shape
    block = min(BLOCK, codebook_size)
    padding = -codebook_size % block
    norms = codebooks.double().square().sum(dim=-1)
    weights = torch.cat([-2 * codebooks.to(dtype).mT, norms.to(dtype).unsqueeze(1)], dim=1)
    weights = F.pad(weights, (0, padding))
    weights[:, -1, codebook_size:] = torch.inf
    tables = Tables(
        weights=weights.contiguous(),
        flat=codebooks.to(dtype).reshape(-1, dim).contiguous(),
        offsets=(torch.arange(num_quantizers, dtype=torch.int32, device=codebooks.device) * codebook_size).repeat(TILE),
        largest=norms.amax(dim=-1).sqrt().tolist(),
        block=block,
    )
    if dtype == torch.float32 and fused.jit.serves(codebooks, codebooks):
        tables.machine = fused.encode.machine(tables.weights, tables.flat, tables.largest, tables.offsets)
    return tables


def _encode_chunk(x: Tensor, codebooks: Tensor, tables: Tables, scores: Tensor, codes: Tensor) -> None:
    """Fill ``codes`` (rows, K) for up to as many rows as ``scores``, a buffer (rows, C padded), has."""
    dim = x.shape[-1]
    extended = tables.weights.new_ones(len(x), dim + 1)  # [residual, 1]: the 1 meets the squared norms
    residual = extended[:, :dim].copy_(x)
    scores = scores[: len(x)]
    size = _norm(residual)
    drift = UNIT * size  # how far the fp32 residual may be from the exact one
    for k, weights in enumerate(tables.weights):
        torch.mm(extended, weights, out=scores)
        winner, unproven = _minimum(scores, tables.block, _Errors(size, drift, tables.largest[k], dim))
        if len(unproven):
            exact = fused.encode.exact_residual(x[unproven], codebooks, codes[unproven, :k])
            winner[unproven] = reference.nearest(exact, codebooks[k].double())
        codes[:, k] = winner
        residual -= tables.flat.index_select(0, winner + tables.offsets[k])
        before, size = size, _norm(residual)
        drift = drift + 2 * UNIT * (before + size)


def _minimum(scores: Tensor, block: int, errors: "_Errors") -> tuple[Tensor, Tensor]:
    """Index of the smallest score of every row, and the rows where rounding could have changed it."""
    if scores.shape[-1] == block:  # a small codebook: no blocks to choose from first
        best, winner = scores.min(dim=-1)
        compared = [scores]
    else:
        minima = scores.view(len(scores), -1, block).amin(dim=-1)
        best, which = minima.min(dim=-1)
        first = torch.arange(len(scores), device=scores.device) * minima.shape[1]
        inside = scores.view(-1, block).index_select(0, first + which)
        winner = inside.min(dim=-1).indices + which * block
        compared = [minima, inside]
    reach = (best + 2 * errors.bound(best)).unsqueeze(-1)
    near = [x <= reach for x in compared]
    if sum(x.sum() for x in near) == len(near) * len(scores) and torch.isfinite(best).all():
        return winner, winner[:0]  # one sum over everything is cheaper than one a row, and mostly enough
    rivals = sum(x.sum(dim=-1) for x in near)
    return winner, (rivals != len(near)).nonzero().squeeze(-1)  # also catches NaN, for which nothing compares


@dataclass
class _Errors:
    """How wrong an fp32 score |c|^2 - 2 r.c may be, for the winner and for any code that is truly nearer."""

    size: Tensor  # |r| per row
    drift: Tensor  # bound of |r - exact r| per row
    largest: float  # max |c|
    dim: int

    def bound(self, best: Tensor) -> Tensor:
        """Per row. Such a code is no farther from r than the winner, so |c| <= |r| + sqrt(|r|^2 + best): an outlying
        code elsewhere in the codebook does not loosen the bound."""
        farthest = self._at(torch.tensor(self.largest, dtype=torch.float32))
        distance = (self.size.square() + best + farthest).clamp(min=0).sqrt()
        bound = self._at((self.size + distance).mul(1.001).clamp(max=self.largest))
        overflow = (2 * self.size + self.largest) * self.largest > HUGE
        return bound.masked_fill(overflow, torch.inf)

    def _at(self, norm: Tensor) -> Tensor:
        """Dot product of dim + 1 terms in any order, rounded norms and codes, the residual's drift, underflow - and
        the rounding of the float64 reference itself, so that what it cannot tell apart is decided by it alone."""
        rounding = 1.01 * (self.dim + 4) * UNIT * (2 * self.size + norm) * norm
        reference_rounding = 4 * (self.dim + 4) * UNIT64 * (self.size + norm).square()
        return rounding + reference_rounding + 2.02 * norm * self.drift + (2 * self.dim + 4) * TINY


def _norm(residual: Tensor) -> Tensor:
    return torch.linalg.vecdot(residual, residual).sqrt() + 1e-18  # squares below that underflow


def rvq_candidates(x: Tensor, codebooks: Tensor, beam: int, keep: int | None = None) -> Tensor:
    """Fast twin of ``reference.rvq_candidates``; ``keep`` (by default ``beam``) says how many of them to return.

    Magnitudes whose squares might leave fp32's range are handled in float64. Memory: as for ``beam`` 1.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    tables, keep = prepare(codebooks), keep or beam
    if len(rows) == 0:
        count = min(keep, codebooks.shape[1] ** len(codebooks))
        return torch.empty(*x.shape[:-1], count, len(codebooks), dtype=torch.int64, device=x.device)
    if float(rows.abs().max()) > SAFE or not 1 / SAFE < max(tables.largest) < SAFE:
        tables = _build(codebooks.detach(), torch.float64)
    size = max(1, CHUNK // beam)
    scores = tables.weights.new_empty(min(size, len(rows)) * beam, tables.weights.shape[-1])
    with full_precision(x.device):
        codes = torch.cat([_search(part, tables, scores, beam, keep) for part in rows.split(size)])
    return codes.view(*x.shape[:-1], *codes.shape[1:])


def _search(x: Tensor, tables: Tables, scores: Tensor, beam: int, keep: int) -> Tensor:
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
    """The ``count`` best of all (candidate, code) pairs, best first: two index tensors (rows, count).

    distances (rows, candidates, blocks, block) lack the candidates' energies (rows, candidates). The best pairs lie in
    the blocks with the smallest minima.
    """
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
    lowest bits make room for the position, which blurs a gap (not the score) by at most width / 2^23 of itself.
    """
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
