"""Codebooks rearranged for scoring: a code's score is |c|^2 - 2 r.c, a matrix product and a sum."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.derived import remembered

BLOCK = 64  # codes of a block, of which the minimum is taken first; and lanes of the compiled search


@dataclass(frozen=True)
class SearchTables:
    """K codebooks of C codes, with C padded to whole blocks by codes that are infinitely far away."""

    products: Tensor  # fp32 (K, dim, C padded): -2 codebook^T
    norms: Tensor  # fp32 (K, C padded): squared norms, infinite where there is no code
    codebooks: Tensor  # fp32 (K, C, dim)
    exact: Tensor  # (K, C, dim), fp32 or float64: the codebooks without rounding
    largest: np.ndarray  # float64 (K,): the largest norm of a code


@remembered
def prepare(codebooks: Tensor) -> SearchTables:
    """Rearrange codebooks (num_quantizers, codebook_size, dim)."""
    missing = -codebooks.shape[1] % BLOCK
    norms = codebooks.double().square().sum(dim=-1)
    return SearchTables(
        products=F.pad(-2 * codebooks.float().mT, (0, missing)).contiguous(),
        norms=F.pad(norms.float(), (0, missing), value=torch.inf),
        codebooks=codebooks.float().contiguous(),
        exact=(codebooks if codebooks.dtype == torch.float64 else codebooks.float()).contiguous(),
        largest=norms.amax(dim=-1).sqrt().cpu().numpy(),
    )


def sums_by_code(x: Tensor, codes: Tensor, codebook_size: int) -> tuple[Tensor, Tensor]:
    """Count codes (rows,), float64 (codebook_size,), and sum their vectors, the same bits every time."""
    counts = torch.bincount(codes, minlength=codebook_size)
    sums = F.embedding_bag(codes.argsort(stable=True), x.double(), counts.cumsum(0) - counts, mode="sum")
    return counts.double(), sums
