"""What every codec shares: packed payloads, input checks, a registry that rebuilds a codec from JSON and tensors."""

import dataclasses
import math
from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from vqkv.codec.payload import Payload, payload_field
from vqkv.errors import DataError, FormatError
from vqkv.kernels import Packed
from vqkv.precision import full_precision

MAX_HEAD_DIM, MAX_NUM_KV_HEADS = 32768, 4096  # an altered config must not make us allocate without bound
MAX_SEED, MAX_DEPTH = 2**63 - 1, 16  # parts within parts: an altered config must not exhaust the stack
FP16_MAX = 65504.0
ALTERED = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)  # what bad settings raise


class Part:
    """Anything a codec is built from: a dataclass whose init fields are its JSON-able settings.

    Subclasses register under their class name. ``state`` holds what was learned (side information).
    """

    registry: dict[str, type["Part"]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Part.registry[cls.__name__] = cls

    def config(self) -> dict:
        """Settings as JSON-able values; ``codec_from_config`` reads them."""
        settings = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        return {"part": type(self).__name__, **settings}

    def state(self) -> dict[str, Tensor]:
        """Learned tensors by name."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what ``state`` gave. Raises ``FormatError`` for missing, unexpected or misshapen tensors."""
        if state:
            raise FormatError(f"{type(self).__name__} has no state, but got {sorted(state)}: the file was altered")

    def learning_state(self) -> dict[str, Tensor]:
        """All that ``partial_fit`` has made so far and ``finalize`` has not yet frozen."""
        return {}

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Go on learning from what ``learning_state`` gave. Raises ``FormatError`` as ``load_state`` does."""
        if state:
            raise FormatError(f"{type(self).__name__} learns nothing, but got {sorted(state)}: the file was altered")

    def to(self, device) -> "Part":
        """Move learned tensors (and those of inner parts) to ``device``, in place."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Part):
                    inner.to(device)
        return self


def _plain(value):
    if isinstance(value, Part):
        return value.config()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def part_from_config(config, depth: int = 0):
    """Rebuild a part (or a list of them) from ``config()``. Raises ``FormatError`` for anything not understood."""
    if depth > MAX_DEPTH:
        raise FormatError(f"settings nested more than {MAX_DEPTH} deep: the file was altered")
    if isinstance(config, list):
        return [part_from_config(item, depth + 1) for item in config]
    if not isinstance(config, dict):
        return config
    settings = dict(config)
    name = settings.pop("part", None)
    name = name if isinstance(name, str) else type(name).__name__
    cls = Part.registry.get(name)
    if cls is None or not dataclasses.is_dataclass(cls):
        raise FormatError(f"unknown codec part {name!r}: the file was altered or needs a newer vqkv")
    settings = {key: part_from_config(value, depth + 1) for key, value in settings.items()}
    with _refusing(f"settings of {name}"):
        return cls(**settings)


def codec_from_config(config: dict, state: dict[str, Tensor]) -> "Codec":
    """A ready codec from ``codec.config()`` and ``codec.state()``.

    No code is loaded: names are looked up in a registry. Raises ``FormatError`` for an unknown name or a bad tensor.
    """
    codec = part_from_config(config)
    if not isinstance(codec, Codec):
        raise FormatError(f"not a codec: {str(config)[:80]!r}")
    with _refusing("learned tensors"):
        codec.load_state(dict(state))
    codec.ready = True
    return codec


@contextmanager
def _refusing(what: str):
    """Whatever settings or tensors of an altered file raise becomes a ``FormatError``."""
    try:
        yield
    except FormatError:
        raise
    except ALTERED as error:
        raise FormatError(f"{what} do not fit this version of vqkv: {error}") from error


def take(state: dict[str, Tensor], name: str, shape: tuple, dtype: torch.dtype) -> Tensor:
    """Pop a tensor of a given shape and type out of ``state``. Raises ``FormatError`` if it is not so."""
    tensor = state.pop(name, None)
    if not isinstance(tensor, Tensor):
        raise FormatError(f"tensor {name!r} is missing: the file is truncated or was altered")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise FormatError(f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype}")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise FormatError(f"tensor {name!r} holds NaN or infinity: the file was altered")
    return tensor


def check_values(x: Tensor, head_dim: int | None = None, tokens_per_row: int = 1, most: float = math.inf) -> Tensor:
    """``x`` as finite float32 (batch, num_kv_heads, seq_len, head_dim); every input check of every codec is here.

    Raises ``DataError`` for other shapes, an empty sequence, another ``head_dim``, a broken token block, NaN, infinity,
    or a magnitude above ``most``.
    """
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise DataError(f"expected a floating tensor (batch, num_kv_heads, seq_len, head_dim), got {got}")
    if x.numel() == 0:
        raise DataError(f"empty input of shape {tuple(x.shape)}: encode at least one token")
    if head_dim is not None and x.shape[-1] != head_dim:
        raise DataError(f"head_dim is {x.shape[-1]}, but this codec was made for {head_dim}: fit one for this model")
    if x.shape[2] % tokens_per_row:
        raise DataError(f"seq_len {x.shape[2]} is no multiple of the codec's block of {tokens_per_row} tokens")
    values = x.detach().float()
    largest = max(abs(float(end)) for end in torch.aminmax(values))  # one pass, and NaN is passed on
    if not math.isfinite(largest):
        _refuse_values(values)
    if largest > most:
        raise DataError(f"the largest magnitude {largest:g} overflows fp16 ({most:g}): scale the values first")
    return values


def _refuse_values(values: Tensor) -> NoReturn:
    bad = ~torch.isfinite(values)
    position = tuple(bad.nonzero()[0].tolist())
    raise DataError(
        f"{int(bad.sum())} of {values.numel()} values are NaN or infinite, the first ({values[position]}) at "
        f"(batch, head, token, channel) = {position}: check the model's dtype (fp16 overflows) and its inputs"
    )


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
        with _refusing("what was learned so far"):
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


def check_head_dim(head_dim) -> None:
    """Raises ``DataError`` unless ``head_dim`` is a plausible number of channels."""
    if type(head_dim) is not int or not 0 < head_dim <= MAX_HEAD_DIM:
        raise DataError(f"head_dim {head_dim!r} is not an integer from 1 to {MAX_HEAD_DIM}")


def check_num_kv_heads(num_kv_heads) -> int:
    """``num_kv_heads``, or 1 in its place while it is None. Raises ``DataError`` for an implausible number."""
    if num_kv_heads is not None and (type(num_kv_heads) is not int or not 0 < num_kv_heads <= MAX_NUM_KV_HEADS):
        raise DataError(f"num_kv_heads {num_kv_heads!r} is not an integer from 1 to {MAX_NUM_KV_HEADS}")
    return num_kv_heads or 1


def check_whole(name: str, value, least: int, most: int) -> None:
    """Raise ``DataError`` unless ``value``, a setting called ``name``, is an integer from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise DataError(f"{name} {value!r} must be an integer from {least} to {most}")


def check_heads(x: Tensor, learned: Tensor) -> None:
    """Raise ``DataError`` unless ``x`` has the number of KV heads that ``learned`` (num_kv_heads, ...) has."""
    if x.shape[1] != len(learned):
        raise DataError(f"{x.shape[1]} KV heads, but the mean was learned for {len(learned)}: fit again")


def whole_blocks(x: Tensor, tokens_per_row: int) -> Tensor:
    """x (batch, num_kv_heads, seq_len, head_dim) without the tokens after the last whole block. Raises ``DataError`` if
    there is no whole block."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        return x  # check_values says what is wrong
    if 0 < x.shape[2] < tokens_per_row:
        raise DataError(f"seq_len {x.shape[2]} is shorter than the codec's block of {tokens_per_row} tokens")
    return x[:, :, : x.shape[2] - x.shape[2] % tokens_per_row]


@dataclass(eq=False)
class Fp16(Codec):
    """Values in fp16, two bytes each: the uncompressed baseline. Needs no fit when ``head_dim`` is given."""

    head_dim: int | None = None

    def __post_init__(self):
        if self.head_dim is not None:
            self._build()
            self.ready = True

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"values": x.half()})

    def _decode(self, payload: Payload) -> Tensor:
        return payload_field(payload, "values").float()


@dataclass(eq=False)
class Nothing(Codec):
    """Stores nothing and reads back zeros: for what is predicted, or shared, entirely."""

    head_dim: int | None = None

    def __post_init__(self):
        if self.head_dim is not None:
            self._build()
            self.ready = True

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for any tensor, or if the settings do not say how many zeros make a vector."""
        if self.head_dim is None:
            raise FormatError("Nothing without head_dim: the codec was saved before it was fitted, or altered")
        super().load_state(state)

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"nothing": x.new_empty(*x.shape[:3], 0, dtype=torch.uint8)})

    def _decode(self, payload: Payload) -> Tensor:
        none = payload_field(payload, "nothing")
        return none.new_zeros(*none.shape[:3], self.head_dim, dtype=torch.float32)
