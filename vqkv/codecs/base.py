"""Codecs: learning, packed payloads, and reading them back."""

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from vqkv.codecs.part import Part
from vqkv.codecs.payload import Payload
from vqkv.errors import DataError
from vqkv.kernels import KernelView
from vqkv.kernels.precision import full_precision
from vqkv.runtime.checks import FP16_MAX, check_values, whole_blocks


class Codec(Part):
    """A tensor (batch, num_kv_heads, seq_len, head_dim) -> ``Payload`` -> a tensor. Knows no model. Subclasses write
    ``_partial_fit``, ``_finalize``, ``_encode`` and ``_decode``; checks are made here, once."""

    head_dim: int | None = None
    num_kv_heads: int | None = None  # what it was fitted on
    tokens_per_row: int = 1  # encoded together; ``seq_len`` must be a multiple of it
    ready: bool = False
    by_head: bool = False  # whether it serves just as many KV heads as it was fitted on
    learns: bool = False  # whether more than the first batch has anything to teach it
    passes: int = 1  # how often it is to see all batches
    weighted: bool = False  # whether it wants to be told what errors cost, by ``weigh``, before it learns
    costs: str = "loss"  # and which costs, see ``Stage.costs``

    def weigh(self, metric: Tensor) -> None:
        """``metric`` (num_kv_heads, head_dim, head_dim): an error e of a head's vector costs e' metric e."""

    def fit(self, x: Tensor) -> "Codec":
        """Learn from one batch and freeze. Raises ``DataError`` for bad values or too few of them."""
        for _ in range(self.passes):
            self.partial_fit(x).end_pass()
        return self.finalize()

    def partial_fit(self, x: Tensor) -> "Codec":
        """Learn from one batch of a stream, without an incomplete block: the first call initialises. The stream is
        to be gone through ``passes`` times, with ``end_pass`` after each."""
        if self.ready:
            raise RuntimeError(f"this {type(self).__name__} is frozen: make a new one to learn again")
        values = self._checked(whole_blocks(x, self.tokens_per_row), math.inf)
        self.prepare(values.shape[1], values.shape[-1])
        self.to(values.device)
        with full_precision(values.device):
            self._partial_fit(values)
        return self

    def end_pass(self) -> None:
        """Conclude one of ``passes``."""

    def finalize(self) -> "Codec":
        """Freeze what was learned in the precision it is stored in."""
        if self.num_kv_heads is None and not self.ready:
            raise RuntimeError(f"this {type(self).__name__} has learned nothing yet: call partial_fit(x) first")
        if not self.ready:
            self._finalize()
        self.ready = True
        return self

    def prepare(self, num_kv_heads: int, head_dim: int) -> None:
        """Become a codec of this size, as the first batch would make it."""
        if self.num_kv_heads is None:
            self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
            self._build()

    def encode(self, x: Tensor) -> Payload:
        """Store ``x`` (any float dtype). Raises ``DataError`` for bad values or magnitudes beyond fp16's, which most
        codecs keep scales or values in; ``RuntimeError`` before ``fit``."""
        self._check_fitted(self.ready)
        values = self._checked(x)
        with full_precision(values.device):
            return self._encode(values)

    def decode(self, payload: Payload, dtype: torch.dtype = torch.float32) -> Tensor:
        """(batch, num_kv_heads, seq_len, head_dim) in ``dtype``, of a payload that this codec has made."""
        with full_precision(next(iter(payload.fields.values())).device):
            values = self._decode(payload).to(dtype)
        if dtype == torch.float16:
            values = values.clamp(-FP16_MAX, FP16_MAX)  # a finite value must not become infinite by its type
        return values

    def reader(self, payload: Payload) -> Callable[[int, int], Tensor]:
        """``decode`` by parts: a function (first, last) that gives these KV heads."""
        values = self.decode(payload)
        return lambda first, last: values[:, first:last]

    def quantize_dequantize(self, x: Tensor) -> Tensor:
        """Read back ``x`` (any float dtype) as if learning had ended now, except that nothing is rounded to
        fp16 yet: float32. Raises ``DataError`` as ``encode`` does, ``RuntimeError`` before any learning."""
        self._check_fitted(self.ready or self.num_kv_heads is not None)
        values = self._checked(x)
        with full_precision(values.device):
            return self._quantize_dequantize(values)

    def kernel_view(self, payload: Payload) -> KernelView | None:
        """A payload as kernels read it without decoding it all; None if they cannot."""
        return None

    def _checked(self, x: Tensor, most: float = FP16_MAX) -> Tensor:
        values = check_values(x, self.head_dim, self.tokens_per_row, most)
        if self.by_head and self.num_kv_heads not in (None, values.shape[1]):
            raise DataError(f"{values.shape[1]} KV heads, but this codec was fitted on {self.num_kv_heads}: fit again")
        return values

    def _check_fitted(self, fitted: bool) -> None:
        if not fitted:
            name = type(self).__name__
            raise RuntimeError(f"this {name} is not fitted: call fit(x), or partial_fit(x) and then finalize()")

    def _build(self) -> None:
        """Prepare what depends on ``head_dim`` only."""

    def _partial_fit(self, x: Tensor) -> None:
        """Learn; nothing to do by default."""

    def _finalize(self) -> None:
        """Freeze; nothing to do by default."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Payload: ...

    def _quantize_dequantize(self, x: Tensor) -> Tensor:
        return self._decode(self._encode(x))

    @abstractmethod
    def _decode(self, payload: Payload) -> Tensor: ...
