"""Pairs of layers that share one direction for each token, and keep their own norms (MiniCache)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer
from vqkv.errors import DataError
from vqkv.kernels import pack_codes
from vqkv.runtime.checks import FP16_MAX

LEAST = 1e-3  # angle (radians) between directions that are told apart
MANY = 1 << 16


@dataclass(eq=False)
class MergedLayers(Quantizer):
    """Vectors of ``num_layers`` layers side by side, in fp16; of each of the last ``pairs`` pairs of layers both norms
    and one direction, ``position`` of the way from the earlier layer's to the later's on the arc between them. Tokens
    whose directions differ most, a share ``retained`` of those in the first batch, keep their own (MiniCache, Liu et
    al. 2024, sections 4.1 to 4.3): beyond ``angle``, radians (pairs,). Stores ``alone`` and ``shared``, two ``norms`` a
    pair, ``mask``, one bit a pair, and in ``exact`` the later layer's vector where that is 0."""

    num_layers: int = 2
    pairs: int = 1
    position: float = 0.6
    retained: float = 0.05
    limits = {"num_layers": (1, MANY), "pairs": (1, MANY), "position": (0.0, 1.0), "retained": (0.0, 1.0)}

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` for more pairs than layers have."""
        if 2 * self.pairs > self.num_layers:
            raise DataError(f"{self.pairs} pairs of layers to merge, but of {self.num_layers} layers: merge fewer")
        self.row_shape = shape[1:]
        self.register_buffer("angle", None)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch says beyond which angle tokens are retained."""
        if self.angle is None:
            _, pairs = self._split(x)
            self.angle = _angles(pairs).flatten(0, 2).quantile(1 - self.retained, dim=0)

    def store(self, y: Tensor) -> Payload:
        alone, pairs = self._split(y)
        angles, norms = _angles(pairs), pairs.norm(dim=-1)
        merged = angles <= self.angle
        first, second = F.normalize(pairs, dim=-1).unbind(-2)
        arc = angles.clamp_min(LEAST).unsqueeze(-1)
        between = ((1 - self.position) * arc).sin() * first + (self.position * arc).sin() * second
        shared = torch.where(merged.unsqueeze(-1), F.normalize(between, dim=-1), first)
        kept = pairs[..., 1, :].movedim(2, 0)[~merged.movedim(2, 0)]
        fields = {"alone": alone, "shared": shared.flatten(3), "norms": norms.flatten(3)}
        fields = {name: x.clamp(-FP16_MAX, FP16_MAX).half() for name, x in fields.items()}
        fields["mask"] = pack_codes(merged.byte(), 1)
        return Payload(fields, ragged={"exact": kept.clamp(-FP16_MAX, FP16_MAX).half()}, units=self.pairs)

    def load(self, payload: Payload) -> Tensor:
        shared, norms = (payload.fields[name].float().unflatten(-1, (self.pairs, -1)) for name in ("shared", "norms"))
        pairs = shared.unsqueeze(-2) * norms.unsqueeze(-1)
        pairs[..., 1, :].movedim(2, 0)[~payload.mask().movedim(2, 0)] = payload.ragged["exact"].float()
        return torch.cat([payload.fields["alone"].float(), pairs.flatten(3)], dim=-1)

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        return self.load(self.store(y))

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The layers that stay as they are, side by side, and pairs (batch, 1, tokens, pairs, 2, width)."""
        width = math.prod(self.row_shape) // self.num_layers
        start = (self.num_layers - 2 * self.pairs) * width
        return y[..., :start], y[..., start:].unflatten(-1, (self.pairs, 2, width))


def _angles(pairs: Tensor) -> Tensor:
    """Radians between two vectors, (..., 2, width) -> (...)."""
    return F.cosine_similarity(*pairs.unbind(-2), dim=-1).clamp(-1, 1).acos()
