"""Uniform quantization: of values that a stage brought to a fixed range, or between the ends of each vector."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.codecs.packing import check_packed
from vqkv.codecs.payload import Payload, payload_field
from vqkv.codecs.scaling import MinMax, check_fits
from vqkv.codecs.stage import Quantizer, Side, Stage
from vqkv.errors import DataError, FormatError
from vqkv.kernels import Affine, Packed, affine_encode, by_byte
from vqkv.kernels.affine.cpu import affine_decode, decodes

MAX_BITS = 8


@dataclass(eq=False)
class Uniform(Quantizer):
    """Round to equally spaced levels: 2^bits of them on [0, 1] (after ``MinMax``), or with ``signed`` 2^bits - 1 on
    [-1, 1], 0 among them (after ``VectorScale("absmax")``). Stages decide which values share a scale.
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
        self.register_buffer("values", self._levels(torch.arange(2**self.bits)), persistent=False)
        if self.bits in (2, 4) and not self.signed:  # a byte's values are one element to gather
            self.table = by_byte(self.values.unsqueeze(-1), self.bits)

    def encode(self, x: Tensor) -> Tensor:
        """(..., *row_shape) -> uint8 (..., values of a row)."""
        codes = (x * self._steps).round_().clamp_(-self._zero, self._steps).to(torch.int32)
        return (codes + self._zero if self.signed else codes).to(torch.uint8).flatten(3)  # straight to uint8 is slower

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for a code that symmetric quantization does not use."""
        if self.signed and codes.numel() and int(codes.max()) > 2 * self._steps:
            raise FormatError(f"code {int(codes.max())} is not below {2 * self._steps + 1}: altered payload")
        return self._levels(codes).unflatten(-1, self.row_shape)

    def _levels(self, codes: Tensor) -> Tensor:
        values = codes.to(torch.float32, copy=True)
        return (values.sub_(self._zero) if self.signed else values).div_(self._steps)


@dataclass(eq=False)
class AffineQuantizer(Quantizer):
    """Asymmetric affine quantization of each vector along the last axis: 2^bits levels from ``low`` to ``high``, which
    ``ends`` finds and which are stored in fp16. What ``ends`` and a ``Uniform`` do apart, by one kernel where there is
    one.
    """

    bits: int = 4
    ends: MinMax = field(default_factory=MinMax)
    side_fields = ("low", "high")

    def __post_init__(self):
        if not isinstance(self.ends, MinMax):
            raise DataError(f"ends {self.ends!r} must be a MinMax")
        self.uniform = Uniform(self.bits)
        self.code_bits = self.bits

    def build(self, shape: tuple[int, ...]) -> None:
        super().build(shape)
        self.uniform.build(shape)

    def store(self, y: Tensor) -> Payload:
        if not self.ends.widest:
            y, side = self.ends.encode(y)
            return Payload({"codes": self.uniform.encode_packed(y), **side})
        found = affine_encode(y.flatten(3), self.bits, y.shape[-1])
        low, high = (end.reshape(y.shape[:-1]) for end in (found.low, found.high))
        return Payload({"codes": found.codes, "low": low, "high": high})

    def load(self, payload: Payload) -> Tensor:
        codes = payload_field(payload, "codes")
        out = codes.new_empty((*codes.shape[:3], *self.row_shape), dtype=torch.float32)
        self.load_into(payload, out)
        return out

    def load_into(self, payload: Payload, out: Tensor) -> None:
        side, codes = self._side(payload), payload_field(payload, "codes")
        check_packed(codes, self.bits, self.codes_per_row)
        check_fits(side, out)
        if self.loads_directly(out):
            affine_decode(codes, self.bits, *side.values(), out)
        else:
            self.ends.decode_into(self.uniform.load(payload), side, out)

    def loads_directly(self, out: Tensor) -> bool:
        return out.ndim == 5 and decodes(self.bits, out)

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        return self.load(self.store(y))

    def packed(self, payload: Payload) -> Packed | None:
        side, codes = self._side(payload), payload_field(payload, "codes")
        if self.bits not in (2, 4, 8) or self.codes_per_row * self.bits % 8:
            return None
        check_packed(codes, self.bits, self.codes_per_row)
        low, high = (end if end.ndim == 4 else end.unsqueeze(-1) for end in side.values())
        fits = low.ndim == 4 and low.shape == high.shape and self.codes_per_row % low.shape[3] == 0
        return Affine(codes, low, high, self.bits) if fits else None

    def apart(self) -> tuple[list[Stage], Quantizer]:
        return [self.ends], self.uniform

    def _side(self, payload: Payload) -> Side:
        return {name: payload_field(payload, name) for name in self.side_fields}
