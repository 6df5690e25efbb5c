"""Means and spreads of channels from streams, over all processes that share a batch."""

import torch
from torch import Tensor

from vqkv.processes import current


def channel_moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Of x (batch, heads, rows, *row_shape), over batch and rows of all processes: how many, their mean and the sum of
    squared deviations from it, both (heads, *row_shape). Pooled by Chan's parallel formula."""
    count, mean = x.shape[0] * x.shape[2], x.mean(dim=(0, 2))
    square = (x - mean.unsqueeze(1)).square().sum(dim=(0, 2))
    processes = current()
    if processes.count == 1:
        return count, mean, square
    everything = int(processes.total(torch.tensor(count)))
    pooled = (processes.total(mean.double() * count) / everything).to(mean.dtype)
    return everything, pooled, processes.total(square + count * (mean - pooled).square())
