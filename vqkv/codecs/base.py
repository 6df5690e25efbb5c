"""Codecs: learning, packed payloads, and reading them back."""

from abc import abstractmethod

import torch
from torch import Tensor

from vqkv.codecs.part import Part, load_learned, part_from_config
from vqkv.codecs.payload import Payload
from vqkv.errors import FormatError
from vqkv.kernels import Packed
from vqkv.kernels.precision import full_precision
from vqkv.runtime.checks import FP16_MAX, check_head_dim, check_values, whole_blocks


class Codec(Part):
    """A tensor (batch, num_kv_heads, seq_len, head_dim) -> ``Payload`` -> a tensor. Knows no model.

    Subclasses write ``_partial_fit``, ``_finalize``, ``_encode`` and ``_decode``; checks are made here, once.
    """

    head_dim: int | None = None
    num_kv_heads: int | None = None  # what it was fitted on; only parts that depend on it insist on it
    tokens_per_row: int = 1  # encoded together; ``seq_len`` must be a multiple of it
    ready: bool = False

    @property
    def learns(self) -> bool:
        """True if more than the first batch has anything to teach it."""
        return type(self)._partial_fit is not Codec._partial_fit

    @property
    def weighted(self) -> bool:
        """True if it wants to be told what errors cost, by ``weigh``, before it learns."""
        return False

    def weigh(self, metric: Tensor) -> None:
        """``metric`` (num_kv_heads, head_dim, head_dim): an error e of a head's vector costs e' metric e."""

    def fit(self, x: Tensor) -> "Codec":
        """Learn from one batch and freeze. Raises ``DataError`` for bad values or too few of them."""
        return self.partial_fit(x).finalize()

    def partial_fit(self, x: Tensor) -> "Codec":
        """Learn from one batch of a stream: the first call initialises, later calls go on learning.

        Tokens beyond the last whole block of ``tokens_per_row`` are left out.
        """
        if self.ready:
            raise RuntimeError(f"this {type(self).__name__} is frozen: make a new one to learn again")
        values = check_values(whole_blocks(x, self.tokens_per_row), self.head_dim, self.tokens_per_row)
        self.prepare(values.shape[1], values.shape[-1])
        with full_precision(values.device):
            self._partial_fit(values)
        return self

    def finalize(self) -> "Codec":
        """Freeze what was learned in the precision it is stored in."""
        if self.head_dim is None or (self.num_kv_heads is None and not self.ready):
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
        self._check_ready()
        values = check_values(x, self.head_dim, self.tokens_per_row, FP16_MAX)
        with full_precision(values.device):
            return self._encode(values)

    def decode(self, payload: Payload, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(batch, num_kv_heads, seq_len, head_dim) in ``dtype``, or ``out``, a tensor of that shape and any strides,
        filled with it. Raises ``FormatError`` for another codec's payload."""
        self._check_ready()
        if payload.tokens_per_row != self.tokens_per_row:
            raise FormatError(
                f"payload of blocks of {payload.tokens_per_row} tokens: decode it with the codec that made it"
            )
        if out is not None:
            return self._fill(out, payload)
        with full_precision(next(iter(payload.tensors.values())).device):
            values = self._decode(payload).to(dtype)
        if dtype == torch.float16:
            values = values.clamp(-FP16_MAX, FP16_MAX)  # a finite value must not become infinite by its type
        return values

    def quantize_dequantize(self, x: Tensor) -> Tensor:
        """Read back ``x`` (any float dtype) as if learning had ended now, except that nothing is rounded to
        fp16 yet: float32. Raises ``DataError`` as ``encode`` does, ``RuntimeError`` before any learning."""
        if self.num_kv_heads is None:
            self._check_ready()
        values = check_values(x, self.head_dim, self.tokens_per_row, FP16_MAX)
        with full_precision(values.device):
            return self._quantize_dequantize(values)

    def decodes_directly(self, out: Tensor) -> bool:
        """True if ``decode`` into ``out`` needs no memory beside it that grows with the number of values."""
        return False

    def packed(self, payload: Payload) -> Packed | None:
        """A payload as kernels read it without decoding it all; None if they cannot."""
        return None

    def _fill(self, out: Tensor, payload: Payload) -> Tensor:
        if out.dtype is not torch.float32:
            return out.copy_(self.decode(payload, out.dtype))
        with full_precision(out.device):
            self._decode_into(payload, out)
        return out

    def _check_ready(self) -> None:
        if not self.ready:
            name = type(self).__name__
            raise RuntimeError(f"this {name} is not fitted: call fit(x), or partial_fit(x) and then finalize()")

    def _build(self) -> None:
        """Prepare what depends on ``head_dim`` only."""
        check_head_dim(self.head_dim)

    def _partial_fit(self, x: Tensor) -> None:
        """Learn; nothing to do by default."""

    def _finalize(self) -> None:
        """Freeze; nothing to do by default."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Payload: ...

    def _quantize_dequantize(self, x: Tensor) -> Tensor:
        return self._decode(self._encode(x))

    def _decode_into(self, payload: Payload, out: Tensor) -> None:
        """``_decode`` into float32 ``out``."""
        out.copy_(self._decode(payload))

    @abstractmethod
    def _decode(self, payload: Payload) -> Tensor: ...


def codec_from_config(config: dict, state: dict[str, Tensor]) -> "Codec":
    """A ready codec from ``codec.config()`` and ``codec.state_dict()``.

    No code is loaded: names are looked up in a registry. Raises ``FormatError`` for an unknown name or a bad tensor.
    """
    codec = part_from_config(config)
    if not isinstance(codec, Codec):
        raise FormatError(f"not a codec: {str(config)[:80]!r}")
    inner = [part for part in codec.modules() if isinstance(part, Codec)]
    if any(part.head_dim is None for part in inner):
        raise FormatError("the stored settings name no head_dim: the codec was saved before it was fitted")
    load_learned(codec, state)
    for part in inner:
        part.ready = True
    return codec
