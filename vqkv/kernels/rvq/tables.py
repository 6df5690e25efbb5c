"""Codebooks rearranged for scoring: |c|^2 - 2 r.c is one matrix product of [r, 1]."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.derived import remembered

BLOCK = 64  # codes of a block, of which the minimum is taken first; and lanes of the compiled search


@dataclass(frozen=True)
class SearchTables:
    """K codebooks of C codes, with C padded to whole blocks by codes that are infinitely far away."""

    weights: Tensor  # (K, dim + 1, C padded): -2 codebook^T with the squared norms below it
    flat: Tensor  # (K * C, dim)
    offsets: Tensor  # int32 (K,): first row of every codebook in ``flat``
    exact: Tensor  # (K, C, dim), fp32 or float64: the codebooks without rounding
    largest: np.ndarray  # float64 (K,): the largest norm of a code
    block: int

    @cached_property
    def lanes(self) -> Tensor:
        """``weights`` with C padded to a multiple of 64."""
        missing = -self.weights.shape[-1] % BLOCK
        if not missing:
            return self.weights
        padded = F.pad(self.weights, (0, missing))
        padded[:, -1, -missing:] = torch.inf
        return padded

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """``lanes``, codebooks (K, C, dim), the same exactly, and ``largest``, as compiled loops take them."""
        return self.lanes.numpy(), self.flat.view(self.exact.shape).numpy(), self.exact.numpy(), self.largest


@remembered
def prepare(codebooks: Tensor, dtype: torch.dtype = torch.float32) -> SearchTables:
    """The tables of codebooks (num_quantizers, codebook_size, dim), with numbers in ``dtype``."""
    num_quantizers, codebook_size, dim = codebooks.shape
    block = min(BLOCK, codebook_size)
    norms = codebooks.double().square().sum(dim=-1)
    weights = torch.cat([-2 * codebooks.to(dtype).mT, norms.to(dtype).unsqueeze(1)], dim=1)
    weights = F.pad(weights, (0, -codebook_size % block))
    weights[:, -1, codebook_size:] = torch.inf
    return SearchTables(
        weights=weights.contiguous(),
        flat=codebooks.to(dtype).reshape(-1, dim).contiguous(),
        offsets=torch.arange(num_quantizers, dtype=torch.int32, device=codebooks.device) * codebook_size,
        exact=(codebooks if codebooks.dtype == torch.float64 else codebooks.float()).contiguous(),
        largest=norms.amax(dim=-1).sqrt().cpu().numpy(),
        block=block,
    )


def sums_by_code(x: Tensor, codes: Tensor, codebook_size: int) -> tuple[Tensor, Tensor]:
    """float64 counts (codebook_size,) of codes (rows,), and the sums of their vectors, the same bits every time."""
    counts = torch.bincount(codes, minlength=codebook_size)
    sums = F.embedding_bag(codes.argsort(stable=True), x.double(), counts.cumsum(0) - counts, mode="sum")
    return counts.double(), sums
