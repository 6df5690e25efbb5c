"""Uniform quantization between two ends of each vector, and the ends: smallest and largest value, clipped, HQQ's."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.scaling import FP16_MIN_NORMAL
from vqkv.codecs.stage import Quantizer, Side, Stage
from vqkv.errors import DataError
from vqkv.kernels import Affine, KernelView, affine_encode
from vqkv.runtime.checks import FP16_MAX

HQQ_ITERATIONS, HQQ_NORM, HQQ_BETA = 20, 0.7, 10.0
ANCHOR_LEVELS = 255


@dataclass(eq=False)
class MinMax(Stage):
    """Map the smallest and the largest value of each vector along the last axis to 0 and 1.

    Both are rounded to fp16. Stores ``low`` and ``high``: fp16, the shape of x without its last axis."""

    side_fields = ("low", "high")

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        low, high = (end.clamp(-FP16_MAX, FP16_MAX).half() for end in self.ends(x))
        start, span = low.float().unsqueeze(-1), (high.float() - low.float()).unsqueeze(-1)
        return (x - start).div_(span.where(span > 0, 1.0)), {"low": low, "high": high}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        low = side["low"].float()
        return y.mul_((side["high"].float() - low).unsqueeze(-1)).add_(low.unsqueeze(-1))

    def codes(self, x: Tensor, levels: int) -> tuple[Tensor, Side]:
        """Round x to ``levels`` equal steps between its ends: floats from 0 to ``levels``, and the ends."""
        y, side = self.encode(x)
        return y.mul_(levels).round_().clamp_(0, levels), side

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two ends of each vector."""
        low, high = torch.aminmax(x, dim=-1)
        return low, high


@dataclass(eq=False)
class Clipped(MinMax):
    """``MinMax`` of vectors clamped to the magnitude that a ``share`` of their values do not exceed (OSCAR)."""

    share: float = 0.96
    limits = {"share": (0.01, 1.0)}

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        last = min(int(self.share * x.shape[-1]), x.shape[-1] - 1)
        largest = x.abs().sort(dim=-1).values[..., last]
        low, high = super().ends(x)
        return torch.maximum(low, -largest), torch.minimum(high, largest)


@dataclass(eq=False)
class HalfQuadratic(MinMax):
    """``MinMax`` whose offset is moved to where rounding to ``bits`` bits costs least in the l_p norm.

    HQQ's half-quadratic solver alternates between rounding and shrinking the error (p = ``HQQ_NORM`` < 1). Each vector
    keeps its best of ``HQQ_ITERATIONS`` offsets by mean absolute error; HQQ stops by the complete tensor's error."""

    bits: int = 4
    limits = {"bits": (1, 8)}

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        least, high = (end.unsqueeze(-1) for end in super().ends(x))
        levels = 2**self.bits - 1
        step = ((high - least) / levels).clamp_min(FP16_MIN_NORMAL)
        low = best = least
        best_error = torch.full_like(low, torch.inf)
        for _ in range(HQQ_ITERATIONS):
            codes = ((x - low) / step).round().clamp(0, levels)
            error = x - (low + codes * step)
            size = error.abs()
            mean = size.mean(dim=-1, keepdim=True)
            best, best_error = torch.where(mean < best_error, low, best), torch.minimum(mean, best_error)
            power = size.double().clamp_min(1e-12).pow(HQQ_NORM - 1).float()  # fp32's last bit depends on the position
            shrunk = error.sign() * (size - power / HQQ_BETA).clamp_min(0)
            low = (x - shrunk - codes * step).mean(dim=-1, keepdim=True)
        return best.squeeze(-1), (best + high - least).squeeze(-1)


@dataclass(eq=False)
class AffineQuantizer(Quantizer):
    """Round each vector along the last axis to 2^bits equally spaced levels between the fp16 ``ends``."""

    bits: int = 4
    ends: MinMax = field(default_factory=MinMax)
    side_fields = ("low", "high")
    limits = {"bits": (1, 8)}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = self.bits

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return int32 codes (..., values of a row) of x (..., *row_shape), and the ends."""
        codes, side = self.ends.codes(x, 2**self.bits - 1)
        return codes.int().flatten(3), side

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self.ends.decode(codes.float().div_(2**self.bits - 1).unflatten(-1, self.row_shape), side)

    def store(self, y: Tensor) -> Payload:
        """Encode and pack in one kernel, unless the ends are not the smallest and the largest value."""
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


@dataclass(eq=False)
class Anchors(Stage):
    """Store the first of every ``group`` tokens of a row (tokens, channels) as an anchor, in 8 bits between its ends.

    The other tokens go on as differences from the anchor as it is read back (CacheGen, Liu et al. 2024, section 5.1).
    Stores ``anchors``, uint8 (anchors, channels), and their ends ``low`` and ``high``, fp16."""

    group: int = 10
    ends: MinMax = field(default_factory=MinMax)
    side_fields = ("anchors", "low", "high")
    limits = {"group": (2, 1 << 16)}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Take the anchors out of rows. Raises ``DataError`` for tokens that groups do not divide."""
        if len(shape) != 3 or shape[1] % self.group:
            raise DataError(f"rows of {shape[1:]} are no groups of {self.group} tokens: put a TokenBlock first")
        return shape[0], shape[1] - shape[1] // self.group, shape[2]

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return the differences of all tokens that are no anchors, (..., tokens, channels), and the anchors."""
        groups = x.unflatten(-2, (-1, self.group))
        codes, ends = self.ends.codes(groups[..., 0, :], ANCHOR_LEVELS)
        side = {"anchors": codes.to(torch.uint8)} | ends
        return (groups[..., 1:, :] - self._anchors(side)).flatten(-3, -2), side

    def decode(self, y: Tensor, side: Side) -> Tensor:
        anchors = self._anchors(side)
        return torch.cat([anchors, y.unflatten(-2, (-1, self.group - 1)) + anchors], dim=-2).flatten(-3, -2)

    def _anchors(self, side: Side) -> Tensor:
        """Read anchors back: (..., anchors, 1, channels)."""
        return self.ends.decode(side["anchors"].float().div_(ANCHOR_LEVELS), side).unsqueeze(-2)
