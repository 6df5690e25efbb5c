"""Uniform quantization between the ends of each vector."""

from dataclasses import dataclass, field

from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.scaling import MinMax
from vqkv.codecs.stage import Quantizer, Side
from vqkv.kernels import Affine, KernelView, affine_encode


@dataclass(eq=False)
class AffineQuantizer(Quantizer):
    """Asymmetric affine quantization of each vector along the last axis: 2^bits levels, equally spaced, between the
    fp16 ends ``low`` and ``high`` that ``ends`` finds."""

    bits: int = 4
    ends: MinMax = field(default_factory=MinMax)
    side_fields = ("low", "high")
    limits = {"bits": (1, 8)}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = self.bits

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(..., *row_shape) -> int32 (..., values of a row), and the ends."""
        codes, side = self.ends.codes(x, 2**self.bits - 1)
        return codes.int().flatten(3), side

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self.ends.decode(codes.float().div_(2**self.bits - 1).unflatten(-1, self.row_shape), side)

    def store(self, y: Tensor) -> Payload:
        """By one kernel, unless the ends are not the smallest and the largest value."""
        if type(self.ends) is not MinMax:
            return super().store(y)
        packed = affine_encode(y.flatten(3), self.bits, y.shape[-1])
        low, high = (end.view(y.shape[:-1]) for end in (packed.low, packed.high) if end is not None)
        return Payload({"codes": packed.codes, "low": low, "high": high})

    def kernel_view(self, payload: Payload) -> KernelView | None:
        if self.bits not in (2, 4, 8) or self.codes_per_row * self.bits % 8:
            return None
        low, high = (end if end.ndim == 4 else end.unsqueeze(-1) for end in self.side_of(payload).values())
        fits = low.ndim == 4 and self.codes_per_row % low.shape[3] == 0
        return Affine(payload.fields["codes"], low, high, self.bits) if fits else None
