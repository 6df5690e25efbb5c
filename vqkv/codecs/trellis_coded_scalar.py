"""Trellis-coded quantizer with entropy-coded codes: rounding is chosen for a complete token at a time."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vqkv.codecs.entropy_coded_scalar import (
    OCTAVES,
    PER_OCTAVE,
    EntropyCodedScalar,
    as_step,
    bits_of,
    counted,
    rounded,
    shifts_of,
    spreads_of,
    step_for,
)
from vqkv.kernels import trellis_decode, trellis_encode
from vqkv.kernels.entropy.code import HALF
from vqkv.kernels.trellis.code import REACH, TRANSITIONS

FINER = 1.6  # uniform steps of the same rate are about so many times as long
AROUND, BISECTIONS = 1.0, 8  # octaves around there in which the step is looked for, and how often they are halved
MOST = 2.0 * HALF + 12  # bits of a code that no table holds


@dataclass(eq=False)
class TrellisCodedScalar(EntropyCodedScalar):
    """As ``EntropyCodedScalar``, but a token's codes are those of least error and rate together among the paths of a
    trellis of ``states`` states along its channels (``kernels.trellis``: universal TCQ; Kasner, Marcellin & Hunt 1999,
    with entropy coding Fischer & Wang 1992), which wins back part of the 0.25 bit that a uniform quantizer loses to
    Shannon's bound. Only the encoder searches; what is stored is coded and laid out in the same way.

    ``weight``: squared steps that a bit is worth. On the bundled models squared error at a rate is least with 0.3, KL
    with 0.05 (chosen on validation text). The search takes codes for Laplacian, of their channel's spread in the first
    batch; ``rates`` are those of a uniform quantizer, which a trellis moves alike.
    """

    states: int = 8
    weight: float = 0.05
    limits = EntropyCodedScalar.limits | {"weight": (0.0, 4.0)}
    choices = {"states": tuple(TRANSITIONS)}

    def _start(self, sample: Tensor) -> None:
        """By bisection; shifts and spreads are those of a sample in uniform steps as long."""
        bits, low, high = self.bits / self.share, -AROUND, AROUND
        start = step_for(sample, bits).item() / FINER
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            self.step = as_step(start * 2**middle, sample.device)
            plain = rounded(sample, 2 * self.step)
            self.shifts = shifts_of(plain)
            self.spreads = spreads_of(counted(plain, self.shifts)).to(torch.int8)
            codes = self._codes(sample)
            low, high = (middle, high) if bits_of(codes) > bits else (low, middle)
        self.shifts = shifts_of(codes)

    def _codes(self, channels: Tensor) -> Tensor:
        costs, tables = _costs().to(channels.device), self.spreads.int() + PER_OCTAVE * OCTAVES
        heads = zip(channels / self.step, tables, self.shifts.int(), strict=True)
        codes = [trellis_encode(x, costs, table, shifts, self.weight, self.states) for x, table, shifts in heads]
        return torch.stack(codes)

    def _values(self, codes: Tensor) -> Tensor:
        return trellis_decode(codes.flatten(0, -2), self.step, self.states).view(codes.shape)


@cache
def _costs() -> Tensor:
    """Bits of each code of every spread, and of those farther out than a table reaches: float32 (spreads,
    2 * REACH + 2). Code e is as frequent as a power of the size of its value, 2e or 2e + 1."""
    codes = torch.arange(-REACH, REACH + 1, dtype=torch.float64)
    size = (2 * codes + (codes < 0)).abs()
    spreads = 2.0 ** (torch.arange(-PER_OCTAVE * OCTAVES, PER_OCTAVE * OCTAVES + 1, dtype=torch.float64) / PER_OCTAVE)
    low, high = torch.full_like(spreads, -40.0), torch.zeros_like(spreads)  # log2 of that power's base
    for _ in range(60):
        middle = (low + high) / 2
        shares = torch.softmax(middle[:, None] * size * math.log(2), dim=1)
        wide = (shares * codes.square()).sum(1) > spreads.square()
        low, high = torch.where(wide, low, middle), torch.where(wide, middle, high)
    bits = -shares.log2().clamp_min(-MOST)
    return torch.cat([bits, torch.full_like(bits[:, :1], MOST)], dim=1).float()
