"""Codebooks that follow a stream: exponential moving averages of counts and sums."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import Statistics

EPS = 1e-5
REVIVE_BELOW = 1.0


@dataclass
class Ema:
    """codebook = moving average of sums / moving average of counts, the counts Laplace-smoothed by ``EPS``.

    ``revive``: a code whose moving count falls below ``REVIVE_BELOW`` vectors a batch is replaced by a random vector of
    the current batch. Off by default, as upstream (residual VQ paper, section 2; VQ-VAE's update).
    """

    decay: float = 0.99
    revive: bool = False
    seed: int = 0

    def __post_init__(self):
        self._generator = torch.Generator().manual_seed(self.seed)

    def start(self, codebook: Tensor, counts: Tensor) -> None:
        """Begin from codebook (codebook_size, dim) and counts (codebook_size,) in vectors a batch."""
        self.codebook = codebook
        self.counts = counts.double()
        self.sums = codebook.double() * self.counts.unsqueeze(-1)

    def update(self, statistics: Statistics, samples: Tensor | None = None) -> Tensor:
        """One step on a batch's statistics; ``samples`` (rows, dim) are vectors of it that dead codes may become."""
        self.counts = torch.lerp(statistics.counts, self.counts, self.decay)
        self.sums = torch.lerp(statistics.sums, self.sums, self.decay)
        if self.revive and samples is not None:
            self._revive(samples)
        total = self.counts.sum()
        smoothed = (self.counts + EPS) / (total + len(self.counts) * EPS) * total
        self.codebook = (self.sums / smoothed.unsqueeze(-1)).to(self.codebook.dtype)
        return self.codebook

    def _revive(self, samples: Tensor) -> None:
        dead = (self.counts < REVIVE_BELOW).nonzero().squeeze(-1)
        picks = torch.randint(len(samples), (len(dead),), generator=self._generator).to(samples.device)
        self.counts[dead] = REVIVE_BELOW
        self.sums[dead] = samples[picks].double() * REVIVE_BELOW
