"""A step of a snapshot stream <-> bytes: what the header record says, and the tensors that follow from it."""

import json
import os
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vqkv.codec.base import Codec, codec_from_config
from vqkv.codec.checks import FP16_MAX, check_values
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.presets import quanto
from vqkv.snapshot_forms import DTYPES, Coded, Cursor, Raw, check_growth, dtype_name, payload_layout, shares

FORMAT, VERSION = "vqkv-snapshots", 1
HEADER, KEYFRAME, DELTA = 1, 2, 3
ROLES = {KEYFRAME: "keyframes", DELTA: "deltas"}
SIZES = ("num_layers", "batch_size", "num_kv_heads", "head_dim", "interval")
RAW = {"exact": None, "fp32": torch.float32, "fp16": torch.float16}  # None: the cache's own dtype
NAMES = (*RAW, "int4")
MAX_LAYERS = 4096  # in a file that has not as many bytes
ROOM = 64 << 20  # bytes that matrices of a header's codecs may take, however small the file
BROKEN = (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


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
    if any(codec.stores_residuals for pair in stored for codec in pair):
        raise DataError(
            "these codecs were fitted to what a compressor's predictors leave, and a stream has no predictors: use a "
            "compressor without them"
        )
    return list(stored)


def _is_pair(pair) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(codec, Codec) for codec in pair)


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
            for form in coded:
                check_growth(form, (1, sizes["num_kv_heads"], form.tokens_per_row, sizes["head_dim"]))
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
            follows = record.kind == self.kind(number) and seq_len > before
            if not follows or record.length < self._least_bytes(record.kind, record.tokens):
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
        alike: dict[tuple, list[int]] = {}  # tensors that the same forms store are written together
        for i, forms in enumerate(self.forms[kind]):
            alike.setdefault(tuple(map(id, forms)), []).append(i)
        written = [b""] * len(tensors)
        for places in alike.values():
            for i, data in zip(places, _write(self.forms[kind][places[0]], [tensors[i] for i in places]), strict=True):
                written[i] = data
        return b"".join(written)

    def decode(self, kind: int, tokens: int, data: bytes) -> list[Tensor]:
        """The inverse. Raises one of ``BROKEN`` for contents that do not fit."""
        cursor, tensors = Cursor(data), []
        for forms in self.forms[kind]:
            parts = [form.read(cursor, self._shape(whole), self.dtype) for form, whole in shares(forms, tokens)]
            tensors.append(torch.cat(parts, dim=2))
        if cursor.at != len(data):
            raise FormatError(f"{len(data) - cursor.at} bytes too many")
        return tensors

    def _least_bytes(self, kind: int, tokens: int) -> int:
        """What no record of so many tokens falls short of."""
        pairs = (pair for forms in self.forms[kind] for pair in shares(forms, tokens))
        return sum(form.least_bytes(self._shape(whole)) for form, whole in pairs)


def _write(forms: list[Raw | Coded], tensors: list[Tensor]) -> list[bytes]:
    """Each tensor's bytes: its whole blocks, then what is left of them, as ``shares`` says."""
    written = [b""] * len(tensors)
    for form, whole in shares(forms, tensors[0].shape[2]):
        parts = form.write([x[:, :, :whole] for x in tensors])
        written = [before + part for before, part in zip(written, parts, strict=True)]
        tensors = [x[:, :, whole:] for x in tensors]
    return written


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
    rest = Raw(exact)
    return {kind: [[*chain, rest] for chain in chains] for kind, chains in forms.items()}


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
