"""Residual VQ on a CPU: matrix products and sums by torch, the search in compiled loops.

A code's score is |c|^2 - 2 r.c in fp32. Where rounding leaves a doubt, float64 decides, so codes do not depend on a
processor, a batch or a number of threads. For tensors elsewhere, and traced ones: a beam of one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.machine import serves, spread
from vqkv.kernels.packing.cpu import pack_codes
from vqkv.kernels.precision import full_precision
from vqkv.kernels.rvq.beam import rvq_candidates
from vqkv.kernels.rvq.loops import SHORT, step
from vqkv.kernels.rvq.tables import SearchTables, prepare

SCORES = 1 << 18  # at a time, 1 MB: with the codebook they stay in the L2 cache
SHARE = 4  # times that for each of several threads, as starting them takes time
PASSES = 4  # over the scores, as additions


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Codes of ``naive.rvq_encode``, up to float64 ties; with ``beam`` > 1 see ``beam.rvq_candidates``."""
    if beam > 1 or not serves(x, codebooks):
        return rvq_candidates(x, codebooks, beam, keep=1).squeeze(-2)
    rows, tables = x.detach().reshape(-1, x.shape[-1]).contiguous(), prepare(codebooks)
    codes = torch.empty(len(rows), len(codebooks), dtype=torch.int64)
    threads = torch.get_num_threads()
    chunk = max(1, SCORES // codebooks.shape[1]) * (1 if threads == 1 else SHARE * threads)
    with full_precision(x.device):
        for part, found in zip(rows.split(chunk), codes.split(chunk), strict=True):
            _search(part, tables, found)
    return codes.view(*x.shape[:-1], len(codebooks))


def _search(x: Tensor, tables: SearchTables, codes: Tensor) -> None:
    """All stages of rows x (rows, dim): fills ``codes`` (rows, K)."""
    residual, rounded = x.to(torch.float64, copy=True), F.pad(x.float(), (0, 1), value=1)
    scores = torch.empty(tables.exact.shape[1], len(x), dtype=torch.float32)
    for weights, exact, largest, found in zip(tables.weights, tables.exact, tables.largest, codes.unbind(-1)):
        if x.shape[1] > SHORT:
            torch.mm(weights.T, rounded.T, out=scores)
        fixed = (scores, weights, exact, largest, residual, rounded, found)
        fixed = [each.numpy() if isinstance(each, Tensor) else each for each in fixed]
        spread(lambda i, j, fixed=fixed: step(i, j, *fixed), len(x), PASSES * len(scores))


def rvq_encode_packed(x: Tensor, codebooks: Tensor, bits: int, beam: int = 1) -> Tensor:
    """``naive.rvq_encode_packed``."""
    return pack_codes(rvq_encode(x, codebooks, beam).flatten(-2), bits)


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum of the chosen codes in float32: codes (..., num_quantizers) -> (..., dim)."""
    tables = prepare(codebooks)
    rows = codes.reshape(-1, len(codebooks)).to(torch.int32) + tables.offsets
    return F.embedding_bag(rows, tables.flat, mode="sum").view(*codes.shape[:-1], codebooks.shape[-1])


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """``naive.rvq_statistics`` of residuals in x's dtype, as they are quantized."""
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
