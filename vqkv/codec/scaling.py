"""Divide every vector by its own size, kept in fp16: per-vector std, rms or absmax."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.base import FP16_MAX
from vqkv.codec.pipeline import Side, Stage
from vqkv.errors import UnknownNameError

FP16_MIN_NORMAL = 2.0**-14
NEARLY_CONSTANT = 1e-3  # of the rms: below, dividing by the std would throw the vector far out of any codebook
STATISTICS = {
    "std": lambda x: x.std(dim=-1, correction=0),
    "rms": lambda x: x.square().mean(dim=-1).sqrt(),
    "absmax": lambda x: x.abs().amax(dim=-1),
}


@dataclass(eq=False)
class VectorScale(Stage):
    """Divide by a statistic over the last axis, rounded to fp16 first, so that decoding multiplies by the same number.

    ``kind``: ``std`` (population, mean kept: residual VQ paper, section 2.2), ``rms`` or ``absmax``. After a
    ``Grouping`` it acts per group. A (nearly)
    constant vector is divided by its rms instead of a std of about 0. A zero vector is divided by 1 (the paper) but
    stores the scale 0, and so decodes to exact zeros whatever its codes are. Other scales are clamped to fp16's normal
    range, so that decoding is always finite. Stores ``scale``: fp16, the shape of x without its last axis.
    """

    kind: str = "std"
    side_fields = ("scale",)

    def __post_init__(self):
        if self.kind not in STATISTICS:
            raise UnknownNameError("scale", self.kind, STATISTICS)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """x / scale, and the scale."""
        size, rms = STATISTICS[self.kind](x), STATISTICS["rms"](x)
        size = torch.where(size < NEARLY_CONSTANT * rms, rms, size)
        scale = torch.where(size == 0, 1.0, size.clamp(FP16_MIN_NORMAL, FP16_MAX)).half()
        y = x / scale.float().unsqueeze(-1)
        zero = x.abs().amax(dim=-1) == 0
        return y, {"scale": scale.masked_fill(zero, 0)}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        """y * scale."""
        return y * side["scale"].float().unsqueeze(-1)
