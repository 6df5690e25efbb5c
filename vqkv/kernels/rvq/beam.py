"""Beam search for residual VQ in plain torch, on any device."""

import torch
from torch import Tensor

from vqkv.kernels.precision import full_precision
from vqkv.kernels.rvq.tables import BLOCK, SearchTables, prepare

CHUNK = 2048  # candidates at a time: fewer calls than 1,024, and their scores (16 MB for 2,048 codes) still stay in L3


def search(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    """Codes (rows, num_quantizers) of ``naive.rvq_encode`` for x (rows, dim), by scores in fp32: nearly equal ones may
    change places."""
    tables, size = prepare(codebooks), max(1, CHUNK // beam)
    scores = tables.norms.new_empty(min(size, len(x)) * beam, tables.norms.shape[1])  # new memory would take longer
    with full_precision(x.device):
        return torch.cat([_search(part, tables, scores, beam) for part in x.float().split(size)])


def _search(x: Tensor, tables: SearchTables, buffer: Tensor, beam: int) -> Tensor:
    """A matrix product for every candidate's residual: Gram tables of the codebooks would spare it, but then each score
    adds a number from memory for every earlier stage, and that measured 4 times slower."""
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
    """Positions of the ``count`` smallest of every row (rows, width), smallest first: of the blocks with the smallest
    minima, as ``topk`` over all scores would take longer than the product."""
    blocks = scores.unflatten(1, (-1, BLOCK))
    near = blocks.amin(dim=-1).topk(min(count, blocks.shape[1]), largest=False).indices
    inside = blocks.gather(1, near.unsqueeze(-1).expand(-1, -1, BLOCK)).flatten(1)
    best = inside.topk(count, largest=False).indices
    return near.gather(1, best // BLOCK) * BLOCK + best % BLOCK


def _rows_of(values: Tensor, parents: Tensor) -> Tensor:
    """values (rows, candidates, ...) of each row's ``parents`` (rows, count)."""
    return values.gather(1, parents.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
