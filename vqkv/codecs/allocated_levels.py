"""A fixed number of bits for each component, as many as its variance is worth: what attention can read in place."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vqkv.codecs.nonuniform import NonUniform, gaussian_levels
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side
from vqkv.errors import DataError
from vqkv.kernels import pack_codes, unpack_codes
from vqkv.runtime.checks import FP16_MAX

TOGETHER = 8  # neighbouring components of one width, whose codes fill whole bytes
WIDEST = 8  # bits
TINY = 1e-12  # of the mean variance


@dataclass(eq=False)
class AllocatedLevels(Quantizer):
    """Components (last axis, the strongest of each head first) divided by their root mean square and rounded to the
    nearest of 2^width learned levels. Groups of ``TOGETHER`` neighbours have 0 to ``WIDEST`` bits, one at a time where
    it lowers the squared error most (greedy marginal analysis, Fox 1966; it is optimal as errors are convex in bits),
    until ``bits`` a value are spent. No entropy code and no scale a token: every row takes the same bytes, a run of
    codes for each width, widest first.

    Side information: ``widths``, int8 (components / ``TOGETHER``,), ``scale``, fp16 (components,), and levels of each
    width, fp16.
    """

    bits: float = 2.0
    seed: int = 0
    limits = {"bits": (0.125, float(WIDEST)), "seed": (0, (1 << 31) - 1)}

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` for components that do not divide into groups."""
        super().build(shape)
        if shape[-1] % TOGETHER or shape[0] > 1:
            raise DataError(f"{shape[-1]} components do not divide into groups of {TOGETHER} for packing: merge heads")
        self.register_buffer("widths", None)
        self.register_buffer("scale", None)
        self.levels = nn.ModuleList(NonUniform(width, self.seed) for width in range(1, WIDEST + 1))
        for levels in self.levels:
            levels.build((1, TOGETHER))

    def rates(self, y: Tensor) -> Tensor:
        """A point for each number of bits that ``allocated`` can spend, by a Gaussian's levels."""
        variance = _variance(y)
        spent, error = allocated(variance)
        return torch.stack([spent.double() / (len(variance) / TOGETHER), error / len(variance)], dim=1)

    def with_bits(self, bits: float) -> "AllocatedLevels":
        return dataclasses.replace(self, bits=bits)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch decides widths and scales; levels are learned from all."""
        if self.widths is None:
            variance = _variance(x)
            self.scale = variance.sqrt().clamp_min(TINY).clamp_max(FP16_MAX).half()
            self.widths = widths_for(variance, self.bits).to(torch.int8).to(x.device)
        for width, run in self._runs():
            self.levels[width - 1].partial_fit((x / self.scale.float())[..., run])

    def finalize(self) -> None:
        """Round the levels to fp16; widths that no component has need none."""
        used = {width for width, _ in self._runs()}
        for width, levels in enumerate(self.levels, 1):
            if width in used:
                levels.finalize()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, 1, rows, components) -> int32 codes of the same shape, 0 where nothing is stored."""
        codes = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
        for width, run in self._runs():
            codes[..., run] = self.levels[width - 1]._nearest(x[..., run] / self.scale[run].float()).int()
        return codes, {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        out = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device)
        for width, run in self._runs():
            out[..., run] = self.levels[width - 1].levels.float()[codes[..., run].long()] * self.scale[run].float()
        return out

    def store(self, y: Tensor) -> Payload:
        codes, _ = self.encode(y)
        packed = [pack_codes(codes[..., run], width) for width, run in self._runs()]
        return Payload({"codes": torch.cat(packed, -1) if packed else codes[..., :0].to(torch.uint8)})

    def load(self, payload: Payload) -> Tensor:
        packed, first = payload.fields["codes"], 0
        codes = torch.zeros(*packed.shape[:3], self.codes_per_row, dtype=torch.int32, device=packed.device)
        for width, run in self._runs():
            last = first + len(run) * width // 8
            codes[..., run] = unpack_codes(packed[..., first:last].contiguous(), width, len(run)).int()
            first = last
        return self.decode(codes, {})

    def _runs(self) -> list[tuple[int, Tensor]]:
        """Each width that is used, widest first, and its components in order."""
        each = self.widths.repeat_interleave(TOGETHER)
        return [(width, run) for width in range(WIDEST, 0, -1) if len(run := (each == width).nonzero()[:, 0])]


def allocated(variance: Tensor) -> tuple[Tensor, Tensor]:
    """Bits spent on all groups after each step of greedy allocation, int64 (steps + 1,), and the sum of squared errors
    left, float64."""
    gains = _gains(variance)
    order = gains.flatten().argsort(descending=True, stable=True)
    left = variance.sum() - torch.cat([gains.new_zeros(1), gains.flatten()[order].cumsum(0)])
    return torch.arange(len(left)), left


def widths_for(variance: Tensor, bits: float) -> Tensor:
    """Bits of each group of components, int64: ``bits`` a value on average, rounded down to whole groups."""
    gains = _gains(variance)
    order = gains.flatten().argsort(descending=True, stable=True)[: int(bits * len(gains) + 1e-6)]
    return torch.bincount(order // WIDEST, minlength=len(gains))


def _gains(variance: Tensor) -> Tensor:
    """Squared error that each further bit takes from a group, float64 (groups, WIDEST), less and less from left to
    right."""
    errors = torch.tensor([1.0, *(_gaussian_error(width) for width in range(1, WIDEST + 1))], dtype=torch.float64)
    return variance.cpu().double().unflatten(0, (-1, TOGETHER)).sum(1, keepdim=True) * -errors.diff()


def _gaussian_error(width: int) -> float:
    """Mean squared error of a standard Gaussian's best levels: 1 less the levels' own mean square."""
    levels = gaussian_levels(width)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    edges = torch.cat([levels.new_tensor([-torch.inf]), (levels[1:] + levels[:-1]) / 2, levels.new_tensor([torch.inf])])
    return 1 - (normal.cdf(edges).diff() * levels.square()).sum().item()


def _variance(y: Tensor) -> Tensor:
    """Mean square of each component, float64 (components,)."""
    return y.flatten(0, -2).double().square().mean(0)
