"""Residual VQ on a CPU: matrix products and sums by torch, the search in compiled loops.

A code's score is |c|^2 - 2 r.c in fp32. Where rounding leaves a doubt, float64 decides, so codes do not depend on a
processor, a batch or a number of threads. For tensors elsewhere, and traced ones: a beam of one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.derived import remembered
from vqkv.kernels.machine import serves, spread
from vqkv.kernels.precision import full_precision
from vqkv.kernels.rvq import loops
from vqkv.kernels.rvq.tables import BLOCK, SearchTables, prepare, sums_by_code

SCORES = 1 << 18  # at a time, 1 MB: with the codebook they stay in the L2 cache
SHARE = 4  # times that for each of several threads, as starting them takes time
PASSES = 4  # over the scores, as additions
CANDIDATES = 2048  # of beams at a time: fewer calls than 1,024, and their scores (16 MB for 2,048 codes) stay in L3
SHORT, FEW = 8, 1 << 11  # vectors and codebooks (values) for which the products are not worth a pass over memory


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Find the codes of ``naive.rvq_encode``, up to float64 ties; with ``beam`` > 1 see ``_beam_search``."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if beam > 1 or not serves(x, codebooks):
        codes = _beam_search(rows, codebooks, beam)
    else:
        rows = rows.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()  # without rounding
        codes = torch.empty(len(rows), len(codebooks), dtype=torch.int64)
        search = _short if x.shape[-1] <= SHORT and codebooks[0].numel() <= FEW else _stages
        with full_precision(x.device):
            search(rows, prepare(codebooks), codes)
    return codes.view(*x.shape[:-1], len(codebooks))


def _short(x: Tensor, tables: SearchTables, codes: Tensor) -> None:
    """Search short vectors, without matrix products."""
    fixed = [table.numpy() for table in (tables.products, tables.norms, tables.codebooks, tables.exact, x, codes)]
    spread(lambda i, j: loops.search_short(i, j, tables.largest, *fixed), len(x), tables.codebooks.numel())


def _stages(x: Tensor, tables: SearchTables, codes: Tensor) -> None:
    """Search stage by stage, as many rows as keep their scores in the cache."""
    width, threads = tables.norms.shape[1], torch.get_num_threads()
    chunk = max(64, SCORES // width) * (1 if threads == 1 else SHARE * threads)
    scores = torch.empty(min(chunk, len(x)), width)
    bounds = torch.empty(len(scores), 2, dtype=torch.float64)  # of a residual: its norm, and how far it may be off
    fixed = [table.numpy() for table in (tables.norms, tables.codebooks, tables.exact, bounds)]
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        residual, used = x[part].to(torch.float32, copy=True), scores[: len(x) - start]
        rows = [tensor.numpy() for tensor in (x[part], residual, codes[part], used)]
        for k, products in enumerate(tables.products):
            torch.mm(residual, products, out=used)

            def step(first: int, stop: int, stage: int = k, rows: list = rows) -> None:
                loops.step(first, stop, stage, tables.largest, *fixed, *rows)

            spread(step, len(residual), PASSES * width)


def _beam_search(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    """Find codes (rows, num_quantizers) of ``naive.rvq_encode`` for x (rows, dim), by scores in fp32: nearly equal ones
    may change places."""
    tables, size = prepare(codebooks), max(1, CANDIDATES // beam)
    scores = tables.norms.new_empty(min(size, len(x)) * beam, tables.norms.shape[1])  # new memory would take longer
    with full_precision(x.device):
        return torch.cat([_extended(part, tables, scores, beam) for part in x.float().split(size)])


def _extended(x: Tensor, tables: SearchTables, buffer: Tensor, beam: int) -> Tensor:
    """Extend candidates by a matrix product for each one's residual. Gram tables of the codebooks would spare it, but
    then a score adds a number from memory for each earlier stage, which measured 4 times slower."""
    rows, (num_quantizers, codebook_size, _) = len(x), tables.codebooks.shape
    residual = x.unsqueeze(1)  # (rows, candidates, dim), best first
    codes = torch.empty(rows, 1, 0, dtype=torch.int64, device=x.device)
    for k, products in enumerate(tables.products):
        count = min(1 if k == num_quantizers - 1 else beam, residual.shape[1] * codebook_size)
        candidates = residual.flatten(0, 1)
        scores = torch.addmm(tables.norms[k], candidates, products, out=buffer[: len(candidates)])
        scores += torch.linalg.vecdot(candidates, candidates).unsqueeze(-1)
        best = _smallest(scores.view(rows, -1), count)
        parents, chosen = best // scores.shape[1], best % scores.shape[1]
        residual = _rows_of(residual, parents) - tables.codebooks[k][chosen]
        codes = torch.cat([_rows_of(codes, parents), chosen.unsqueeze(-1)], dim=-1)
    return codes.squeeze(1)


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Find positions of the ``count`` smallest of every row (rows, width), in order: of the blocks with the smallest
    minima, as ``topk`` over all scores would take longer than the product."""
    blocks = scores.unflatten(1, (-1, BLOCK))
    near = blocks.amin(dim=-1).topk(min(count, blocks.shape[1]), largest=False).indices
    inside = blocks.gather(1, near.unsqueeze(-1).expand(-1, -1, BLOCK)).flatten(1)
    best = inside.topk(count, largest=False).indices
    return near.gather(1, best // BLOCK) * BLOCK + best % BLOCK


def _rows_of(values: Tensor, parents: Tensor) -> Tensor:
    """Gather values (rows, candidates, ...) of each row's ``parents`` (rows, count)."""
    return values.gather(1, parents.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum of the chosen codes in float32: codes (..., num_quantizers) -> (..., dim)."""
    return summed(codes, codebooks.unsqueeze(0)).view(*codes.shape[:-1], codebooks.shape[-1])


def summed(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Codes, a token's groups one after the other, which take turns with ``codebooks`` (tables, num_quantizers, size,
    dim), -> float32 (tokens * groups, dim)."""
    tables, num_quantizers, size, _ = codebooks.shape
    first = torch.arange(tables * num_quantizers, device=codes.device, dtype=torch.int32) * size
    rows = codes.reshape(-1, len(first)).to(torch.int32) + first  # rows among those of all codebooks
    return F.embedding_bag(rows.view(-1, num_quantizers), _rows(codebooks), mode="sum")


@remembered
def _rows(codebooks: Tensor) -> Tensor:
    return codebooks.float().flatten(0, 2)


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``naive.rvq_statistics`` of residuals in x's dtype, as they are quantized."""
    residual, statistics = x, []
    for codebook, chosen in zip(codebooks.to(x.dtype), codes.long().unbind(-1), strict=True):
        statistics.append(sums_by_code(residual, chosen, len(codebook)))
        residual = residual - codebook[chosen]
    counts, sums = zip(*statistics, strict=True)
    return torch.stack(counts), torch.stack(sums)
