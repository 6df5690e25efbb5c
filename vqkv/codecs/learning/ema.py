"""Codebooks that follow a stream: exponential moving averages of counts and sums."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import Statistics
from vqkv.errors import DataError


@dataclass
class Ema:
    """codebook = moving average of sums / moving average of counts, the counts Laplace-smoothed by ``eps``.

    ``revive``: a code whose moving count falls below ``revive_below`` vectors a batch is replaced by a random vector of
    the current batch. Off by default, as upstream (residual VQ paper, section 2; VQ-VAE's update).
    """

    decay: float = 0.99
    eps: float = 1e-5
    revive: bool = False
    revive_below: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check_decay(self.decay)
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
        smoothed = (self.counts + self.eps) / (total + len(self.counts) * self.eps) * total
        self.codebook = (self.sums / smoothed.unsqueeze(-1)).to(self.codebook.dtype)
        return self.codebook

    def _revive(self, samples: Tensor) -> None:
        dead = (self.counts < self.revive_below).nonzero().squeeze(-1)
        picks = torch.randint(len(samples), (len(dead),), generator=self._generator).to(samples.device)
        self.counts[dead] = self.revive_below
        self.sums[dead] = samples[picks].double() * self.revive_below


def check_decay(decay: float) -> None:
    """Raise ``DataError`` unless 0 <= decay < 1."""
    if not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise DataError(f"decay {decay!r} must be at least 0 and below 1")
