"""Codebooks rearranged for scoring: |c|^2 - 2 r.c is one matrix product of [r, 1]."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.derived import remembered


@dataclass(frozen=True)
class SearchTables:
    """K codebooks of C codes, with C padded to whole blocks by codes that are infinitely far away."""

    weights: Tensor  # (K, dim + 1, C padded): -2 codebook^T with the squared norms below it
    flat: Tensor  # (K * C, dim)
    offsets: Tensor  # int32 (K,): first row of every codebook in ``flat``
    exact: Tensor  # (K, C, dim), fp32 or float64: the codebooks without rounding
    largest: np.ndarray  # float64 (K,): the largest norm of a code
    block: int  # codes, of which the minimum is taken first


@remembered
def prepare(codebooks: Tensor, dtype: torch.dtype = torch.float32, block: int = 1) -> SearchTables:
    """The tables of codebooks (num_quantizers, codebook_size, dim), with numbers in ``dtype``."""
    num_quantizers, codebook_size, dim = codebooks.shape
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
