"""Codebooks that follow a stream: exponential moving averages of counts and sums."""

import torch
from torch import Tensor

EPS = 1e-5
REVIVE_BELOW = 1.0


class Ema:
    """codebook = moving average of sums / moving average of counts, the counts Laplace-smoothed by ``EPS``; of several
    stages at once: codebooks (stages, codebook_size, dim), and counts (stages, codebook_size) in vectors a batch, to
    begin from. ``revive``: a code whose moving count falls below ``REVIVE_BELOW`` vectors a batch is replaced by a
    random vector of the current batch. Off by default, as upstream (residual VQ paper, section 2; VQ-VAE's update)."""

    def __init__(self, codebooks: Tensor, counts: Tensor, decay: float = 0.99, revive: bool = False, seed: int = 0):
        self.codebooks, self.decay = codebooks, decay
        self.counts = counts.double()
        self.sums = codebooks.double() * self.counts.unsqueeze(-1)
        self._generators = [torch.Generator().manual_seed(seed + k) for k in range(len(codebooks))] if revive else []

    def update(self, counts: Tensor, sums: Tensor, samples=()) -> Tensor:
        """One step on a batch's float64 counts and sums; ``samples``: for each stage, vectors of it (rows, dim) that
        dead codes may become."""
        self.counts, self.sums = torch.lerp(counts, self.counts, self.decay), torch.lerp(sums, self.sums, self.decay)
        for counts, sums, generator, vectors in zip(self.counts, self.sums, self._generators, samples):
            dead = (counts < REVIVE_BELOW).nonzero().squeeze(-1)
            picks = torch.randint(len(vectors), (len(dead),), generator=generator).to(vectors.device)
            counts[dead], sums[dead] = REVIVE_BELOW, vectors[picks].double() * REVIVE_BELOW
        total = self.counts.sum(-1, keepdim=True)
        smoothed = (self.counts + EPS) / (total + self.counts.shape[-1] * EPS) * total
        self.codebooks = (self.sums / smoothed.unsqueeze(-1)).to(self.codebooks.dtype)
        return self.codebooks
