"""What a quantizer leaves, as the signs of random projections (TurboQuant's second stage, QJL)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer
from vqkv.errors import DataError
from vqkv.kernels import pack_codes, unpack_codes
from vqkv.kernels.precision import product
from vqkv.runtime.checks import FP16_MAX, MAX_SEED


@dataclass(eq=False)
class Sketched(Quantizer):
    """``quantizer``, and of what it leaves of each vector of the last axis its norm, fp16 ``rest``, and the sign of as
    many random projections as it has values, ``sketch``: read back, inner products with it are right in expectation
    (TurboQuant, Zandieh et al. 2025, Algorithm 2)."""

    quantizer: Quantizer
    seed: int = 0
    limits = {"seed": (0, MAX_SEED)}
    side_fields = ("sketch", "rest")

    def __post_init__(self):
        super().__post_init__()
        if type(self.quantizer).store is not Quantizer.store:
            raise DataError("a sketch goes with a quantizer of plain codes, one for each value")

    def build(self, shape: tuple[int, ...]) -> None:
        super().build(shape)
        self.quantizer.build(shape)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float32)
        self.register_buffer("projections", drawn, persistent=False)

    def partial_fit(self, x: Tensor) -> None:
        self.quantizer.partial_fit(x)

    def finalize(self) -> None:
        self.quantizer.finalize()

    def store(self, y: Tensor) -> Payload:
        stored = self.quantizer.store(y)
        rest = y - self.quantizer.load(stored)
        signs = (product(rest, self.projections.mT) >= 0).flatten(3).byte()
        norms = rest.square().sum(dim=-1).sqrt().clamp_max(FP16_MAX).half()
        return Payload(stored.fields | {"sketch": pack_codes(signs, 1), "rest": norms})

    def load(self, payload: Payload) -> Tensor:
        signs = unpack_codes(payload.fields["sketch"], 1, self.codes_per_row).float().mul_(2).sub_(1)
        size = math.sqrt(math.pi / 2) / self.row_shape[-1] * payload.fields["rest"].float()
        found = product(signs.unflatten(-1, self.row_shape), self.projections) * size.unsqueeze(-1)
        return found.add_(self.quantizer.load(payload))

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        return self.load(self.store(y))
