"""Blocks of tokens as tiles: means and sizes of both axes set apart, tokens as differences from an anchor."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.codecs.scaling import FP16_MIN_NORMAL, MinMax, VectorScale, deviation
from vqkv.codecs.stage import Side, Stage
from vqkv.errors import DataError
from vqkv.runtime.checks import FP16_MAX

ANCHOR_LEVELS = 255


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
class Rescale(VectorScale):
    """``VectorScale`` for the second time in a chain. Stores ``rescale``."""

    side_fields = ("rescale",)


@dataclass(eq=False)
class DualScale(Stage):
    """Divide tiles, the last two axes of a row, by a scale for each vector along the other axis, found in turns with
    one for each vector along the last until the standard deviation of both is about 1 (KVarN's variance normalization,
    a Sinkhorn iteration in the log domain). The latter scales fold into the ends of ``AffineQuantizer``, which moves
    with them, and so are not applied. Stores the former, of geometric mean 1, as fp16 ``inner``."""

    iterations: int = 16
    side_fields = ("inner",)
    limits = {"iterations": (1, 1000)}

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        logs = {-1: x.new_zeros(x.shape[:-1]), -2: x.new_zeros(*x.shape[:-2], x.shape[-1])}
        for _ in range(self.iterations):
            for axis in logs:
                scaled = deviation(x / (logs[-1].exp().unsqueeze(-1) * logs[-2].exp().unsqueeze(-2)), axis)
                logs[axis] = logs[axis] + torch.where(scaled > 0, scaled, torch.ones_like(scaled)).log()
        inner = (logs[-2] - logs[-2].mean(dim=-1, keepdim=True)).exp().clamp(FP16_MIN_NORMAL, FP16_MAX).half()
        return x / inner.float().unsqueeze(-2), {"inner": inner}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.mul_(side["inner"].float().unsqueeze(-2))


@dataclass(eq=False)
class Anchors(Stage):
    """Of every ``group`` tokens of a row (tokens, channels) the first is an anchor, stored in 8 bits between its ends;
    the others go on as differences from it, as it is read back (CacheGen, Liu et al. 2024, section 5.1). Stores
    ``anchors``, uint8 (anchors, channels), and their ends ``low`` and ``high``, fp16."""

    group: int = 10
    ends: MinMax = field(default_factory=MinMax)
    side_fields = ("anchors", "low", "high")
    limits = {"group": (2, 1 << 16)}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Raises ``DataError`` for rows of tokens that groups do not divide."""
        if len(shape) != 3 or shape[1] % self.group:
            raise DataError(f"rows of {shape[1:]} are no groups of {self.group} tokens: put a TokenBlock first")
        return shape[0], shape[1] - shape[1] // self.group, shape[2]

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(..., tokens, channels) -> (..., tokens that are no anchors, channels)."""
        groups = x.unflatten(-2, (-1, self.group))
        codes, ends = self.ends.codes(groups[..., 0, :], ANCHOR_LEVELS)
        side = {"anchors": codes.to(torch.uint8)} | ends
        return (groups[..., 1:, :] - self._anchors(side)).flatten(-3, -2), side

    def decode(self, y: Tensor, side: Side) -> Tensor:
        anchors = self._anchors(side)
        return torch.cat([anchors, y.unflatten(-2, (-1, self.group - 1)) + anchors], dim=-2).flatten(-3, -2)

    def _anchors(self, side: Side) -> Tensor:
        """As they are read back: (..., anchors, 1, channels)."""
        return self.ends.decode(side["anchors"].float().div_(ANCHOR_LEVELS), side).unsqueeze(-2)
