"""What k-means and codebooks in training sum up, by torch alone: models load without numba."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sums_by_code(x: Tensor, codes: Tensor, codebook_size: int) -> tuple[Tensor, Tensor]:
    """float64 counts (codebook_size,) of codes (rows,), and the sums of their vectors, the same bits every time."""
    counts = torch.bincount(codes, minlength=codebook_size)
    sums = F.embedding_bag(codes.argsort(stable=True), x.double(), counts.cumsum(0) - counts, mode="sum")
    return counts.double(), sums
