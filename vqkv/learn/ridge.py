"""Streamed least squares: sums of X'X and X'Y in float64, then one solve."""

import torch

from vqkv.errors import DataError


class Ridge:
    """y ~ [x, 1] W by ridge regression on any number of samples in constant memory.

    ``accumulate`` adds samples, ``merge`` adds another process's sums, ``solve`` returns W (in_features + 1,
    out_features) in float64. The penalty is ``strength`` times the mean of the diagonal of X'X (AQUA-KV's upstream adds
    1e-3 of it); the bias is not penalised.
    """

    def __init__(self, strength: float = 1e-3):
        self.strength = strength
        self.xx: torch.Tensor | None = None
        self.xy: torch.Tensor | None = None

    def accumulate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add samples x (n, in_features), y (n, out_features)."""
        x = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], dim=1)
        xx, xy = x.T @ x, x.T @ y.double()
        self.xx, self.xy = (xx, xy) if self.xx is None else (self.xx + xx, self.xy + xy)

    def merge(self, other: "Ridge") -> None:
        """Add the sums of ``other``."""
        self.xx, self.xy = (other.xx, other.xy) if self.xx is None else (self.xx + other.xx, self.xy + other.xy)

    def solve(self) -> torch.Tensor:
        """W (in_features + 1, out_features), the bias in its last row. Raises ``DataError`` before any sample."""
        if self.xx is None:
            raise DataError("no samples: call accumulate(x, y) before solve()")
        penalty = torch.full((len(self.xx),), self.strength * self.xx.diagonal()[:-1].mean().item())
        penalty[-1] = 0
        return torch.linalg.solve(self.xx + penalty.double().diag().to(self.xx.device), self.xy)


def predict(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[x, 1] W for x (n, in_features)."""
    return x.to(weights.dtype) @ weights[:-1] + weights[-1]
