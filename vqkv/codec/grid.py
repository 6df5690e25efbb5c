"""Fixed grids that are optimal for a Gaussian, for values that a rotation has made Gaussian (HIGGS)."""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from vqkv.codec.packing import check_packed
from vqkv.codec.part import take
from vqkv.codec.payload import Payload, payload_field
from vqkv.codec.stage import Quantizer
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.kernels import Coded, Packed, by_byte, grid_encode_packed, rvq_decode, rvq_encode

DIM = 2


@cache
def gaussian_grids() -> dict[int, tuple[Tensor, float]]:
    """Number of points -> (grid (points, 2), its mean squared error per value on a standard Gaussian).

    Constants in ``gaussian_grids.json``, found by ``vqkv.learn.gaussian``.
    """
    stored = json.loads((Path(__file__).parent / "gaussian_grids.json").read_text())
    grids = [(torch.tensor(grid["points"], dtype=torch.float32), grid["mse"]) for grid in stored.values()]
    return {len(points): (points, mse) for points, mse in grids}


@dataclass(eq=False)
class Grid(Quantizer):
    """Each pair of neighbouring values -> the nearest of ``size`` points of a grid optimal for a standard Gaussian
    (HIGGS with d = 2; 16, 64 or 256 points: 2, 3 or 4 bits a value). Nothing is learned; ``grid``, fp16 (size, 2), is
    counted as side information all the same.
    """

    size: int = 16

    def __post_init__(self):
        if type(self.size) is not int or self.size not in gaussian_grids():
            raise UnknownNameError("grid size", str(self.size), [str(size) for size in gaussian_grids()])
        self.code_bits = (self.size - 1).bit_length()
        self._set(gaussian_grids()[self.size][0].half())

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` for an odd last axis."""
        self._row_shape = shape[1:]
        if self._row_shape[-1] % DIM:
            raise DataError(f"a grid of pairs needs an even number of values, not {self._row_shape[-1]}")
        self.codes_per_row = math.prod(self._row_shape) // DIM

    def encode(self, x: Tensor) -> Tensor:
        """(..., *row_shape) -> int64 (..., pairs of a row)."""
        return rvq_encode(x.flatten(3).unflatten(-1, (-1, DIM)), self._grid.unsqueeze(0)).squeeze(-1)

    def encode_packed(self, y: Tensor) -> Tensor:
        """See ``Quantizer``."""
        pairs = y.flatten(3).unflatten(-1, (-1, DIM))
        return grid_encode_packed(pairs, self._grid.unsqueeze(0), self.code_bits)

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for a code outside the grid."""
        if codes.numel() and (largest := int(codes.max())) >= self.size:
            raise FormatError(f"code {largest} is not below the grid's size {self.size}: altered payload")
        return rvq_decode(codes.unsqueeze(-1), self._grid.unsqueeze(0)).flatten(-2).unflatten(-1, self._row_shape)

    def load(self, payload: Payload) -> Tensor:
        """See ``Quantizer``. Sizes that fill whole bits have a point for every code."""
        if self._table is None:
            return super().load(payload)
        return self.look_up(payload, self._table, DIM * self.codes_per_row).unflatten(-1, self._row_shape)

    def packed(self, payload: Payload) -> Packed:
        """See ``Quantizer``."""
        codes = payload_field(payload, "codes", payload.tokens_per_row)
        check_packed(codes, self.code_bits, self.codes_per_row)
        return Coded(codes, self._grid[None, None], self.code_bits, self.codes_per_row)

    def state(self) -> dict[str, Tensor]:
        """The grid."""
        return {"grid": self._grid}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for a grid of another shape."""
        state = dict(state)
        self._set(take(state, "grid", (self.size, DIM), torch.float16))
        super().load_state(state)

    def _set(self, grid: Tensor) -> None:
        self._grid = grid
        self._table = by_byte(grid.float(), self.code_bits) if 8 % self.code_bits == 0 else None
