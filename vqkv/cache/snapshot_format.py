"""A step of a snapshot stream <-> bytes: who stores its tokens, as the header says, and the tensors that follow.

The header is a length (4 bytes), JSON and the codecs' learned tensors (safetensors). A step's bytes are tensors and
nothing else, layer by layer, keys before values: every size follows from the header, the number of tokens and what was
read before. What is stored whole is so in raw values, or in a codec's payloads: fields first, in the order of names.
"""

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vqkv.cache.compressor import Compressor
from vqkv.codecs.affine import AffineQuantizer
from vqkv.codecs.base import Codec
from vqkv.codecs.part import codec_from_config
from vqkv.codecs.payload import Payload, payload_from
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.transform import Grouping
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.runtime.checks import FP16_MAX, check_values

FORMAT, VERSION = "vqkv-snapshots", 2
KINDS = ("keyframes", "deltas")
KEYFRAME, DELTA = KINDS
SIZES = ("num_layers", "batch_size", "num_kv_heads", "head_dim", "interval")
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
RAW = {"exact": None, "fp32": torch.float32, "fp16": torch.float16}  # None: the cache's own dtype
NAMES = (*RAW, "int4")
Take = Callable[[torch.dtype, tuple[int, ...]], Tensor]


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def taker(data: bytes) -> Take:
    """A function that takes the next tensor of a type and a shape off the front of ``data``, in memory of its own."""
    left = io.BytesIO(data)

    def take(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        piece = bytearray(left.read(math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(piece, dtype=dtype).reshape(shape) if piece else torch.empty(shape, dtype=dtype)

    return take


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class RawForm:
    """Values as they are, in ``stored``."""

    stored: torch.dtype
    tokens_per_row = 1

    def write(self, tensors: list[Tensor]) -> list[bytes]:
        """The bytes of each tensor's values."""
        return [_bytes(x.to(self.stored)) for x in tensors]

    def read(self, take: Take, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The inverse of ``write``, for one tensor."""
        return take(self.stored, shape).to(dtype)


@dataclass(frozen=True)
class CodedForm:
    """A codec's payloads. ``layout``: what all of them have in common, of ``payload_layout``."""

    codec: Codec
    layout: dict

    @property
    def tokens_per_row(self) -> int:
        """Tokens that the codec encodes together."""
        return self.codec.tokens_per_row

    def write(self, tensors: list[Tensor]) -> list[bytes]:
        """Of each tensor (all of one shape) the payload's tensors. They are encoded as one batch: a step of one token
        is many small tensors."""
        payload, size = self.codec.encode(torch.cat(tensors)), len(tensors[0])
        pieces = [payload.batch_select(range(i * size, (i + 1) * size)) for i in range(len(tensors))]
        return [b"".join(_bytes(piece.tensors[name]) for name in self.layout["tensors"]) for piece in pieces]

    def read(self, take: Take, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The inverse of ``write``, for one tensor. How many ragged pieces there are follows from the fields."""
        header, rows = self.layout["payload"], (shape[0], self.layout["heads"], shape[2] // self.tokens_per_row)
        specs = {name: (getattr(torch, kind), tuple(size)) for name, (kind, size) in self.layout["tensors"].items()}
        tensors = {name: take(specs[name][0], rows + specs[name][1]) for name in header["fields"]}
        if ragged := header.get("ragged"):
            counts = payload_from({**header, "ragged": []}, tensors).counts
            tensors |= {name: take(specs[name][0], (int(counts(name).sum()), *specs[name][1])) for name in ragged}
        return self.codec.decode(payload_from(header, tensors), dtype)


Form = RawForm | CodedForm


def payload_layout(payload: Payload) -> dict:
    """Describe what payloads of one codec have in common, as JSON: header, heads, each tensor's type and row shape."""
    header = payload.header()
    sizes = {name: payload.fields[name].shape[3:] for name in header["fields"]}
    sizes |= {name: payload.tensors[name].shape[1:] for name in header.get("ragged", ())}
    tensors = {name: [dtype_name(payload.tensors[name].dtype), list(size)] for name, size in sizes.items()}
    return {"payload": header, "heads": payload.shape[1], "tensors": tensors}


def _shares(forms: list[Form], tokens: int):
    """Who stores how many of the tokens, in their order: each its whole blocks of what is left."""
    for form in forms:
        whole = tokens - tokens % form.tokens_per_row
        if whole:
            yield form, whole
        tokens -= whole


@dataclass(frozen=True)
class StreamLayout:
    """Contents of a header. ``forms``: for each kind of step and each tensor (layer by layer, keys before values) who
    stores its whole blocks of tokens, then who stores what is left, and so on."""

    num_layers: int
    batch_size: int
    num_kv_heads: int
    head_dim: int
    interval: int
    dtype: torch.dtype
    forms: dict[str, list[list[Form]]]
    side_bytes: int

    @classmethod
    def parse(cls, data: bytes) -> "StreamLayout":
        """Read a header's bytes. Raises ``FormatError`` for one of another version."""
        end = 4 + int.from_bytes(data[:4], "little")
        meta = json.loads(data[4:end])
        if (meta["format"], meta["version"]) != (FORMAT, VERSION):
            raise FormatError(f"{meta['format']!r} version {meta['version']!r}; this vqkv reads {FORMAT} {VERSION}")
        states: list[dict[str, Tensor]] = [{} for _ in meta["codecs"]]
        for name, tensor in load_tensors(data[end:]).items():
            number, _, own = name.partition(".")
            states[int(number)][own] = tensor
        coded = [
            CodedForm(codec_from_config(about["config"], state), about["layout"])
            for about, state in zip(meta["codecs"], states, strict=True)
        ]
        exact, side_bytes = DTYPES[meta["dtype"]], sum(form.codec.side_bytes for form in coded)
        forms = _forms(meta, coded, exact)
        return cls(**{name: meta[name] for name in SIZES}, dtype=exact, forms=forms, side_bytes=side_bytes)

    @property
    def token_values(self) -> int:
        """Cached values of one token, all layers and the whole batch."""
        return 2 * self.num_layers * self.batch_size * self.num_kv_heads * self.head_dim

    def kind(self, number: int) -> str:
        """Of step ``number``, counted from 1."""
        return DELTA if number % self.interval else KEYFRAME

    def check(self, new: list[Tensor]) -> None:
        """Raise ``DataError`` unless these are one step's tensors."""
        shape = self._shape(new[0].shape[2] if new[0].ndim == 4 else 0)
        chains = (chain for kind in KINDS for chain in self.forms[kind])
        halved = any(form == RawForm(torch.float16) for chain in chains for form in chain)
        if len(new) != 2 * self.num_layers:
            raise DataError(f"{len(new) // 2} layers, but the stream has {self.num_layers}")
        for i, x in enumerate(new):
            if tuple(x.shape) != shape or x.dtype != self.dtype:
                raise DataError(
                    f"layer {i // 2} has {tuple(x.shape)} {dtype_name(x.dtype)}, expected {dtype_name(self.dtype)} "
                    f"(batch {shape[0]}, num_kv_heads {shape[1]}, new_tokens, head_dim {shape[3]}), all layers alike"
                )
            if check_values(x).abs().max() > FP16_MAX and halved:
                raise DataError(f"layer {i // 2} has values beyond fp16's {FP16_MAX:g}: store it in fp32")

    def _shape(self, tokens: int) -> tuple[int, int, int, int]:
        return self.batch_size, self.num_kv_heads, tokens, self.head_dim

    def encode(self, kind: str, tensors: list[Tensor]) -> bytes:
        """A step's bytes."""
        alike: dict[tuple, list[int]] = {}  # tensors that the same forms store are written together
        for i, forms in enumerate(self.forms[kind]):
            alike.setdefault(tuple(map(id, forms)), []).append(i)
        written = [b""] * len(tensors)
        for places in alike.values():
            for i, data in zip(places, _write(self.forms[kind][places[0]], [tensors[i] for i in places]), strict=True):
                written[i] = data
        return b"".join(written)

    def decode(self, kind: str, tokens: int, data: bytes) -> list[Tensor]:
        """The tensors of a step of so many tokens."""
        take, tensors = taker(data), []
        for forms in self.forms[kind]:
            parts = [form.read(take, self._shape(whole), self.dtype) for form, whole in _shares(forms, tokens)]
            tensors.append(torch.cat(parts, dim=2))
        return tensors


def _write(forms: list[Form], tensors: list[Tensor]) -> list[bytes]:
    """Each tensor's bytes: its whole blocks, then what is left of them, as ``_shares`` says."""
    written = [b""] * len(tensors)
    for form, whole in _shares(forms, tensors[0].shape[2]):
        parts = form.write([x[:, :, :whole] for x in tensors])
        written = [before + part for before, part in zip(written, parts, strict=True)]
        tensors = [x[:, :, whole:] for x in tensors]
    return written


def _forms(meta: dict, coded: list[CodedForm], exact: torch.dtype) -> dict[str, list[list[Form]]]:
    """Whole blocks as the header says; what is left of a keyframe as a delta; what is left then, exactly."""
    first = {}
    for kind in KINDS:
        stored = meta[kind]
        raw = None if isinstance(stored, list) else RawForm(RAW[stored] or exact)
        first[kind] = [raw] * 2 * meta["num_layers"] if raw else [coded[i] for i in stored]
    rest = RawForm(exact)
    deltas = [[delta, rest] for delta in first[DELTA]]
    return {
        KEYFRAME: [[whole, *after] for whole, after in zip(first[KEYFRAME], deltas, strict=True)],
        DELTA: deltas,
    }


def check_stored(stored):
    """``stored`` as the writer takes it: ``"int4"``, a name in ``RAW``, a codec, or a list over layers of codec pairs.
    Raises ``UnknownNameError`` for another name, ``DataError`` for anything else."""
    if isinstance(stored, str) and stored not in NAMES:
        raise UnknownNameError("way to store tokens", stored, NAMES, "Or pass codecs.")
    if isinstance(stored, str | Codec):
        return stored
    if isinstance(stored, Compressor):
        if stored.predictions:
            raise DataError("a stream has no predictors, as this compressor has: use one without them")
        stored = stored.codecs
    if not isinstance(stored, list | tuple) or not stored or not all(_is_pair(pair) for pair in stored):
        raise DataError("pass a codec, or a list over layers of (key codec, value codec)")
    return list(stored)


def _is_pair(pair) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(codec, Codec) for codec in pair)


def header_of(new: list[Tensor], stored: dict, interval: int) -> bytes:
    """A header's bytes, from the first step's tensors and what the writer was told to store. Raises ``DataError`` if
    codecs and tensors do not fit each other."""
    batch, heads, _, head_dim = check_values(new[0]).shape
    if new[0].dtype not in DTYPES.values():
        raise DataError(f"a cache in {dtype_name(new[0].dtype)}: store one in {', '.join(DTYPES)}")
    sizes = dict(zip(SIZES, (len(new) // 2, batch, heads, head_dim, interval), strict=True))
    int4 = Chain([Grouping(group_size=64, shrink="divisor")], AffineQuantizer(4), head_dim)
    int4.fit(new[0][:1, :, :1])  # it has nothing to learn
    codecs: dict[int, dict] = {}
    tensors: dict[str, Tensor] = {}
    spelled = {kind: _spell(int4 if stored[kind] == "int4" else stored[kind], new, codecs, tensors) for kind in KINDS}
    about = {"format": FORMAT, "version": VERSION, **sizes, "dtype": dtype_name(new[0].dtype), **spelled}
    about["id"] = os.urandom(8).hex()  # or a step of another stream that began alike could pass for this one's
    text = json.dumps(about | {"codecs": list(codecs.values())}).encode()
    return len(text).to_bytes(4, "little") + text + save_tensors(tensors)


def _spell(stored, new: list[Tensor], codecs: dict, tensors: dict) -> str | list[int]:
    """``stored`` as JSON: its name, or the number of the codec of each tensor. Describes each codec once."""
    if isinstance(stored, str):
        return stored
    flat = [stored] * len(new) if isinstance(stored, Codec) else [codec for pair in stored for codec in pair]
    if len(flat) != len(new):
        raise DataError(f"codecs of {len(flat) // 2} layers for a cache of {len(new) // 2}")
    for codec, x in zip(flat, new, strict=True):
        if id(codec) in codecs:
            continue
        if not codec.ready:
            raise DataError(f"a {type(codec).__name__} that is not fitted: call fit(x)")
        state = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in codec.state_dict().items()}
        config, probe = codec.config(), x[:1, :, :1].repeat(1, 1, codec.tokens_per_row, 1)
        layout = payload_layout(codec_from_config(config, dict(state)).encode(probe))
        tensors |= {f"{len(codecs)}.{name}": tensor for name, tensor in state.items()}
        codecs[id(codec)] = {"config": config, "layout": layout}
    order = list(codecs)
    return [order.index(id(codec)) for codec in flat]
