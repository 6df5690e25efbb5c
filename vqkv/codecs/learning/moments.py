"""Means and spreads of channels."""

from torch import Tensor


def channel_moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Of x (batch, heads, rows, *row_shape), over batch and rows: how many, their mean and the sum of squared
    deviations from it, both (heads, *row_shape)."""
    count, mean = x.shape[0] * x.shape[2], x.mean(dim=(0, 2))
    return count, mean, (x - mean.unsqueeze(1)).square().sum(dim=(0, 2))
