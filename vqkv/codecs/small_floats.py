"""Floats of 8 and of 4 bits, the caches that servers ship."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.nonuniform import nearest
from vqkv.codecs.stage import Quantizer, Side

E4M3, MOST_E4M3 = torch.float8_e4m3fn, 448.0
HALF_E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*(-x for x in reversed(HALF_E2M1)), 0.0, *HALF_E2M1])


@dataclass(eq=False)
class Fp8(Quantizer):
    """Each value rounded to E4M3, those beyond 448 to 448."""

    code_bits = 8

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return x.clamp(-MOST_E4M3, MOST_E4M3).to(E4M3).view(torch.uint8).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return codes.byte().view(E4M3).float().unflatten(-1, self.row_shape)


@dataclass(eq=False)
class Fp4(Quantizer):
    """Each value rounded to E2M1, once divided by a sixth of the largest magnitude of its vector along the last axis:
    NVFP4, if vectors have 16 values. Stores that ``scale`` as the bytes of E4M3."""

    code_bits = 4
    side_fields = ("scale",)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        scale = (x.abs().amax(dim=-1) / E2M1[-1]).clamp_max(MOST_E4M3).to(E4M3)
        size = scale.float().unsqueeze(-1)
        y = x / torch.where(size > 0, size, torch.inf)
        return nearest(y, E2M1.to(x.device)).flatten(3), {"scale": scale.view(torch.uint8)}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        values = E2M1.to(codes.device)[codes.long()].unflatten(-1, self.row_shape)
        return values.mul_(side["scale"].view(E4M3).float().unsqueeze(-1))
