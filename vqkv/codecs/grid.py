"""Fixed grids that are optimal for a Gaussian, for values that a rotation has made Gaussian (HIGGS, NSNQuant)."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode, rvq_encode_packed


@cache
def gaussian_tables() -> dict:
    """Read what was learned of a standard Gaussian; see ``reference.gaussian``."""
    return json.loads((Path(__file__).parent / "gaussian_grids.json").read_text())


@cache
def gaussian_grids() -> dict[int, tuple[Tensor, float]]:
    """Number of points -> (grid (points, 2), its MSE per value on a standard Gaussian)."""
    grids = [(torch.tensor(grid["points"]).float(), grid["mse"]) for grid in gaussian_tables()["grids"].values()]
    return {len(points): (points, mse) for points, mse in grids}


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
        """(..., *row_shape) -> int64 (..., pairs of a row)."""
        return rvq_encode(self._pairs(x), self.grid.unsqueeze(0)).squeeze(-1), {}

    def store(self, y: Tensor) -> Payload:
        return Payload({"codes": rvq_encode_packed(self._pairs(y), self.grid.unsqueeze(0), self.code_bits)})

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return rvq_decode(codes.unsqueeze(-1), self.grid.unsqueeze(0)).flatten(-2).unflatten(-1, self.row_shape)

    def kernel_view(self, payload: Payload) -> KernelView:
        return Coded(payload.fields["codes"], self.grid.view(1, 1, -1, 2), self.code_bits, self.codes_per_row)

    def _pairs(self, x: Tensor) -> Tensor:
        return x.flatten(3).unflatten(-1, (-1, 2))


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
        """(..., *row_shape) -> int64 (..., signs of each 8 values, then codes of their magnitudes)."""
        y = x.flatten(3).unflatten(-1, (-1, self.block_values))
        signs = ((y < 0).long() << torch.arange(self.block_values, device=x.device)).sum(-1)
        return torch.cat([signs, rvq_encode(y.abs(), self.grid.unsqueeze(0)).squeeze(-1)], dim=-1), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        signs, magnitudes = codes.long().chunk(2, dim=-1)
        negative = signs.unsqueeze(-1) >> torch.arange(self.block_values, device=codes.device) & 1
        return (self.grid.float()[magnitudes] * (1 - 2 * negative)).flatten(-2).unflatten(-1, self.row_shape)
