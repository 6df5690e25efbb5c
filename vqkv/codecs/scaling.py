"""Bring values to the range a quantizer expects: by vector, by head and block, by tile, or by channel."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.stage import Side, Stage, learned
from vqkv.errors import DataError
from vqkv.kernels import Coded, Grouped, KernelView
from vqkv.runtime.checks import FP16_MAX

FP16_MIN_NORMAL = 2.0**-14
NEARLY_CONSTANT = 1e-3  # of the rms: below, dividing by the std would throw the vector far out of any codebook


def rms(x: Tensor, axis: int = -1) -> Tensor:
    """Return the root mean square along an axis."""
    return x.square().mean(dim=axis).sqrt()


def deviation(x: Tensor, axis: int = -1) -> Tensor:
    """Return the standard deviation along an axis; the rms of (nearly) constant vectors, whose deviation is about 0."""
    size, std = rms(x, axis), x.std(dim=axis, correction=0)
    return torch.where(std < NEARLY_CONSTANT * size, size, std)


STATISTICS = {"std": deviation, "rms": rms}


@dataclass(eq=False)
class VectorScale(Stage):
    """Divide by a statistic over the last axis, rounded to fp16 first: decoding multiplies by the same number.

    ``kind``: ``std`` (population, mean kept: residual VQ paper, section 2.2; see ``deviation``) or ``rms``. A zero
    vector is divided by 1 (the paper) but stores the scale 0, and so decodes to exact zeros. So do vectors below half
    of fp16's smallest normal number. Stores ``scale``: fp16, the shape of x without its last axis."""

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
class Rescale(VectorScale):
    """``VectorScale`` for the second time in a chain. Stores ``rescale``."""

    side_fields = ("rescale",)


@dataclass(eq=False)
class HeadScale(Stage):
    """Divide a complete row (a head's block of tokens) by its largest magnitude, kept in fp32, so that values lie in
    [-1, 1] (VQ quality framework, section 3.1). Stores ``scale``: one number per row; 0 for a row of zeros."""

    side_fields = ("scale",)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        scale = x.abs().amax(dim=tuple(range(3, x.ndim)), keepdim=True)
        return x / scale.where(scale > 0, 1.0), {"scale": scale.flatten(3).squeeze(3)}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.mul_(side["scale"][(..., *[None] * (y.ndim - 3))])

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        return _scaled(inner, side["scale"])


def _scaled(inner: KernelView, scale: Tensor) -> KernelView | None:
    """Give ``inner`` one scale for each row, or one for each of some of its groups."""
    scale = scale if scale.ndim == 4 else scale.unsqueeze(-1)
    if not isinstance(inner, Coded) or inner.scale is not None or scale.ndim != 4 or inner.groups % scale.shape[3]:
        return None
    return dataclasses.replace(inner, scale=scale)


@dataclass(eq=False)
class TileMean(Stage):
    """Subtract each channel's mean over a row's tokens (tokens, channels). Stores ``shift``: fp16 (channels,)."""

    side_fields = ("shift",)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        shift = x.mean(dim=-2).clamp(-FP16_MAX, FP16_MAX).half()
        return x - shift.float().unsqueeze(-2), {"shift": shift}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.add_(side["shift"].float().unsqueeze(-2))


@dataclass(eq=False)
class DualScale(Stage):
    """Bring the standard deviations of both axes of a tile, the last two axes of a row, to about 1.

    Scales for the vectors along each of the two axes are found in turns (KVarN's variance normalization, a Sinkhorn
    iteration in the log domain). Those along the last axis fold into the ends of ``AffineQuantizer``, which move with
    them, and are not applied. Stores the others, of geometric mean 1, as fp16 ``inner``."""

    iterations: int = 16
    side_fields = ("inner",)
    limits = {"iterations": (1, 1000)}

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        logs = {-1: x.new_zeros(x.shape[:-1]), -2: x.new_zeros(*x.shape[:-2], x.shape[-1])}
        for _ in range(self.iterations):
            for axis in logs:
                scaled = deviation(x / (logs[-1].exp().unsqueeze(-1) * logs[-2].exp().unsqueeze(-2)), axis)
                logs[axis] = logs[axis] + scaled.where(scaled > 0, 1.0).log()
        inner = (logs[-2] - logs[-2].mean(dim=-1, keepdim=True)).exp().clamp(FP16_MIN_NORMAL, FP16_MAX).half()
        return x / inner.float().unsqueeze(-2), {"inner": inner}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.mul_(side["inner"].float().unsqueeze(-2))


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
