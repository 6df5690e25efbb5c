"""Uniform quantization of values that a scaling stage brought to a fixed range."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.packing import check_packed
from vqkv.codec.payload import Payload, payload_field
from vqkv.codec.stage import Quantizer
from vqkv.errors import DataError, FormatError
from vqkv.kernels import Affine, Packed, affine_encode, by_byte, fused, which

MAX_BITS = 8


@dataclass(eq=False)
class Uniform(Quantizer):
    """Round to equally spaced levels: 2^bits of them on [0, 1] (after ``MinMax``), or with ``signed`` 2^bits - 1 on
    [-1, 1], 0 among them (after ``VectorScale("absmax")``). Which values share a scale is the stages' affair.
    """

    bits: int = 4
    signed: bool = False
    code_dtype = torch.uint8

    def __post_init__(self):
        least = 2 if self.signed else 1
        if not isinstance(self.bits, int) or not least <= self.bits <= MAX_BITS:
            raise DataError(f"{self.bits!r} bits a value: use {least} to {MAX_BITS}")
        self.code_bits = self.bits
        self._steps = 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1
        self._zero = self._steps if self.signed else 0
        self._values = self._levels(torch.arange(2**self.bits))
        by_byte_pays = self.bits in (2, 4) and not self.signed  # a byte's values are one element to gather
        self._table = by_byte(self._values.unsqueeze(-1), self.bits) if by_byte_pays else None

    def build(self, shape: tuple[int, ...]) -> None:
        """Any shape."""
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape)

    def encode(self, x: Tensor) -> Tensor:
        """(..., *row_shape) -> uint8 (..., values of a row)."""
        if not self.signed and fused.affine.takes(x):
            return fused.affine.rounded(x, self.bits).flatten(3)
        codes = (x * self._steps).round_().clamp_(-self._zero, self._steps).to(torch.int32)
        return (codes + self._zero if self.signed else codes).to(torch.uint8).flatten(3)  # straight to uint8 is slower

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for a code that symmetric quantization does not use."""
        if self.signed and codes.numel() and int(codes.max()) > 2 * self._steps:
            raise FormatError(f"code {int(codes.max())} is not below {2 * self._steps + 1}: altered payload")
        return self._levels(codes).unflatten(-1, self.row_shape)

    def store_between_ends(self, x: Tensor) -> tuple[Payload, Tensor, Tensor] | None:
        """See ``Quantizer``."""
        whole = self.bits in (2, 4, 8) and self.codes_per_row * self.bits % 8 == 0
        on_gpu = whole and which("affine_encode", x) == "triton"
        if self.signed or not (on_gpu or fused.affine.packs(x, self.bits)):
            return None
        found = affine_encode(x.flatten(3), self.bits, x.shape[-1])
        return Payload({"codes": found.codes}), *(end.reshape(x.shape[:-1]) for end in (found.low, found.high))

    def load(self, payload: Payload) -> Tensor:
        """See ``Quantizer``."""
        if self._table is None:
            return super().load(payload)
        return self.look_up(payload, self._table, self.codes_per_row).unflatten(-1, self.row_shape)

    def packed(self, payload: Payload) -> Packed | None:
        """See ``Quantizer``."""
        if self.signed or self.bits not in (2, 4, 8) or self.codes_per_row * self.bits % 8:
            return None
        codes = payload_field(payload, "codes", payload.tokens_per_row)
        check_packed(codes, self.bits, self.codes_per_row)
        return Affine(codes, None, None, self.bits)

    def levels(self) -> Tensor | None:
        """See ``Quantizer``; None with ``signed``, where one code is not used."""
        return None if self.signed else self._values

    def _levels(self, codes: Tensor) -> Tensor:
        values = codes.to(torch.float32, copy=True)
        return (values.sub_(self._zero) if self.signed else values).div_(self._steps)
