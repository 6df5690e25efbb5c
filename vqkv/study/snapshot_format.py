"""A step of a snapshot stream <-> bytes: a codec for every tensor, as the stream's header says: one safetensors blob of
the codecs' learned tensors and, as ``header``, JSON. A step's bytes are payload tensors and nothing else; their sizes
follow from the codecs, the number of tokens and what was read before."""

import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vqkv.codecs.affine import AffineQuantizer
from vqkv.codecs.base import Codec
from vqkv.codecs.exact import Fp16
from vqkv.codecs.part import codec_from_config
from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.transform import Grouping
from vqkv.errors import DataError, UnknownNameError
from vqkv.runtime.checks import FP16_MAX, check_values
from vqkv.runtime.files import claim, raw_bytes

KINDS = ("keyframes", "deltas")
KEYFRAME, DELTA = KINDS
SIZES = ("num_layers", "batch_size", "num_kv_heads", "head_dim", "interval")
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
NAMES = ("exact", "fp32", "fp16", "int4")


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False)
class Verbatim(Codec):
    """Values as they are in ``dtype``, of any magnitude."""

    head_dim: int | None = None
    dtype: str = "float32"

    def __post_init__(self):
        self.ready = True

    def encode(self, x: Tensor) -> Payload:
        return self._encode(check_values(x))

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"values": x.to(DTYPES[self.dtype])})

    def _decode(self, payload: Payload) -> Tensor:
        return payload.fields["values"].float()


@dataclass(frozen=True)
class StreamLayout:
    """Contents of a header. ``keyframes`` and ``deltas``: which of ``codecs`` each tensor of such a step goes through,
    layer by layer, keys before values; ``id`` tells the stream from others that begin alike."""

    num_layers: int
    batch_size: int
    num_kv_heads: int
    head_dim: int
    interval: int
    keyframes: list[int]
    deltas: list[int]
    dtype: str
    codecs: list[Codec]
    id: str

    @classmethod
    def parse(cls, data: bytes) -> "StreamLayout":
        """Read a header's bytes."""
        tensors = load_tensors(data)
        about = json.loads(raw_bytes(tensors.pop("header")).tobytes())
        codecs = [codec_from_config(config, claim(tensors, f"{i}.")) for i, config in enumerate(about["codecs"])]
        return cls(**about | {"codecs": codecs})

    @property
    def side_bytes(self) -> int:
        """Bytes of what the codecs have learned."""
        return sum(codec.side_bytes for codec in self.codecs)

    @property
    def token_values(self) -> int:
        """Cached values of one token, all layers and the whole batch."""
        return 2 * self.num_layers * self.batch_size * self.num_kv_heads * self.head_dim

    def kind(self, number: int) -> str:
        """Of step ``number``, counted from 1."""
        return DELTA if number % self.interval else KEYFRAME

    def check(self, new: list[Tensor]) -> None:
        """Raise ``DataError`` unless these are one step's tensors."""
        if len(new) != 2 * self.num_layers:
            raise DataError(f"{len(new) // 2} layers, but the stream has {self.num_layers}")
        shape = (self.batch_size, self.num_kv_heads, *new[0].shape[-2:-1], self.head_dim)
        most = math.inf if all(isinstance(codec, Verbatim) for codec in self.codecs) else FP16_MAX
        for i, x in enumerate(new):
            if tuple(x.shape) != shape or dtype_name(x.dtype) != self.dtype:
                raise DataError(
                    f"layer {i // 2} has {tuple(x.shape)} {dtype_name(x.dtype)}, expected {self.dtype} "
                    f"(batch {shape[0]}, num_kv_heads {shape[1]}, new_tokens, head_dim {shape[-1]}), all layers alike"
                )
            check_values(x, most=most)

    def encode(self, kind: str, tensors: list[Tensor]) -> bytes:
        """A step's bytes."""
        pieces = []
        for places, codec, start, stop in self._shares(kind, tensors[0].shape[2]):
            payload = codec.encode(torch.cat([tensors[i][:, :, start:stop] for i in places]))
            for group in (payload.fields, payload.ragged):
                pieces += [raw_bytes(tensor) for _, tensor in sorted(group.items())]
        return b"".join(pieces)

    def decode(self, kind: str, tokens: int, data: bytes) -> list[Tensor]:
        """The tensors of a step of so many tokens."""
        left, parts, size = io.BytesIO(data), [list[Tensor]() for _ in range(2 * self.num_layers)], self.batch_size
        for places, codec, start, stop in self._shares(kind, tokens):
            payload = self._payload(left, codec, size * len(places), stop - start)
            for i, own in zip(places, torch.arange(size * len(places)).split(size), strict=True):
                parts[i].append(codec.decode(payload.batch_select(own), DTYPES[self.dtype]))
        return [torch.cat(own, dim=2) for own in parts]

    def _shares(self, kind: str, tokens: int) -> Iterator[tuple[list[int], Codec, int, int]]:
        """Tensors, who stores them, and which of their tokens (start, stop). Tensors of one codec are one batch, as a
        step of one token is many small ones; tokens after its last whole block are stored as they are."""
        numbers = getattr(self, kind)
        for number in dict.fromkeys(numbers):
            codec, places = self.codecs[number], [i for i, other in enumerate(numbers) if other == number]
            whole = tokens - tokens % codec.tokens_per_row
            if whole:
                yield places, codec, 0, whole
            if whole < tokens:
                yield places, Verbatim(self.head_dim, self.dtype), whole, tokens

    def _payload(self, left: io.BytesIO, codec: Codec, batch_size: int, tokens: int) -> Payload:
        """The next payload, of the shapes and types of one that the codec makes of zeros."""

        def take(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            piece = bytearray(left.read(math.prod(shape) * dtype.itemsize))  # memory of its own
            return torch.frombuffer(piece, dtype=dtype).reshape(shape) if piece else torch.empty(shape, dtype=dtype)

        like = codec.encode(torch.zeros(1, self.num_kv_heads, codec.tokens_per_row, self.head_dim))
        rows, stored = tokens // codec.tokens_per_row, sorted(like.fields.items())
        fields = {name: take(x.dtype, (batch_size, x.shape[1], rows, *x.shape[3:])) for name, x in stored}
        counts = replace(like, fields=fields, ragged={}).counts
        ragged = {n: take(x.dtype, (int(counts(n).sum()), *x.shape[1:])) for n, x in sorted(like.ragged.items())}
        return replace(like, fields=fields, ragged=ragged)


def check_stored(stored):
    """One of ``NAMES``, or codecs by layer. Raises ``UnknownNameError`` or ``DataError`` for anything else."""
    if isinstance(stored, str):
        if stored not in NAMES:
            raise UnknownNameError("way to store tokens", stored, NAMES, "Or pass codecs.")
        return stored
    try:
        codecs = [stored] if isinstance(stored, Codec) else [codec for key, value in stored for codec in (key, value)]
    except (TypeError, ValueError):
        codecs = []
    if not codecs or not all(isinstance(codec, Codec) and codec.ready for codec in codecs):
        raise DataError("pass a fitted codec, or a list over layers of (key codec, value codec), all of them fitted")
    return codecs


def header_of(new: list[Tensor], stored: dict, interval: int) -> bytes:
    """A header's bytes, from the first step's tensors and what ``check_stored`` gave for each kind of step. Raises
    ``DataError`` if they do not fit each other."""
    batch, heads, _, head_dim = check_values(new[0]).shape
    if new[0].dtype not in DTYPES.values():
        raise DataError(f"a cache in {dtype_name(new[0].dtype)}: store one in {', '.join(DTYPES)}")
    chosen = {kind: _codecs(stored[kind], new) for kind in KINDS}
    codecs = {id(codec): codec for kind in KINDS for codec in chosen[kind]}
    numbers = {key: number for number, key in enumerate(codecs)}
    about: dict[str, Any] = dict(zip(SIZES, (len(new) // 2, batch, heads, head_dim, interval), strict=True))
    about |= {kind: [numbers[id(codec)] for codec in chosen[kind]] for kind in KINDS}
    about |= {"dtype": dtype_name(new[0].dtype), "codecs": [codec.config() for codec in codecs.values()]}
    about["id"] = os.urandom(8).hex()
    tensors = {
        f"{number}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for number, codec in enumerate(codecs.values())
        for name, tensor in codec.state_dict().items()
    }
    text = bytearray(json.dumps(about).encode())
    return save_tensors(tensors | {"header": torch.frombuffer(text, dtype=torch.uint8)})


def _codecs(stored: str | list[Codec], new: list[Tensor]) -> list[Codec]:
    """The codec of every tensor."""
    head_dim = new[0].shape[-1]
    if stored == "int4":
        int4 = Chain([Grouping(group_size=64, shrink="divisor")], AffineQuantizer(4), head_dim)
        stored = [int4.fit(new[0][:1, :, :1])]  # it has nothing to learn
    elif stored == "fp16":
        stored = [Fp16(head_dim)]
    elif isinstance(stored, str):
        stored = [Verbatim(head_dim, "float32" if stored == "fp32" else dtype_name(new[0].dtype))]
    if len(stored) not in (1, len(new)):
        raise DataError(f"codecs of {len(stored) // 2} layers for a cache of {len(new) // 2}")
    return stored * (len(new) // len(stored))
