"""Values that make up a row: blocks of tokens, all KV heads together."""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from vqkv.codecs.stage import Side, Stage
from vqkv.kernels import Coded, KernelView


@dataclass(eq=False)
class TokenBlock(Stage):
    """Fold ``tokens`` tokens into one row: (..., seq_len, *row) -> (..., seq_len / tokens, tokens, *row), or (...,
    *row, tokens) with ``channels_first``, where what follows acts per channel and along tokens (KIVI's keys)."""

    tokens: int = 64
    channels_first: bool = False
    limits = {"tokens": (1, 65536)}

    def __post_init__(self):
        super().__post_init__()
        self.block_tokens = self.tokens

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        heads, *row = shape
        return (heads, *row, self.tokens) if self.channels_first else (heads, self.tokens, *row)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        rows = x.unflatten(2, (-1, self.tokens))
        return (rows.movedim(3, -1) if self.channels_first else rows), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return (y.movedim(-1, 3) if self.channels_first else y).flatten(2, 3)

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        """Put the codes of a block's tokens one after the other, in complete bytes, with one scale."""
        size = inner.codes.shape[3]
        if self.channels_first or not isinstance(inner, Coded) or size % self.tokens or inner.groups % self.tokens:
            return None
        codes, groups = inner.codes.unflatten(3, (self.tokens, -1)).flatten(2, 3), inner.groups // self.tokens
        if codes.shape[3] * 8 != groups * inner.codebooks.shape[1] * inner.bits:
            return None
        each = inner.tokens_per_scale * self.tokens
        return dataclasses.replace(inner, codes=codes, groups=groups, tokens_per_scale=each)


@dataclass(eq=False)
class MergeHeads(Stage):
    """KV heads side by side: (batch, num_kv_heads, ..., head_dim) -> (batch, 1, ..., num_kv_heads * head_dim)."""

    by_head = True

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self._heads = shape[0]
        return 1, *shape[1:-1], shape[0] * shape[-1]

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return x.movedim(1, -2).flatten(-2).unsqueeze(1), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.squeeze(1).unflatten(-1, (self._heads, -1)).movedim(-2, 1)
