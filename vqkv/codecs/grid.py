"""Levels of single values and grids of several: fixed for a Gaussian or a format, or learned (KVQuant)."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import Ema, KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode
from vqkv.kernels.rvq.tables import sums_by_code
from vqkv.runtime.checks import FP16_MAX, MAX_SEED

SAMPLES, ITERATIONS = 65536, 30
E4M3, LARGEST_E4M3 = torch.float8_e4m3fn, 448.0
HALF_E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*(-x for x in reversed(HALF_E2M1)), 0.0, *HALF_E2M1])


@cache
def gaussian_tables() -> dict:
    """Read what was learned of a standard Gaussian; see ``reference.gaussian``."""
    return json.loads((Path(__file__).parent / "gaussian_grids.json").read_text())


@cache
def gaussian_grids() -> dict[int, tuple[Tensor, float]]:
    """Number of points -> (grid (points, 2), its MSE per value on a standard Gaussian)."""
    grids = [(torch.tensor(grid["points"]).float(), grid["mse"]) for grid in gaussian_tables()["grids"].values()]
    return {len(points): (points, mse) for points, mse in grids}


@cache
def gaussian_levels(bits: int) -> Tensor:
    """Return the 2^bits levels of least squared error for a standard Gaussian (Lloyd 1957, Max 1960), float64."""
    return torch.tensor(gaussian_tables()["levels"][str(bits)], dtype=torch.float64)


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Return the position, for each value of x, of the nearest of ascending ``levels``, int64."""
    return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2)


@dataclass(eq=False)
class Levels(Quantizer):
    """Each value -> the nearest of 2^``bits`` ``levels``, ascending, shared by all heads and channels."""

    bits: int = 4
    levels: Tensor = learned()
    read: Tensor = learned()  # what codes stand for, where that is not ``levels``
    limits = {"bits": (1, 8)}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = self.bits

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return int32 codes (..., values of a row) of x (..., *row_shape)."""
        return nearest(x, self.levels.float()).to(torch.int32).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self._values.float().index_select(0, codes.flatten()).view(*codes.shape[:3], *self.row_shape)

    def kernel_view(self, payload: Payload) -> KernelView | None:
        if 8 % self.bits:
            return None
        return Coded(payload.fields["codes"], self._values.view(1, 1, -1, 1), self.bits, self.codes_per_row)

    @property
    def _values(self) -> Tensor:
        return self.levels if self.read is None else self.read


@dataclass(eq=False)
class GaussianLevels(Levels):
    """A Gaussian's best levels, for coordinates of a randomly rotated vector of rms 1 (TurboQuant, Zandieh et al.
    2025). Nothing is learned."""

    bits: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.levels = gaussian_levels(self.bits).half()


@dataclass(eq=False)
class NonUniform(Levels):
    """Levels learned by k-means in one dimension on the first batch, a moving average over later ones, all values alike
    or as a ``WeightedChain`` says. With ``norm`` what is read back has mean and deviation of the first batch (KVQuant,
    section 3.6, Q-Norm). Side information: ``levels``, fp16 (2^bits,), ascending, and with ``norm`` ``read``, those
    that are read."""

    seed: int = 0
    norm: bool = False
    limits = Levels.limits | {"seed": (0, MAX_SEED)}

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch. Raises ``DataError`` at first for fewer distinct values than levels."""
        self.fit_weighted(x, torch.ones_like(x))

    def fit_weighted(self, x: Tensor, weights: Tensor) -> None:
        """Learn from one batch with ``weights``, like x, from 0 on."""
        both = torch.stack([x.flatten(), weights.flatten()], dim=-1)
        both = both[both[:, 1] > 0]
        if len(both) > SAMPLES:
            generator = torch.Generator().manual_seed(self.seed)
            both = both[torch.randint(len(both), (SAMPLES,), generator=generator).to(both.device)]
        values, weights = both.split(1, dim=-1)
        weights = weights / weights.mean()
        if self.levels is None:
            self._first: Tensor = values[:, 0]
            self.levels = KMeans(2**self.bits, seed=self.seed).start(values)[:, 0].sort().values
            for _ in range(ITERATIONS):  # cells of one dimension are intervals: no distances needed
                totals, sums = self._statistics(values, weights)
                self.levels = torch.where(totals > 0, sums[:, 0] / totals, self.levels).to(values.dtype)
            self._ema: Ema = Ema(self.levels[None, :, None], self._statistics(values, weights)[0].unsqueeze(0))
        else:
            totals, sums = self._statistics(values, weights)
            self.levels = self._ema.update(totals[None], sums[None])[0, :, 0].sort().values

    def finalize(self) -> None:
        """Round to fp16."""
        self.levels = self.levels.clamp(-FP16_MAX, FP16_MAX).half()
        if self.norm:
            levels = self.levels.float()
            restored = levels[nearest(self._first, levels)]
            spread = self._first.std() / restored.std().clamp_min(1e-9)
            self.read = ((levels - restored.mean()) * spread + self._first.mean()).half()
        del self._first, self._ema

    def _statistics(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sum up each level's weights, float64 (2^bits,), and its weighted values (2^bits, 1)."""
        rows = torch.cat([weights, weights * values], dim=-1)
        _, sums = sums_by_code(rows, nearest(values[:, 0], self.levels.float()), 2**self.bits)
        return sums[:, 0], sums[:, 1:]


class WeightedChain(Chain):
    """A chain that ends in ``NonUniform``, whose values weigh as much as their errors cost (KVQuant, section 3.3): by
    ``weigh``'s diagonal and the squared scale; values that a stage keeps apart weigh nothing."""

    quantizer: NonUniform

    def __post_init__(self):
        self.quantizer.weighted = True
        super().__post_init__()

    def _partial_fit(self, x: Tensor) -> None:
        """Learn from one batch. Raises ``DataError`` if nothing was said about costs."""
        if self.quantizer.metric is None:
            raise DataError("a WeightedChain was not told what errors cost: fit it with vqkv.calibrate")
        costs = self.quantizer.metric.diagonal(dim1=1, dim2=2)
        costs = torch.where(costs.any(), costs, 1.0).unsqueeze(1)
        y, sides = x, []
        for stage in self._stages:
            stage.partial_fit(y)
            y, side = stage.encode(y)
            sides.append(side)
        zero = self._backward(torch.zeros_like(y), sides)
        scale = self._backward(torch.ones_like(y), sides) - zero
        self.quantizer.fit_weighted((x - zero) / scale, costs * scale.square())


@dataclass(eq=False)
class Fp8(Quantizer):
    """Round each value to E4M3, those beyond 448 to 448."""

    code_bits = 8

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3).view(torch.uint8).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return codes.byte().view(E4M3).float().unflatten(-1, self.row_shape)


@dataclass(eq=False)
class Fp4(Quantizer):
    """Round each value to E2M1, once divided by a sixth of the largest magnitude of its vector along the last axis:
    NVFP4, if vectors have 16 values. Stores that ``scale`` as the bytes of E4M3."""

    code_bits = 4
    side_fields = ("scale",)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        scale = (x.abs().amax(dim=-1) / E2M1[-1]).clamp_max(LARGEST_E4M3).to(E4M3)
        size = scale.float().unsqueeze(-1)
        y = x / size.where(size > 0, torch.inf)
        return nearest(y, E2M1.to(x.device)).flatten(3), {"scale": scale.view(torch.uint8)}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        values = E2M1.to(codes.device)[codes.long()].unflatten(-1, self.row_shape)
        return values.mul_(side["scale"].view(E4M3).float().unsqueeze(-1))


@dataclass(eq=False)
class Grid(Quantizer):
    """Each pair of neighbouring values -> the nearest of ``size`` points of a grid optimal for a standard Gaussian
    (HIGGS with d = 2; 16, 64 or 256 points: 2, 3 or 4 bits a value). Nothing is learned; ``grid``: fp16 (size, 2)."""

    size: int = 16
    grid: Tensor = learned()
    block_values = 2
    choices = {"size": gaussian_grids()}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = (self.size - 1).bit_length()
        self.grid = gaussian_grids()[self.size][0].half()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return int64 codes (..., pairs of a row) of x (..., *row_shape)."""
        return rvq_encode(x.flatten(3).unflatten(-1, (-1, 2)), self.grid.unsqueeze(0)).squeeze(-1), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return rvq_decode(codes.unsqueeze(-1), self.grid.unsqueeze(0)).flatten(-2).unflatten(-1, self.row_shape)

    def kernel_view(self, payload: Payload) -> KernelView:
        return Coded(payload.fields["codes"], self.grid.view(1, 1, -1, 2), self.code_bits, self.codes_per_row)


@dataclass(eq=False)
class SignedGrid(Quantizer):
    """Each 8 neighbouring values -> their signs, a code, and the nearest of 256 vectors of magnitudes, another; one
    codebook for all models (NSNQuant, arXiv 2505.18231): 2 bits a value. ``grid``: fp16 (256, 8)."""

    grid: Tensor = learned()
    code_bits = block_values = 8

    def __post_init__(self):
        super().__post_init__()
        self.grid = torch.tensor(gaussian_tables()["magnitudes"]).half()

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = super().build(shape)
        self.codes_per_row *= 2
        return shape

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return int64 codes (..., signs of each 8 values, then codes of their magnitudes) of x (..., *row_shape)."""
        y = x.flatten(3).unflatten(-1, (-1, self.block_values))
        signs = ((y < 0).long() << torch.arange(self.block_values, device=x.device)).sum(-1)
        return torch.cat([signs, rvq_encode(y.abs(), self.grid.unsqueeze(0)).squeeze(-1)], dim=-1), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        signs, magnitudes = codes.long().chunk(2, dim=-1)
        negative = signs.unsqueeze(-1) >> torch.arange(self.block_values, device=codes.device) & 1
        return (self.grid.float()[magnitudes] * (1 - 2 * negative)).flatten(-2).unflatten(-1, self.row_shape)
