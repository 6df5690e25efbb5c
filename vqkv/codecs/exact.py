"""Values in fp16: all, none, or those that a codec gets wrong."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.stage import Quantizer
from vqkv.kernels import pack_codes
from vqkv.runtime.checks import FP16_MAX, MAX_HEAD_DIM


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


@dataclass(eq=False)
class Fallback(Quantizer):
    """Blocks of ``block_size`` values through ``inner``, except those whose largest absolute error is above
    ``threshold``: they are stored in fp16 instead (VQ quality framework, section 3.2, Algorithm 1).

    ``inner`` is any codec of head_dim ``block_size`` that encodes tokens one by one: it sees every block as a token.
    The threshold is in the units of what reaches this quantizer (after ``HeadScale``: shares of the head's maximum).
    Stores ``mask``, one bit a block, and for each block either inner's fields or ``exact``, never both.
    """

    inner: Codec
    threshold: float = 0.1
    block_size: int = 8
    limits = {"block_size": (1, MAX_HEAD_DIM), "threshold": (0.0, math.inf)}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Raises ``DataError`` if blocks do not divide a row's last axis."""
        self.block_values = self.block_size
        self.inner.prepare(1, self.block_size)
        return super().build(shape)

    def partial_fit(self, x: Tensor) -> None:
        """Let ``inner`` learn from all blocks."""
        if not self.inner.ready:
            self.inner.partial_fit(self._blocks(x))

    def finalize(self) -> None:
        self.inner.finalize()

    def store(self, y: Tensor) -> Payload:
        """Mask, inner payload of the good blocks, fp16 of the others."""
        blocks = self._blocks(y)
        payload = self.inner.encode(blocks)
        good = ((blocks - self.inner.decode(payload)).abs().amax(dim=-1) <= self.threshold)[0, 0]
        ragged = {name: tensor[0, 0, good] for name, tensor in payload.fields.items()}
        ragged["exact"] = blocks[0, 0, ~good].clamp(-FP16_MAX, FP16_MAX).half()
        mask = good.byte().view(y.shape[2], *y.shape[:2], self.codes_per_row).movedim(0, 2)
        return Payload({"mask": pack_codes(mask, 1)}, ragged=ragged, units=self.codes_per_row)

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        blocks = self._blocks(y)
        x_hat = self.inner.quantize_dequantize(blocks)
        good = (blocks - x_hat).abs().amax(dim=-1, keepdim=True) <= self.threshold
        x_hat = torch.where(good, x_hat, blocks.clamp(-FP16_MAX, FP16_MAX).half().float())
        return x_hat.view(y.shape[2], *y.shape[:2], *y.shape[3:]).movedim(0, 2)

    def load(self, payload: Payload) -> Tensor:
        mask = payload.mask()
        good = mask.permute(2, 0, 1, 3).flatten()
        blocks = torch.empty(len(good), self.block_size, dtype=torch.float32, device=good.device)
        blocks[~good] = payload.ragged["exact"].float()
        inner = {name: tensor[None, None] for name, tensor in payload.ragged.items() if name != "exact"}
        if good.any():
            blocks[good] = self.inner.decode(Payload(inner))[0, 0]
        batch, heads, rows = mask.shape[:3]
        return blocks.view(rows, batch, heads, *self.row_shape).movedim(0, 2)

    def _blocks(self, y: Tensor) -> Tensor:
        """(1, 1, blocks, block_size) in the order (row, batch, head) of ragged payloads."""
        return y.movedim(2, 0).reshape(1, 1, -1, self.block_size)
