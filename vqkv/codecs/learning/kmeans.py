"""Codebooks from vectors: k-means, and exponential moving averages that follow a stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.errors import DataError
from vqkv.kernels import rvq_encode
from vqkv.kernels.rvq.tables import sums_by_code

EPS = 1e-5
REVIVE_BELOW = 1.0
ROUNDS = 16  # in which k-means|| draws, about


@dataclass
class KMeans:
    """Lloyd's algorithm from distinct random vectors; with ``spread`` from those of k-means|| (Bahmani et al. 2012),
    which gives heavy tails codes of their own."""

    codebook_size: int
    iterations: int = 10
    seed: int = 0
    spread: bool = False

    def fit(self, x: Tensor) -> Tensor:
        """Learn the codebook (codebook_size, dim) of x (rows, dim). Raises ``DataError`` for too few distinct
        vectors."""
        self.start(x)
        for _ in range(self.iterations):
            self.step(x)
        return self.codebook

    def start(self, x: Tensor) -> Tensor:
        """Begin from ``codebook_size`` distinct vectors of x, drawn from ``seed``."""
        begin = spread_rows if self.spread else distinct_rows
        self.codebook = x[begin(x, self.codebook_size, self.seed)].clone()
        return self.codebook

    def assign(self, x: Tensor) -> Tensor:
        """Return the index of the nearest code of every vector."""
        return rvq_encode(x, self.codebook.unsqueeze(0)).squeeze(-1)

    def step(self, x: Tensor) -> None:
        """Move every code to the mean of its vectors; codes that have none, onto the vectors that fit worst."""
        codes = self.assign(x)
        counts, sums = sums_by_code(x, codes, self.codebook_size)
        means = (sums / counts.clamp(min=1).unsqueeze(-1)).to(self.codebook.dtype)
        if (empty := counts == 0).any():
            errors = (x - self.codebook[codes]).square().sum(dim=-1)
            means[empty] = x[errors.argsort(descending=True, stable=True)[: int(empty.sum())]]
        self.codebook = means


def distinct_rows(x: Tensor, count: int, seed: int) -> Tensor:
    """Draw positions of ``count`` distinct rows of x (rows, dim). Raises ``DataError`` if there are fewer."""
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


def spread_rows(x: Tensor, count: int, seed: int) -> Tensor:
    """Draw positions of rows in ``ROUNDS``, with a chance that grows with the squared distance from those before.

    This is the start of k-means||. ``torch.multinomial`` takes at most 2^24 rows."""
    chosen = new = distinct_rows(x, count, seed)[:1]
    away = torch.full((len(x),), torch.inf)
    generator = torch.Generator().manual_seed(seed)
    while len(chosen) < count:
        away = torch.minimum(away, torch.cdist(x, x[new]).square().amin(1).cpu())
        away[chosen.cpu()] = 0
        more = min(max(1, count // ROUNDS), count - len(chosen))
        new = torch.multinomial(away.clamp_min(1e-30), more, generator=generator).to(x.device)
        chosen = torch.cat([chosen, new])
    return chosen


class Ema:
    """Codebook = moving average of sums / moving average of counts, which are Laplace-smoothed by ``EPS``.

    Of several stages at once: codebooks (stages, codebook_size, dim), and to begin from, counts (stages, codebook_size)
    in vectors a batch. ``revive``: a code whose moving count falls below ``REVIVE_BELOW`` is replaced by a random
    vector of the batch; off by default, as upstream (residual VQ paper, section 2; VQ-VAE's update)."""

    def __init__(self, codebooks: Tensor, counts: Tensor, decay: float = 0.99, revive: bool = False, seed: int = 0):
        self.codebooks, self.decay = codebooks, decay
        self.counts = counts.double()
        self.sums = codebooks.double() * self.counts.unsqueeze(-1)
        self._generators = [torch.Generator().manual_seed(seed + k) for k in range(len(codebooks))] if revive else []

    def update(self, counts: Tensor, sums: Tensor, samples=()) -> Tensor:
        """Make one step on a batch's float64 counts and sums; ``samples``: for each stage, vectors of it (rows, dim)
        that dead codes may become."""
        self.counts, self.sums = torch.lerp(counts, self.counts, self.decay), torch.lerp(sums, self.sums, self.decay)
        for counts, sums, generator, vectors in zip(self.counts, self.sums, self._generators, samples):
            dead = (counts < REVIVE_BELOW).nonzero().squeeze(-1)
            picks = torch.randint(len(vectors), (len(dead),), generator=generator).to(vectors.device)
            counts[dead], sums[dead] = REVIVE_BELOW, vectors[picks].double() * REVIVE_BELOW
        total = self.counts.sum(-1, keepdim=True)
        smoothed = (self.counts + EPS) / (total + self.counts.shape[-1] * EPS) * total
        self.codebooks = (self.sums / smoothed.unsqueeze(-1)).to(self.codebooks.dtype)
        return self.codebooks
