"""Least squares between any of a model's parts from one pass: sums of products of named blocks, in float64."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from vqkv.errors import DataError

Name = Hashable  # what a block of features, (samples, width), is called


class Gram:
    """Counts, sums and sums of products a'b over samples, for the pairs of blocks that the regressions to come need.
    From the sums of some samples follow the coefficients of every regression among the blocks (``solve``), and from
    those of other samples how well they predict there (``explained``): no sample is kept or seen twice."""

    def __init__(self, regressions: Iterable[tuple[Sequence[Name], Name]]):
        self.count = 0
        self.sums: dict[Name, Tensor] = {}
        self.products: dict[tuple[Name, Name], Tensor] = {}
        self._partners: dict[Name, list[Name]] = {}  # of each block, those whose products with it are needed
        for sources, target in regressions:
            for a, b in [*itertools.product(sources, [*sources, target]), (target, target)]:
                if b not in self._partners.get(a, []) and a not in self._partners.get(b, []):
                    self._partners.setdefault(a, []).append(b)

    def accumulate(self, block: Callable[[Name], Tensor]) -> None:
        """Add samples: ``block(name)`` gives (samples, width). Raises ``DataError`` for NaN or infinity."""
        for first, partners in self._partners.items():
            x = block(first).double()
            self.sums[first] = self.sums.get(first, 0) + x.sum(dim=0)
            for second in partners:
                product = x.T @ (x if second == first else block(second).double())
                self.products[first, second] = self.products.get((first, second), 0) + product
        if bad := [name for name, total in self.sums.items() if not total.isfinite().all()]:
            raise DataError(f"block {bad[0]} holds NaN or infinity: check the model's weights and dtype")
        self.count += len(x)

    def mean(self, name: Name) -> Tensor:
        """The block's mean (width,)."""
        return self.sums[name] / self.count

    def moment(self, a: Name, b: Name) -> Tensor:
        """The mean of a'b, not centred: (width of a, width of b)."""
        return (self.products[b, a].T if (b, a) in self.products else self.products[a, b]) / self.count

    def covariance(self, rows: Sequence[Name], columns: Sequence[Name]) -> Tensor:
        """Covariances of the blocks ``rows``, side by side, with ``columns``."""
        means = {name: self.mean(name) for name in {*rows, *columns}}
        parts = [[self.moment(a, b) - means[a].outer(means[b]) for b in columns] for a in rows]
        return torch.cat([torch.cat(row, dim=1) for row in parts])

    def solve(self, sources: Sequence[Name], target: Name, strength: float) -> Tensor:
        """Return coefficients W of ``target`` ~ ``sources`` W + bias, ``Ridge``'s penalty; or raise ``DataError``."""
        squares = torch.cat([self.moment(name, name).diagonal() for name in sources])
        penalty = torch.full_like(squares, strength * squares.mean().item()).diag()
        within, cross = self.covariance(sources, sources) + penalty, self.covariance(sources, [target])
        weights, failed = torch.linalg.solve_ex(within, cross)
        if failed or not weights.isfinite().all():
            raise DataError(
                f"sources {', '.join(map(str, sources))} are zero or depend on each other at strength {strength:g}: "
                "leave some out, give a larger strength, or more samples"
            )
        return weights

    def explained(self, weights: Tensor, sources: Sequence[Name], target: Name) -> float:
        """EVR on these samples, 1 - Var(y - x W) / Var(y), of weights that other samples gave."""
        variance = self.covariance([target], [target]).diagonal().sum().item()
        cross, within = self.covariance(sources, [target]), self.covariance(sources, sources)
        return (weights * (2 * cross - within @ weights)).sum().item() / variance

    def mean_share(self, name: Name, mean: Tensor) -> float:
        """The part of these samples' mean square that a constant (width,) explains, 1 - E|y - mean|^2 / E|y|^2."""
        return (mean @ (2 * self.mean(name) - mean)).item() / self.moment(name, name).diagonal().sum().item()
