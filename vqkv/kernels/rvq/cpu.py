"""Residual VQ on a CPU: matrix products and sums by torch, the search in compiled loops.

A code's score is |c|^2 - 2 r.c in fp32. Where rounding leaves a doubt, float64 decides, so codes do not depend on a
processor, a batch or a number of threads. For tensors elsewhere, and traced ones: a beam of one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.machine import serves, spread
from vqkv.kernels.precision import full_precision
from vqkv.kernels.rvq.beam import rvq_candidates
from vqkv.kernels.rvq.loops import LANES, step
from vqkv.kernels.rvq.short import search
from vqkv.kernels.rvq.tables import SearchTables, prepare, sums_by_code

SCORES = 1 << 18  # at a time, 1 MB: with the codebook they stay in the L2 cache
SHARE = 4  # times that for each of several threads, as starting them takes time
PASSES = 4  # over the scores, as additions
SHORT, FEW = 8, 1 << 11  # vectors and codebooks (values) for which the products are not worth a pass over memory


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Codes of ``naive.rvq_encode``, up to float64 ties; with ``beam`` > 1 see ``beam.rvq_candidates``."""
    if beam > 1 or not serves(x, codebooks):
        return rvq_candidates(x, codebooks, beam, keep=1).squeeze(-2)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32  # holds x without rounding
    rows, tables = x.detach().reshape(-1, x.shape[-1]).to(exact).contiguous(), prepare(codebooks)
    codes = torch.empty(len(rows), len(codebooks), dtype=torch.int64)
    short = x.shape[-1] <= SHORT and codebooks[0].numel() <= FEW
    with full_precision(x.device):
        (_search if short else _stages)(rows, tables, codes)
    return codes.view(*x.shape[:-1], len(codebooks))


def _search(x: Tensor, tables: SearchTables, codes: Tensor) -> None:
    """Short vectors, without matrix products."""
    fixed = (*tables.arrays, x.numpy(), codes.numpy())
    spread(lambda i, j: search(i, j, *fixed), len(x), tables.flat.numel())


def _stages(x: Tensor, tables: SearchTables, codes: Tensor) -> None:
    """Stage by stage, as many rows as keep their scores in the cache."""
    width, threads = tables.lanes.shape[-1], torch.get_num_threads()
    chunk = max(LANES, SCORES // width) * (1 if threads == 1 else SHARE * threads)
    scores = torch.empty(min(chunk, len(x)), width)
    bounds = torch.empty(len(scores), 2, dtype=torch.float64)  # of a residual: its norm, and how far it may be off
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        residual, found = x[part].to(torch.float32, copy=True), scores[: len(x) - start]
        rows = [tensor.numpy() for tensor in (x[part], residual, bounds, codes[part])]
        fixed = (found.numpy(), *tables.arrays, *rows)
        for k, weights in enumerate(tables.lanes):
            torch.mm(residual, weights[:-1], out=found)  # without the norms
            spread(lambda i, j, k=k, fixed=fixed: step(i, j, k, *fixed), len(residual), PASSES * width)


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
