"""Values as they are, and values that are not stored at all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Codec


@dataclass(eq=False)
class Fp16(Codec):
    """Values in fp16, two bytes each: the uncompressed baseline. Needs no fit when ``head_dim`` is given."""

    head_dim: int | None = None

    def __post_init__(self):
        self.ready = self.head_dim is not None

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"values": x.half()})

    def _decode(self, payload: Payload) -> Tensor:
        return payload.fields["values"].float()


@dataclass(eq=False)
class Nothing(Fp16):
    """Stores nothing and reads back zeros: for what is predicted, or shared, entirely."""

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"nothing": x.new_empty(*x.shape[:3], 0, dtype=torch.uint8)})

    def _decode(self, payload: Payload) -> Tensor:
        none = payload.fields["nothing"]
        return none.new_zeros(*none.shape[:3], self.head_dim or 0, dtype=torch.float32)
