"""A step of a snapshot stream <-> bytes: what the header record says, and the tensors that follow from it."""

import json
import math
import os
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vqkv.codec.base import FP16_MAX, Codec, check_values, codec_from_config
from vqkv.codec.payload import Payload, payload_from
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.presets import quanto

FORMAT, VERSION = "vqkv-snapshots", 1
HEADER, KEYFRAME, DELTA = 1, 2, 3
ROLES = {KEYFRAME: "keyframes", DELTA: "deltas"}
SIZES = ("num_layers", "batch_size", "num_kv_heads", "head_dim", "interval")
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
STORED = DTYPES | {name: getattr(torch, name) for name in ("uint8", "int8", "int16", "int32", "int64")}
RAW = {"exact": None, "fp32": torch.float32, "fp16": torch.float16}  # None: the cache's own dtype
NAMES = (*RAW, "int4")
VALUES_PER_BYTE = 64  # no codec stores less than 1/8 bit a value, so a record cannot stand for more
MAX_LAYERS = 4096  # in a file that has not as many bytes
ROOM = 64 << 20  # bytes that matrices of a header's codecs may take, however small the file
BROKEN = (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def check_stored(stored):
    """``stored`` as the writer takes it: ``"int4"``, a name in ``RAW``, a codec, or a list over layers of codec pairs.

    Raises ``UnknownNameError`` for another name, ``DataError`` for anything else."""
    if isinstance(stored, str):
        if stored not in NAMES:
            raise UnknownNameError("way to store tokens", stored, NAMES, "Or pass codecs.")
        return stored
    if isinstance(stored, Codec):
        return stored
    if not isinstance(stored, list | tuple) or not stored or not all(_is_pair(pair) for pair in stored):
        raise DataError("pass a codec, or a list over layers of (key codec, value codec)")
    return list(stored)


def _is_pair(pair) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(codec, Codec) for codec in pair)


class Cursor:
    """Takes tensors off the front of ``data``, never more than it holds."""

    def __init__(self, data: bytes):
        self.data, self.at = memoryview(data), 0

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The next tensor, in memory of its own. Raises ``FormatError`` if ``data`` is too short."""
        size = math.prod(shape) * dtype.itemsize
        if min(shape) < 0 or size > len(self.data) - self.at:
            raise FormatError(f"a tensor {shape} takes {size} bytes, {len(self.data) - self.at} are left")
        piece = bytearray(self.data[self.at : self.at + size])
        self.at += size
        return torch.frombuffer(piece, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Raw:
    """Values as they are, in ``stored``."""

    stored: torch.dtype
    tokens_per_row = 1

    def write(self, x: Tensor) -> bytes:
        """The values' bytes."""
        return _bytes(x.to(self.stored))

    def read(self, cursor: Cursor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The inverse."""
        return cursor.take(self.stored, shape).to(dtype)


@dataclass(frozen=True)
class Coded:
    """A codec's payloads. ``layout``: what all of them have in common, see ``payload_layout``."""

    codec: Codec
    layout: dict

    @property
    def tokens_per_row(self) -> int:
        """Tokens that the codec encodes together."""
        return self.codec.tokens_per_row

    def write(self, x: Tensor) -> bytes:
        """The payload's tensors in the order of their names, fields first."""
        payload = self.codec.encode(x)
        if payload_layout(payload) != self.layout:
            raise DataError(f"this codec's payload {payload_layout(payload)} is not always laid out as {self.layout}")
        return b"".join(_bytes(payload.tensors[name]) for name in self.layout["tensors"])

    def read(self, cursor: Cursor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The inverse. How many ragged pieces there are follows from the fields."""
        header, rows = self.layout["payload"], (shape[0], self.layout["heads"], shape[2] // self.tokens_per_row)
        specs = {name: (STORED[kind], tuple(size)) for name, (kind, size) in self.layout["tensors"].items()}
        tensors = {name: cursor.take(specs[name][0], rows + specs[name][1]) for name in header["fields"]}
        if header.get("ragged"):
            counts = payload_from({**header, "ragged": []}, tensors).counts
            for name in header["ragged"]:
                kind, size = specs[name]
                tensors[name] = cursor.take(kind, (int(counts(name).sum()), *size))
        x = self.codec.decode(payload_from(header, tensors), dtype)
        if x.shape != shape:
            raise FormatError(f"a payload of {tuple(x.shape)} where the stream has {shape}")
        return x


def payload_layout(payload: Payload) -> dict:
    """What any payload of one codec has in common, as JSON: its header, heads, and each tensor's type and row shape."""
    header = payload.header()
    sizes = {name: payload.fields[name].shape[3:] for name in header["fields"]}
    sizes |= {name: payload.tensors[name].shape[1:] for name in header.get("ragged", ())}
    tensors = {name: [dtype_name(payload.tensors[name].dtype), list(size)] for name, size in sizes.items()}
    return {"payload": header, "heads": payload.shape[1], "tensors": tensors}


@dataclass(frozen=True)
class Layout:
    """What the header record says. ``forms``: for each kind of record and each tensor (layer by layer, keys before
    values) who stores its whole blocks of tokens, then who stores what is left, and so on."""

    num_layers: int
    batch_size: int
    num_kv_heads: int
    head_dim: int
    interval: int
    dtype: torch.dtype
    forms: dict[int, list[list[Raw | Coded]]]
    side_bytes: int

    @classmethod
    def parse(cls, data: bytes, file_size: int) -> "Layout":
        """From a header record's contents. Raises ``FormatError`` for one that this version does not understand."""
        try:
            end = 4 + int.from_bytes(data[:4], "little")
            meta = json.loads(data[4:end])
            if (meta["format"], meta["version"]) != (FORMAT, VERSION):
                raise FormatError(f"{meta['format']!r} version {meta['version']!r}; this vqkv reads {FORMAT} {VERSION}")
            sizes = {name: _size(meta, name) for name in SIZES}
            _check_room(meta, file_size)
            coded = _codecs(meta["codecs"], load_tensors(data[end:]))
            exact = DTYPES[meta["dtype"]]
            forms = _forms(meta, coded, exact, 2 * sizes["num_layers"])
            side_bytes = sum(form.codec.side_bytes for form in coded)
            return cls(**sizes, dtype=exact, forms=forms, side_bytes=side_bytes)
        except BROKEN as error:
            raise FormatError(f"no valid header of a snapshot stream: {error}") from error

    @property
    def token_values(self) -> int:
        """Cached values of one token, all layers and the whole batch."""
        return 2 * self.num_layers * self.batch_size * self.num_kv_heads * self.head_dim

    def kind(self, number: int) -> int:
        """Of the record of step ``number``, counted from 1."""
        return DELTA if number % self.interval else KEYFRAME

    def exact(self, kind: int) -> bool:
        """Whether records of this kind keep every bit."""
        kept = (self.dtype, torch.float32)
        return all(isinstance(first, Raw) and first.stored in kept for first, *_ in self.forms[kind])

    def numbered(self, records):
        """``records`` with their ``seq_len``. Raises ``FormatError`` for a sequence that no writer writes."""
        seq_len = 0
        for number, record in enumerate(records, 1):
            before, seq_len = seq_len, record.tokens + (seq_len if record.kind == DELTA else 0)
            enough = record.tokens * self.token_values <= VALUES_PER_BYTE * record.length
            if record.kind != self.kind(number) or seq_len <= before or not enough:
                raise FormatError(f"step {number}, at byte {record.offset}, does not follow from those before it")
            yield record._replace(seq_len=seq_len)

    def check(self, new: list[Tensor]) -> None:
        """Raise ``DataError`` unless these are one step's tensors."""
        shape = self._shape(new[0].shape[2] if new[0].ndim == 4 else 0)
        halved = any(form == Raw(torch.float16) for chains in self.forms.values() for chain in chains for form in chain)
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

    def encode(self, kind: int, tensors: list[Tensor]) -> bytes:
        """A step's contents."""
        return b"".join(part for forms, x in zip(self.forms[kind], tensors, strict=True) for part in _write(forms, x))

    def decode(self, kind: int, tokens: int, data: bytes) -> list[Tensor]:
        """The inverse. Raises one of ``BROKEN`` for contents that do not fit."""
        cursor, tensors = Cursor(data), []
        for forms in self.forms[kind]:
            parts, left = [], tokens
            for form in forms:
                whole, left = left - left % form.tokens_per_row, left % form.tokens_per_row
                if whole:
                    parts.append(form.read(cursor, self._shape(whole), self.dtype))
            tensors.append(torch.cat(parts, dim=2))
        if cursor.at != len(data):
            raise FormatError(f"{len(data) - cursor.at} bytes too many")
        return tensors


def _write(forms: list[Raw | Coded], x: Tensor):
    for form in forms:
        whole = x.shape[2] - x.shape[2] % form.tokens_per_row
        if whole:
            yield form.write(x[:, :, :whole])
        x = x[:, :, whole:]


def header_of(new: list[Tensor], stored: dict, interval: int) -> bytes:
    """A header record's contents, from the first step's tensors and what the writer was told to store.

    Raises ``DataError`` if codecs and tensors do not fit each other."""
    batch, heads, _, head_dim = check_values(new[0]).shape
    if new[0].dtype not in DTYPES.values():
        raise DataError(f"a cache in {dtype_name(new[0].dtype)}: store one in {', '.join(DTYPES)}")
    sizes = dict(zip(SIZES, (len(new) // 2, batch, heads, head_dim, interval), strict=True))
    int4 = quanto(4).key_codec(head_dim).fit(new[0][:1, :, :1])  # it has nothing to learn
    stored = {kind: int4 if what == "int4" else what for kind, what in stored.items()}
    codecs: dict[int, dict] = {}
    tensors: dict[str, Tensor] = {}
    spelled = {ROLES[kind]: _spell(what, new, codecs, tensors) for kind, what in stored.items()}
    about = {"format": FORMAT, "version": VERSION, **sizes, "dtype": dtype_name(new[0].dtype), **spelled}
    about["id"] = os.urandom(8).hex()  # or a record of another stream that began alike could pass for this one's
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
        if id(codec) not in codecs:
            state, config = _state(codec), codec.config()
            probe = x[:1, :, :1].repeat(1, 1, codec.tokens_per_row, 1)
            layout = payload_layout(codec_from_config(config, dict(state)).encode(probe))
            tensors |= {f"{len(codecs)}.{name}": tensor for name, tensor in state.items()}
            codecs[id(codec)] = {"config": config, "layout": layout}
    order = list(codecs)
    return [order.index(id(codec)) for codec in flat]


def _state(codec: Codec) -> dict[str, Tensor]:
    if not codec.ready:
        raise DataError(
            f"a {type(codec).__name__} that is not fitted: call fit(x), or partial_fit(x) and then finalize()"
        )
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in codec.state().items()}


def _forms(meta: dict, coded: list[Coded], exact: torch.dtype, count: int) -> dict[int, list[list[Raw | Coded]]]:
    first = {}
    for kind, name in ROLES.items():
        stored = meta[name]
        numbers = stored if isinstance(stored, list) else []
        if numbers and (len(numbers) != count or any(type(i) is not int or i < 0 for i in numbers)):
            raise FormatError(f"{name} names {len(numbers)} codecs for {count} tensors")
        first[kind] = [coded[i] for i in numbers] or [Raw(RAW[stored] or exact)] * count
    forms = {KEYFRAME: zip(first[KEYFRAME], first[DELTA], strict=True), DELTA: zip(first[DELTA], strict=True)}
    return {kind: [[*chain, Raw(exact)] for chain in chains] for kind, chains in forms.items()}


def _codecs(described: list[dict], tensors: dict[str, Tensor]) -> list[Coded]:
    states: list[dict[str, Tensor]] = [{} for _ in described]
    for name, tensor in tensors.items():
        number, _, own = name.partition(".")
        states[int(number)][own] = tensor
    coded = []
    for about, state in zip(described, states, strict=True):
        shapes = [size for kind, size in about["layout"]["tensors"].values()]
        if not all(type(n) is int and n > 0 for n in [about["layout"]["heads"], *(n for size in shapes for n in size)]):
            raise FormatError("a layout with sizes that are not positive whole numbers")
        coded.append(Coded(codec_from_config(about["config"], state), about["layout"]))
    return coded


def _size(meta: dict, name: str) -> int:
    if type(meta[name]) is not int or not 0 < meta[name] < 1 << 40:
        raise FormatError(f"{name} is {meta[name]!r}")
    return meta[name]


def _check_room(meta: dict, file_size: int) -> None:
    """Raise ``FormatError`` if codecs as they are described would build matrices far larger than the file."""
    largest = max([1, *_settings(meta["codecs"], ("head_dim", "num_kv_heads"))])
    count = len(meta["codecs"])
    if count * largest * largest * 4 > max(ROOM, 10 * file_size) or meta["num_layers"] > max(MAX_LAYERS, file_size):
        raise FormatError(
            f"{count} codecs of size {largest}, {meta['num_layers']} layers: too many for so small a file"
        )


def _settings(config, names: tuple[str, ...]):
    """Whole numbers under these names, at any depth."""
    if isinstance(config, dict):
        yield from (value for name, value in config.items() if name in names and isinstance(value, int))
        config = list(config.values())
    if isinstance(config, list):
        for inner in config:
            yield from _settings(inner, names)
