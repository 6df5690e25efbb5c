"""Bring values to the range a quantizer expects: by vector, by head and block, between two ends, or by channel."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.stage import Side, Stage, learned
from vqkv.errors import DataError
from vqkv.kernels import Coded, Grouped, KernelView
from vqkv.runtime.checks import FP16_MAX

FP16_MIN_NORMAL = 2.0**-14
HQQ_ITERATIONS, HQQ_NORM, HQQ_BETA = 20, 0.7, 10.0
NEARLY_CONSTANT = 1e-3  # of the rms: below, dividing by the std would throw the vector far out of any codebook


def rms(x: Tensor, axis: int = -1) -> Tensor:
    """Return the root mean square along an axis."""
    return x.square().mean(dim=axis).sqrt()


def deviation(x: Tensor, axis: int = -1) -> Tensor:
    """Return the standard deviation along an axis; the rms of (nearly) constant vectors, whose deviation is about 0."""
    size, found = rms(x, axis), x.std(dim=axis, correction=0)
    return torch.where(found < NEARLY_CONSTANT * size, size, found)


STATISTICS = {"std": deviation, "rms": rms}


@dataclass(eq=False)
class VectorScale(Stage):
    """Divide by a statistic over the last axis, rounded to fp16 first, so that decoding multiplies by the same number.
    ``kind``: ``std`` (population, mean kept: residual VQ paper, section 2.2; see ``deviation``) or ``rms``. A zero
    vector is divided by 1 (the paper) but stores the scale 0, and so decodes to exact zeros, as do vectors below half
    of fp16's smallest normal number. Other scales are clamped to fp16's normal range. Stores ``scale``: fp16, the shape
    of x without its last axis."""

    kind: str = "std"
    side_fields = ("scale",)
    choices = {"kind": STATISTICS}

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        size = STATISTICS[self.kind](x)
        scale = torch.where(size == 0, 1.0, size.clamp(FP16_MIN_NORMAL, FP16_MAX)).half()
        y = x / scale.float().unsqueeze(-1)
        return y, {self.side_fields[0]: scale.masked_fill(size < FP16_MIN_NORMAL / 2, 0)}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.mul_(side[self.side_fields[0]].float().unsqueeze(-1))

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        return _scaled(inner, side[self.side_fields[0]])


@dataclass(eq=False)
class HeadScale(Stage):
    """Divide a complete row (a head's block of tokens) by its largest magnitude, kept in fp32, so that values lie in
    [-1, 1] (VQ quality framework, section 3.1). Stores ``scale``: one number per row; 0 for a row of zeros."""

    side_fields = ("scale",)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        scale = x.abs().amax(dim=tuple(range(3, x.ndim)), keepdim=True)
        return x / scale.where(scale > 0, torch.ones_like(scale)), {"scale": scale.flatten(3).squeeze(3)}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.mul_(side["scale"][(..., *[None] * (y.ndim - 3))])

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        return _scaled(inner, side["scale"])


def _scaled(inner: KernelView, scale: Tensor) -> KernelView | None:
    """``inner`` with one scale for each row, or one for each of some of its groups."""
    scale = scale if scale.ndim == 4 else scale.unsqueeze(-1)
    if not isinstance(inner, Coded) or inner.scale is not None or scale.ndim != 4 or inner.groups % scale.shape[3]:
        return None
    return dataclasses.replace(inner, scale=scale)


@dataclass(eq=False)
class MinMax(Stage):
    """Map each vector's smallest and largest value, rounded to fp16, to 0 and 1: asymmetric affine quantization's scale
    and zero point. Acts on the last axis. Stores ``low`` and ``high``: fp16, the shape of x without it."""

    side_fields = ("low", "high")

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        low, high = (end.clamp(-FP16_MAX, FP16_MAX).half() for end in self.ends(x))
        start, span = low.float().unsqueeze(-1), (high.float() - low.float()).unsqueeze(-1)
        return (x - start).div_(span.where(span > 0, torch.ones_like(span))), {"low": low, "high": high}

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
        most = x.abs().sort(dim=-1).values[..., last]
        low, high = super().ends(x)
        return torch.maximum(low, -most), torch.minimum(high, most)


@dataclass(eq=False)
class HalfQuadratic(MinMax):
    """``MinMax`` whose offset is then moved to where rounding to ``bits`` bits costs least in the l_p norm: HQQ's
    half-quadratic solver, which alternates between rounding and shrinking the error (p = ``HQQ_NORM`` < 1). Each
    vector keeps its best of ``HQQ_ITERATIONS`` offsets by mean absolute error, where HQQ stops by the complete tensor's
    error."""

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
            power = size.double().clamp_min(1e-12).pow(HQQ_NORM - 1).float()  # fp32's last bit depends on the place
            shrunk = error.sign() * (size - power / HQQ_BETA).clamp_min(0)
            low = (x - shrunk - codes * step).mean(dim=-1, keepdim=True)
        return best.squeeze(-1), (best + high - least).squeeze(-1)


@dataclass(eq=False)
class MeanRemoval(Stage):
    """Subtract the mean over tokens, learned per head and channel and stored in fp16 (mostly the keys' bias)."""

    mean: Tensor = learned()
    by_head = True

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self._count, self.mean = 0, torch.zeros(shape, dtype=torch.float32)
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Update the running mean."""
        self._update(x)

    def finalize(self) -> None:
        """Round to fp16. Raises ``DataError`` if a mean overflows it."""
        self.mean = self.mean.half()
        if not self.mean.isfinite().all():
            raise DataError("a channel's mean overflows fp16: scale the values first")

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return x - self.mean.float().unsqueeze(1), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.add_(self.mean.float().unsqueeze(1))

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        if not isinstance(inner, Grouped) or inner.matrix is None:
            return None
        return dataclasses.replace(inner, offset=self.mean)

    def _update(self, x: Tensor) -> Tensor:
        """Take the mean of batch x into the running one; return how far it is from that."""
        count, before = x.shape[0] * x.shape[2], self.mean.to(x.device)
        self._count += count
        delta = x.mean(dim=(0, 2)) - before
        self.mean = before + delta * (count / self._count)
        return delta


@dataclass(eq=False)
class ChannelScale(MeanRemoval):
    """Subtract the mean and divide by the standard deviation of every channel of every head, both learned over tokens
    and stored once, in fp16: per-channel quantization that costs nothing per token (KVQuant, section 3.1)."""

    scale: Tensor = learned()
    kernel_view_before = Stage.kernel_view_before

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self._square = torch.zeros(shape, dtype=torch.float32)
        self.scale = torch.ones(shape, dtype=torch.float32)
        return super().build(shape)

    def partial_fit(self, x: Tensor) -> None:
        """Update the running mean and spread (Chan's parallel formula)."""
        mean, before = x.mean(dim=(0, 2)), self._count
        delta = self._update(x)
        self._square = self._square.to(x.device) + (x - mean.unsqueeze(1)).square().sum(dim=(0, 2))
        self._square = self._square + delta.square() * (before * (self._count - before) / self._count)
        self.scale = (self._square / self._count).sqrt()

    def finalize(self) -> None:
        super().finalize()
        self.scale = self.scale.clamp(FP16_MIN_NORMAL, FP16_MAX).half()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return super().encode(x)[0].div_(self.scale.float().clamp_min(FP16_MIN_NORMAL).unsqueeze(1)), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return super().decode(y.mul_(self.scale.float().unsqueeze(1)), side)
