"""Uniform quantization of values that a scaling stage brought to a fixed range."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.pipeline import Quantizer
from vqkv.errors import DataError, FormatError

MAX_BITS = 8


@dataclass(eq=False)
class Uniform(Quantizer):
    """Round to equally spaced levels: 2^bits of them on [0, 1] (after ``MinMax``), or with ``signed`` 2^bits - 1 on
    [-1, 1], 0 among them (after ``VectorScale("absmax")``). Which values share a scale is the stages' affair.
    """

    bits: int = 4
    signed: bool = False

    def __post_init__(self):
        least = 2 if self.signed else 1
        if not isinstance(self.bits, int) or not least <= self.bits <= MAX_BITS:
            raise DataError(f"{self.bits!r} bits a value: use {least} to {MAX_BITS}")
        self.code_bits = self.bits
        self._steps = 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1
        self._zero = self._steps if self.signed else 0

    def build(self, shape: tuple[int, ...]) -> None:
        """Any shape."""
        self._row_shape = shape[1:]
        self.codes_per_row = math.prod(self._row_shape)

    def encode(self, x: Tensor) -> Tensor:
        """(..., *row_shape) -> int32 (..., values of a row)."""
        return (x * self._steps).round().clamp(-self._zero, self._steps).to(torch.int32).flatten(3) + self._zero

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for a code that symmetric quantization does not use."""
        if self.signed and codes.numel() and int(codes.max()) > 2 * self._steps:
            raise FormatError(f"code {int(codes.max())} is not below {2 * self._steps + 1}: altered payload")
        return ((codes - self._zero).float() / self._steps).unflatten(-1, self._row_shape)
