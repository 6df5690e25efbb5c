"""Distances of a reconstruction from the original, and of data from what is easy to store."""

import math

import torch


def relative_mse(x: torch.Tensor, x_hat: torch.Tensor) -> float:
    """Return squared error over squared size, sum((x - x_hat)^2) / sum(x^2), in float64; any equal shapes."""
    x, x_hat = x.double(), x_hat.double()
    return ((x - x_hat).square().sum() / x.square().sum()).item()


def explained_variance_ratio(y: torch.Tensor, y_hat: torch.Tensor) -> float:
    """EVR = 1 - Var(y - y_hat) / Var(y) over all but the last dimension, variances summed over the last."""
    y, error = y.double().flatten(0, -2), (y - y_hat).double().flatten(0, -2)
    return 1 - (error.var(0, correction=0).sum() / y.var(0, correction=0).sum()).item()


def bits_saved(evr: float) -> float:
    """Return bits a value that a prediction of this EVR saves, log2(Var(y) / Var(error)) / 2, 24 at most."""
    return -math.log2(max(1 - evr, 2**-48)) / 2


def code_perplexity(counts: torch.Tensor) -> torch.Tensor:
    """Return 2^entropy of each row of code counts (..., codebook_size): how many codes are in effective use."""
    p = counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)
    return torch.special.entr(p).sum(-1).exp()
