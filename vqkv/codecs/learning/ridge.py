"""Streamed least squares: sums of X'X and X'Y in float64, then one solve."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vqkv.errors import DataError

BLOCK = 256  # features whose products are summed at a time


class Ridge:
    """y ~ [x, 1] W by ridge regression on any number of samples in constant memory. The penalty is ``strength`` times
    the mean of the diagonal of X'X (AQUA-KV's upstream adds 1e-3 of it); the bias is not penalised."""

    def __init__(self, strength: float = 1e-3):
        self.strength = strength
        self.xx = self.xy = torch.zeros((), dtype=torch.float64)  # of their size with the first samples

    def accumulate(self, x: Tensor, y: Tensor) -> None:
        """Add samples x (n, in_features), y (n, out_features)."""
        x = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], dim=1)
        self.xx, self.xy = self.xx + _gram(x), self.xy + x.T @ y.double()

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of x and of y, float64."""
        count = self.xx[-1, -1]
        return self.xx[-1, :-1] / count, self.xy[-1] / count

    def penalized(self) -> Tensor:
        """Return X'X about the mean, with the penalty on its diagonal (in_features, in_features)."""
        mean_x, raw = self.means()[0], self.xx.diagonal()[:-1]
        xx = self.xx[:-1, :-1] - self.xx[-1, -1] * torch.outer(mean_x, mean_x)
        if not raw.any():  # nothing but zeros: any penalty gives the weights that it should, zero
            return torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        return xx + torch.full_like(raw, self.strength * raw.mean().item()).diag()

    def solve(self) -> Tensor:
        """Solve for W (in_features + 1, out_features) in float64, the bias last; about the mean, for precision.

        Raises ``DataError`` if inputs depend on each other while the strength is 0, or are not finite."""
        mean_x, mean_y = self.means()
        factor, failed = torch.linalg.cholesky_ex(self.penalized())
        if failed:
            raise DataError(f"X'X is singular at strength {self.strength:g}: give a larger one, or more samples")
        weights = torch.cholesky_solve(self.xy[:-1] - self.xx[-1, -1] * torch.outer(mean_x, mean_y), factor)
        return torch.cat([weights, (mean_y - mean_x @ weights)[None]])


def _gram(x: Tensor) -> Tensor:
    """Return x'x of x (n, features); only half of it is computed, the other half is its mirror image."""
    parts = x.split(BLOCK, dim=1)
    rows = [torch.cat([part.T @ other for other in parts[i:]], dim=1) for i, part in enumerate(parts)]
    upper = torch.cat([F.pad(row, (x.shape[1] - row.shape[1], 0)) for row in rows]).triu()
    return upper + upper.triu(1).T
