"""Description of a packed tensor for kernels: the codes of every token, and what turns them into values.

Shapes: batch, num_kv_heads, seq_len, ... A code is ``bits`` bits of its token's string, lowest first, in whole bytes.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from vqkv.kernels.rope import rotate


@dataclass(frozen=True)
class Affine:
    """value = low + code / (2^bits - 1) * (high - low), the ends per token and group of neighbouring channels."""

    codes: Tensor  # uint8 (batch, num_kv_heads, seq_len, head_dim * bits / 8)
    low: Tensor  # fp16 (batch, num_kv_heads, seq_len, groups)
    high: Tensor  # like low
    bits: int  # 2, 4 or 8

    @property
    def shape(self) -> torch.Size:
        """Shape of what it decodes to: (batch, num_kv_heads, seq_len, head_dim)."""
        return torch.Size((*self.codes.shape[:3], self.codes.shape[3] * 8 // self.bits))

    @property
    def group_size(self) -> int:
        """Channels that share their ends."""
        return self.shape[3] // self.low.shape[3]

    def tokens(self, start: int, stop: int) -> "Affine":
        """Return the tokens start, ..., stop - 1; no copy."""
        part = slice(start, stop)
        return Affine(self.codes[:, :, part], self.low[:, :, part], self.high[:, :, part], self.bits)


@dataclass(frozen=True)
class Coded:
    """value = scale * sum of the codes' vectors: residual and product VQ, and grids. A token's codes are those of its
    ``groups``, one after the other, ``num_quantizers`` each. Group g reads ``codebooks[g % tables]``."""

    codes: Tensor  # uint8 (batch, num_kv_heads, seq_len, ceil(groups * num_quantizers * bits / 8))
    codebooks: Tensor  # fp16 or fp32 (tables, num_quantizers, codebook_size, dim)
    bits: int  # of a code
    groups: int
    scale: Tensor | None = None  # (batch, num_kv_heads, ceil(seq_len / tokens_per_scale), 1 or any divisor of groups)
    tokens_per_scale: int = 1
    strided: bool = False  # channel i of group g is channel i * groups + g of the head, else g * dim + i

    @property
    def shape(self) -> torch.Size:
        """Shape of what it decodes to: (batch, num_kv_heads, seq_len, head_dim)."""
        return torch.Size((*self.codes.shape[:3], self.groups * self.codebooks.shape[3]))

    def tokens(self, start: int, stop: int) -> "Coded":
        """Return the tokens start, ..., stop - 1, complete blocks of a scale; no copy."""
        scale, each = self.scale, self.tokens_per_scale
        scale = None if scale is None else scale[:, :, start // each : -(-stop // each)]
        return dataclasses.replace(self, codes=self.codes[:, :, start:stop], scale=scale)


@dataclass(frozen=True)
class Grouped:
    """value = components @ matrix + offset, so that attention maps its queries and its sums instead; without a matrix,
    the components themselves. These are in groups, a byte each: component firsts[h, j] + i of head h, over its scale,
    is table[starts[h, j] + 256 * i + codes[..., j]], where j is its group. Those of no group are 0."""

    codes: Tensor  # uint8 (batch, num_kv_heads, seq_len, groups)
    table: Tensor  # fp32, the codebooks of all sizes, one after the other
    layout: Tensor  # int64 (3, num_kv_heads, groups): sizes, starts and firsts
    scale: Tensor  # fp16 (num_kv_heads, components)
    matrix: Tensor | None = None  # fp32 (num_kv_heads, components, head_dim)
    offset: Tensor | None = None  # fp16 (num_kv_heads, head_dim)

    @property
    def shape(self) -> torch.Size:
        """Shape of what it decodes to: (batch, num_kv_heads, seq_len, head_dim or components)."""
        return torch.Size((*self.codes.shape[:3], (self.scale if self.matrix is None else self.matrix).shape[-1]))

    @cached_property
    def scaled_matrix(self) -> Tensor:
        """Matrix for components before their scale, and last the offset: (num_kv_heads, components + 1, head_dim)."""
        assert self.matrix is not None
        matrix = self.matrix * self.scale.float().unsqueeze(2)
        offset = torch.zeros_like(matrix[:, 0]) if self.offset is None else self.offset.float()
        return torch.cat([matrix, offset.unsqueeze(1)], dim=1)

    def tokens(self, start: int, stop: int) -> "Grouped":
        """Return the tokens start, ..., stop - 1; no copy."""
        return dataclasses.replace(self, codes=self.codes[:, :, start:stop])


@dataclass(frozen=True)
class Rope:
    """RoPE for keys that attention reads packed, from position ``start`` on: angle = position * inv_freq; the
    position is that of the first of its block of ``block``."""

    inv_freq: Tensor
    start: int = 0
    block: int = 1

    def rotated(self, keys: Tensor, first: int = 0) -> Tensor:
        """Rotate keys (batch, num_kv_heads, tokens, head_dim), from the ``first``-th on, by float64 angles."""
        start = self.start + first
        positions = torch.arange(start, start + keys.shape[2], device=self.inv_freq.device)
        return rotate(keys, *_table(self.inv_freq, positions - positions % self.block))

    def by_block(self, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (blocks, head_dim) of the blocks that ``seq_len`` keys are in."""
        first, last = self.start // self.block, (self.start + seq_len - 1) // self.block
        return _by_block(self.inv_freq, self.block, first, last)


@lru_cache(maxsize=4)  # layers share them
def _by_block(inv_freq: Tensor, block: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    cos, sin = _table(inv_freq, torch.arange(first, last + 1, device=inv_freq.device) * block)
    return cos[0], sin[0]


def _table(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.double().unsqueeze(-1) * inv_freq.double()
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(0)
    return angles.cos().float(), angles.sin().float()


KernelView = Affine | Coded | Grouped
