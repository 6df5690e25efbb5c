"""k-means: counts and sums of the vectors that chose each code, then their means."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.errors import DataError
from vqkv.kernels import rvq_encode
from vqkv.kernels.cpu import sums_by_code


@dataclass
class KMeans:
    """Lloyd's algorithm from distinct random vectors, all by ``fit``, or step by step. A cluster that loses all its
    vectors is moved onto one of the vectors that fit worst, the worst first."""

    codebook_size: int
    iterations: int = 10
    seed: int = 0
    codebook: Tensor | None = None

    def fit(self, x: Tensor) -> Tensor:
        """The codebook (codebook_size, dim) of x (rows, dim). Raises ``DataError`` for too few distinct vectors."""
        self.start(x)
        for _ in range(self.iterations):
            codes = self.assign(x)
            self.solve(*sums_by_code(x, codes, self.codebook_size), spare=self._worst(x, codes))
        return self.codebook

    def start(self, x: Tensor) -> Tensor:
        """Begin from ``codebook_size`` distinct vectors of x, drawn from ``seed``."""
        self.codebook = x[distinct_rows(x, self.codebook_size, self.seed)].clone()
        return self.codebook

    def assign(self, x: Tensor) -> Tensor:
        """Index of the nearest code of every vector."""
        return rvq_encode(x, self.codebook.unsqueeze(0)).squeeze(-1)

    def solve(self, counts: Tensor, sums: Tensor, spare: Tensor | None = None) -> Tensor:
        """Means of the clusters. Empty ones take the rows of ``spare`` in order; without spares they stay."""
        empty = counts == 0
        means = sums / counts.clamp(min=1).unsqueeze(-1)
        codebook = torch.where(empty.unsqueeze(-1), self.codebook, means.to(self.codebook.dtype))
        if spare is not None:
            places = empty.nonzero().squeeze(-1)[: len(spare)]
            codebook[places] = spare[: len(places)]
        self.codebook = codebook
        return codebook

    def _worst(self, x: Tensor, codes: Tensor) -> Tensor:
        empty = self.codebook_size - len(codes.unique())
        errors = (x - self.codebook[codes]).square().sum(dim=-1)
        return x[errors.argsort(descending=True, stable=True)[:empty]]


def distinct_rows(x: Tensor, count: int, seed: int) -> Tensor:
    """Positions of ``count`` distinct random rows of x (rows, dim). Raises ``DataError`` if there are fewer."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator).to(x.device)
    # Rows are compared by a random projection: equal rows give equal bits, others collide with probability ~ 0.
    direction = torch.randn(x.shape[-1], generator=generator, dtype=torch.float64).to(x.device)
    keys = (x.double() * direction).sum(dim=-1)[order]
    ranked, positions = keys.sort(stable=True)
    first = torch.cat([ranked.new_ones(1, dtype=torch.bool), ranked[1:] != ranked[:-1]])[: len(x)]
    chosen = positions[first].sort().values[:count]
    if len(chosen) < count:
        raise DataError(
            f"{count} codes need {count} distinct vectors, but the sample of {len(x)} leaves only {len(chosen)}: "
            f"calibrate on more tokens (at least {16 * count} vectors serve well) or choose a smaller codebook_size"
        )
    return order[chosen]
