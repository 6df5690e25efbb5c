"""What every codec shares: learning, packed payloads, and reading them back."""

from abc import abstractmethod

import torch
from torch import Tensor

from vqkv.codec.checks import FP16_MAX, check_head_dim, check_num_kv_heads, check_values, whole_blocks
from vqkv.codec.part import Part, part_from_config, refusing, take
from vqkv.codec.payload import Payload
from vqkv.errors import FormatError
from vqkv.kernels import Packed
from vqkv.precision import full_precision


class Codec(Part):
    """A tensor (batch, num_kv_heads, seq_len, head_dim) -> ``Payload`` -> a tensor. Knows no model.

    Subclasses write ``_partial_fit``, ``_finalize``, ``_encode`` and ``_decode``; checks are made here, once.
    """

    head_dim: int | None = None
    num_kv_heads: int | None = None  # what it was fitted on; only parts that depend on it insist on it
    ready: bool = False
    stores_residuals: bool = False  # set by a compressor whose predictors come before this codec

    @property
    def tokens_per_row(self) -> int:
        """Tokens that are encoded together; ``seq_len`` must be a multiple of it."""
        return 1

    @property
    def learns(self) -> bool:
        """Whether more than the first batch has anything to teach it."""
        return type(self)._partial_fit is not Codec._partial_fit

    @property
    def weighted(self) -> bool:
        """Whether it wants to be told what errors cost, by ``weigh``, before it learns."""
        return False

    def weigh(self, metric: Tensor) -> None:
        """``metric`` (num_kv_heads, head_dim, head_dim): an error e of a head's vector costs e' metric e."""

    @property
    def side_bytes(self) -> int:
        """Bytes of side information: everything learned that decoding needs."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state().values())

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
        if self.num_kv_heads is None:
            self.num_kv_heads, self.head_dim = values.shape[1], values.shape[-1]
            self._build()
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

    def learning_state(self) -> dict[str, Tensor]:
        """Everything that learning has made so far, as tensors by name. A fresh codec of the same settings that loads
        it and is given the same further batches ends with the same bits. Empty once frozen: ``state`` has it all."""
        if self.ready:
            return {}
        started = self.num_kv_heads is not None and self.head_dim is not None
        shape = torch.tensor([self.num_kv_heads or 0, self.head_dim or 0])
        return {"shape": shape} | (self._learning_state() if started else {})

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what ``learning_state`` gave, on the device that its tensors are on; for a codec that has learned
        nothing yet. Raises ``FormatError`` for missing, unexpected or misshapen tensors, or another codec's."""
        if self.ready:
            return super().load_learning_state(state)
        state = dict(state)
        with refusing("what was learned so far"):
            self._resume(*(size or None for size in take(state, "shape", (2,), torch.int64).tolist()))
            if self.num_kv_heads is not None and self.head_dim is not None:
                self._load_learning_state(state)
            elif state:
                raise FormatError(f"unexpected tensors {sorted(state)}: the file was altered")

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
        if out is not None:
            return self._fill(out, payload)
        with full_precision(next(iter(payload.tensors.values())).device):
            values = self._decode(payload).to(dtype)
        if dtype == torch.float16:
            values = values.clamp(-FP16_MAX, FP16_MAX)  # a finite value must not become infinite by its type
        return values

    def read_back(self, x: Tensor) -> Tensor:
        """What would be read back of ``x`` (any float dtype) if learning ended now, except that nothing is rounded to
        fp16 yet: float32. Raises ``DataError`` as ``encode`` does, ``RuntimeError`` before any learning."""
        if self.num_kv_heads is None:
            self._check_ready()
        values = check_values(x, self.head_dim, self.tokens_per_row, FP16_MAX)
        with full_precision(values.device):
            return self._read_back(values)

    def decodes_directly(self, out: Tensor) -> bool:
        """Whether ``decode`` into ``out`` needs no memory beside it that grows with the number of values."""
        return False

    def packed(self, payload: Payload) -> Packed | None:
        """What kernels are told of a payload so that they can read it without decoding it all; None if they cannot."""
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

    def _resume(self, num_kv_heads: int | None, head_dim: int | None) -> None:
        """Be a codec that has seen keys or values of this size."""
        for name, mine, size in (
            ("num_kv_heads", self.num_kv_heads, num_kv_heads),
            ("head_dim", self.head_dim, head_dim),
        ):
            if mine not in (None, size):
                raise FormatError(f"learned for {name} {size}, but this codec is for {mine}: load it into its own kind")
        check_num_kv_heads(num_kv_heads)
        started = self.num_kv_heads is None and num_kv_heads is not None
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        if started:
            self._build()

    def _learning_state(self) -> dict[str, Tensor]:
        """``learning_state`` but for the sizes; nothing by default."""
        return {}

    def _load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Take what ``_learning_state`` gave."""
        Part.load_learning_state(self, state)

    def _partial_fit(self, x: Tensor) -> None:
        """Learn; nothing to do by default."""

    def _finalize(self) -> None:
        """Freeze; nothing to do by default."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Payload: ...

    def _read_back(self, x: Tensor) -> Tensor:
        return self._decode(self._encode(x))

    def _decode_into(self, payload: Payload, out: Tensor) -> None:
        """``_decode`` into float32 ``out``."""
        out.copy_(self._decode(payload))

    @abstractmethod
    def _decode(self, payload: Payload) -> Tensor: ...


def codec_from_config(config: dict, state: dict[str, Tensor]) -> "Codec":
    """A ready codec from ``codec.config()`` and ``codec.state()``.

    No code is loaded: names are looked up in a registry. Raises ``FormatError`` for an unknown name or a bad tensor.
    """
    codec = part_from_config(config)
    if not isinstance(codec, Codec):
        raise FormatError(f"not a codec: {str(config)[:80]!r}")
    with refusing("learned tensors"):
        codec.load_state(dict(state))
    codec.ready = True
    return codec
