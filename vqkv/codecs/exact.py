"""Values in fp16: all, none, those that a codec gets wrong, or the largest."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.stage import Quantizer, Side, Stage
from vqkv.errors import DataError
from vqkv.kernels import pack_codes, unpack_codes
from vqkv.runtime.checks import FP16_MAX, MAX_HEAD_DIM


@dataclass(eq=False)
class Fp16(Codec):
    """Store values in fp16, two bytes each: the uncompressed baseline. Needs no fit when ``head_dim`` is given."""

    head_dim: int | None = None

    def __post_init__(self):
        self.ready = self.head_dim is not None

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"values": x.half()})

    def _decode(self, payload: Payload) -> Tensor:
        return payload.fields["values"].float()


@dataclass(eq=False)
class Nothing(Fp16):
    """Store nothing and read back zeros: for what is predicted, or shared, entirely."""

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"nothing": x.new_empty(*x.shape[:3], 0, dtype=torch.uint8)})

    def _decode(self, payload: Payload) -> Tensor:
        none = payload.fields["nothing"]
        return none.new_zeros(*none.shape[:3], self.head_dim or 0, dtype=torch.float32)


@dataclass(eq=False)
class Fallback(Quantizer):
    """Store blocks of ``block_size`` values through ``inner``, or in fp16 where the largest absolute error is above
    ``threshold`` (VQ quality framework, section 3.2, Algorithm 1).

    ``inner`` is any codec of head_dim ``block_size`` that encodes tokens one by one: it sees every block as a token.
    The threshold is in the units of what reaches this quantizer (after ``HeadScale``: shares of the head's maximum).
    Stores ``mask``, one bit a block, and for each block either inner's fields or ``exact``, never both.
    """

    inner: Codec
    threshold: float = 0.1
    block_size: int = 8
    limits = {"block_size": (1, MAX_HEAD_DIM), "threshold": (0.0, math.inf)}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare the quantizer. Raises ``DataError`` if blocks do not divide a row's last axis."""
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
        """Store the mask, the inner payload of good blocks, and the others in fp16."""
        blocks = self._blocks(y)
        payload = self.inner._encode(blocks)  # also before it is frozen
        good = ((blocks - self.inner._decode(payload)).abs().amax(dim=-1) <= self.threshold)[0, 0]
        ragged = {name: tensor[0, 0, good] for name, tensor in payload.fields.items()}
        ragged["exact"] = blocks[0, 0, ~good].clamp(-FP16_MAX, FP16_MAX).half()
        mask = good.byte().view(y.shape[2], *y.shape[:2], self.codes_per_row).movedim(0, 2)
        return Payload({"mask": pack_codes(mask, 1)}, ragged=ragged, units=self.codes_per_row)

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        return self.load(self.store(y))

    def load(self, payload: Payload) -> Tensor:
        mask = payload.mask()
        good = mask.permute(2, 0, 1, 3).flatten()
        blocks = torch.empty(len(good), self.block_size, dtype=torch.float32, device=good.device)
        blocks[~good] = payload.ragged["exact"].float()
        inner = {name: tensor[None, None] for name, tensor in payload.ragged.items() if name != "exact"}
        if good.any():
            blocks[good] = self.inner._decode(Payload(inner))[0, 0]
        batch, heads, rows = mask.shape[:3]
        return blocks.view(rows, batch, heads, *self.row_shape).movedim(0, 2)

    def _blocks(self, y: Tensor) -> Tensor:
        """Return (1, 1, blocks, block_size) in the order (row, batch, head) of ragged payloads."""
        return y.movedim(2, 0).reshape(1, 1, -1, self.block_size)


@dataclass(eq=False)
class SparseOutliers(Stage):
    """Keep the ``share`` of each row's values that are largest in magnitude in fp16, with their positions in the row.

    What goes on has 0 instead, clamped to the other values of its vector (KVQuant, section 3.4, which finds keys'
    outliers by thresholds learned offline). Rows should be blocks of tokens. Stores ``outliers``,
    fp16, and ``positions`` of ceil(log2 row size) bits each."""

    share: float = 0.01
    limits = {"share": (1e-9, 1 - 1e-9)}
    side_fields = ("outliers", "positions")

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows. Raises ``DataError`` for those too long for positions of 16 bits."""
        self._row_shape, size = shape[1:], math.prod(shape[1:])
        self._count, self._bits = max(1, round(self.share * size)), max(1, (size - 1).bit_length())
        if self._bits > 16:
            raise DataError(f"rows of {size} values: outlier positions take at most 16 bits, use smaller blocks")
        return shape

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        flat = x.flatten(3)
        positions = flat.abs().topk(self._count, dim=-1).indices.sort(dim=-1).values
        outliers = flat.gather(-1, positions).clamp(-FP16_MAX, FP16_MAX).half()
        apart = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, positions, True).unflatten(-1, self._row_shape)
        low = x.masked_fill(apart, torch.inf).amin(dim=-1, keepdim=True)
        high = x.masked_fill(apart, -torch.inf).amax(dim=-1, keepdim=True)
        inside = torch.where(low <= high, torch.minimum(low.clamp_min(0), high), 0.0)
        return torch.where(apart, inside, x), {"outliers": outliers, "positions": pack_codes(positions, self._bits)}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        positions = unpack_codes(side["positions"], self._bits, self._count).long()
        return y.flatten(3).scatter_(-1, positions, side["outliers"].float()).unflatten(-1, self._row_shape)
