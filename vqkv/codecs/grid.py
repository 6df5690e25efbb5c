"""Fixed grids that are optimal for a Gaussian, for values that a rotation has made Gaussian (HIGGS)."""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode, rvq_encode_packed

DIM = 2
SIGNED_DIM, SIGNED_CODES, SAMPLES = 8, 256, 1 << 16


@cache
def gaussian_grids() -> dict[int, tuple[Tensor, float]]:
    """Number of points -> (grid (points, 2), its MSE per value on a standard Gaussian); see ``reference.gaussian``."""
    stored = json.loads((Path(__file__).parent / "gaussian_grids.json").read_text())
    grids = [(torch.tensor(grid["points"], dtype=torch.float32), grid["mse"]) for grid in stored.values()]
    return {len(points): (points, mse) for points, mse in grids}


@dataclass(eq=False)
class Grid(Quantizer):
    """Each pair of neighbouring values -> the nearest of ``size`` points of a grid optimal for a standard Gaussian
    (HIGGS with d = 2; 16, 64 or 256 points: 2, 3 or 4 bits a value). Nothing is learned; ``grid``: fp16 (size, 2)."""

    size: int = 16
    choices = {"size": gaussian_grids()}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = (self.size - 1).bit_length()
        self.register_buffer("grid", gaussian_grids()[self.size][0].half())

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` for an odd last axis."""
        if shape[-1] % DIM:
            raise DataError(f"a grid of pairs needs an even number of values, not {shape[-1]}")
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape) // DIM

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(..., *row_shape) -> int64 (..., pairs of a row)."""
        return rvq_encode(_pairs(x), self.grid.unsqueeze(0)).squeeze(-1), {}

    def store(self, y: Tensor) -> Payload:
        return Payload({"codes": rvq_encode_packed(_pairs(y), self.grid.unsqueeze(0), self.code_bits)})

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return rvq_decode(codes.unsqueeze(-1), self.grid.unsqueeze(0)).flatten(-2).unflatten(-1, self.row_shape)

    def kernel_view(self, payload: Payload) -> KernelView:
        return Coded(payload.fields["codes"], self.grid.view(1, 1, -1, DIM), self.code_bits, self.codes_per_row)


@cache
def gaussian_magnitudes() -> Tensor:
    """Magnitudes of 8 values of a standard Gaussian, 256 vectors learned by k-means: fp16 (256, 8)."""
    drawn = torch.randn(SAMPLES, SIGNED_DIM, generator=torch.Generator().manual_seed(0)).abs()
    return KMeans(SIGNED_CODES, iterations=20).fit(drawn).half()


@dataclass(eq=False)
class SignedGrid(Quantizer):
    """Each 8 neighbouring values -> their signs and the nearest of 256 vectors of magnitudes, one codebook for all
    models (NSNQuant, arXiv 2505.18231): 2 bits a value. ``grid``: fp16 (256, 8)."""

    code_bits = 8

    def __post_init__(self):
        super().__post_init__()
        self.register_buffer("grid", gaussian_magnitudes())

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` for a last axis that 8 does not divide."""
        if shape[-1] % SIGNED_DIM:
            raise DataError(f"head_dim {shape[-1]} is not divisible by the 8 values that share a code: use turboquant")
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape) // SIGNED_DIM * 2

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(..., *row_shape) -> int64 (..., signs of each 8 values, then codes of their magnitudes)."""
        y = x.flatten(3).unflatten(-1, (-1, SIGNED_DIM))
        signs = ((y < 0).long() << torch.arange(SIGNED_DIM, device=x.device)).sum(-1)
        return torch.cat([signs, rvq_encode(y.abs(), self.grid.unsqueeze(0)).squeeze(-1)], dim=-1), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        signs, found = codes.long().chunk(2, dim=-1)
        negative = signs.unsqueeze(-1) >> torch.arange(SIGNED_DIM, device=codes.device) & 1
        return (self.grid.float()[found] * (1 - 2 * negative)).flatten(-2).unflatten(-1, self.row_shape)


def _pairs(x: Tensor) -> Tensor:
    return x.flatten(3).unflatten(-1, (-1, DIM))
