"""Keyframe + delta streams of a growing KV cache, as files: what page 05 weighs.

The VQ quality framework's temporal state compression (section 1): the cache is snapshotted at every step. Every
``interval`` steps, counted from 1, all of it is written, in between only the tokens that the step appended.

File: ``MAGIC``, then a record for the header and one for each step: three little-endian words (length, tokens, CRC32)
and ``length`` bytes. The header is one safetensors blob: the codecs' learned tensors and, as ``header``, JSON. A step
is the tensors of its payloads: their sizes follow from the codecs and the number of tokens.
"""

import io
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vqkv import presets
from vqkv.codecs.base import Codec
from vqkv.codecs.exact import Fp16
from vqkv.codecs.part import codec_from_config
from vqkv.codecs.payload import Payload
from vqkv.errors import FormatError
from vqkv.runtime.files import claim, raw_bytes

MAGIC = b"vqkvsnp3"
WORDS = struct.Struct("<3Q")
KINDS = KEYFRAME, DELTA = ("keyframes", "deltas")


@dataclass(eq=False)
class Verbatim(Fp16):
    """Values as they are in ``dtype``."""

    dtype: str = "float32"

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"values": x.to(getattr(torch, self.dtype))})


@dataclass(frozen=True)
class Layout:
    """Contents of a header. ``keyframes`` and ``deltas``: which of ``codecs`` each tensor of such a step goes through,
    layer by layer, keys before values; ``id`` distinguishes the stream from others that begin alike."""

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
    def of(cls, new: list[Tensor], keyframes, deltas, interval: int) -> "Layout":
        """Make the layout of a stream of tensors like ``new``."""
        batch, heads, _, head_dim = new[0].shape
        chosen = [_codecs(stored, new) for stored in (keyframes, deltas)]
        codecs = {id(codec): codec for own in chosen for codec in own}
        numbers = [[list(codecs).index(id(codec)) for codec in own] for own in chosen]
        sizes = len(new) // 2, batch, heads, head_dim, interval
        dtype = str(new[0].dtype).removeprefix("torch.")
        return cls(*sizes, *numbers, dtype, list(codecs.values()), os.urandom(8).hex())

    @classmethod
    def parse(cls, data: bytes) -> "Layout":
        """Read a header's bytes."""
        tensors = load_tensors(data)
        about = json.loads(raw_bytes(tensors.pop("header")).tobytes())
        codecs = [codec_from_config(config, claim(tensors, f"{i}.")) for i, config in enumerate(about["codecs"])]
        return cls(**about | {"codecs": codecs})

    def header(self) -> bytes:
        """Make the bytes that ``parse`` reads."""
        about = vars(self) | {"codecs": [codec.config() for codec in self.codecs]}
        tensors = {
            f"{i}.{name}": x.detach().to("cpu", copy=True).contiguous()
            for i, codec in enumerate(self.codecs)
            for name, x in codec.state_dict().items()
        }
        text = bytearray(json.dumps(about).encode())
        return save_tensors(tensors | {"header": torch.frombuffer(text, dtype=torch.uint8)})

    def kind(self, number: int) -> str:
        """Of step ``number``, counted from 1."""
        return DELTA if number % self.interval else KEYFRAME

    def encode(self, kind: str, tensors: list[Tensor]) -> bytes:
        """Make a step's bytes."""
        pieces = []
        for codec, places in self._shares(kind):
            payload = codec.encode(torch.cat([tensors[i] for i in places]))
            for group in (payload.fields, payload.ragged):
                pieces += [raw_bytes(x) for _, x in sorted(group.items())]
        return b"".join(pieces)

    def decode(self, kind: str, tokens: int, data: bytes) -> list[Tensor]:
        """Read the tensors of a step of so many tokens."""
        left, found, dtype = io.BytesIO(data), {}, getattr(torch, self.dtype)
        for codec, places in self._shares(kind):
            payload = self._read(left, codec, self.batch_size * len(places), tokens)
            found |= zip(places, codec.decode(payload, dtype).split(self.batch_size), strict=True)
        return [found[i] for i in range(2 * self.num_layers)]

    def _shares(self, kind: str) -> Iterator[tuple[Codec, list[int]]]:
        """A codec and its tensors, which are stored as one batch: a step of one token is many small ones."""
        numbers = getattr(self, kind)
        for number in dict.fromkeys(numbers):
            yield self.codecs[number], [i for i, other in enumerate(numbers) if other == number]

    def _read(self, left: io.BytesIO, codec: Codec, batch_size: int, tokens: int) -> Payload:
        """The next payload, of the shapes and types of one that the codec makes of zeros."""

        def take(x: Tensor, *shape: int) -> Tensor:
            piece = bytearray(left.read(math.prod(shape) * x.dtype.itemsize))
            return torch.frombuffer(piece, dtype=x.dtype).reshape(shape) if piece else x.new_empty(shape)

        like = codec.encode(torch.zeros(1, self.num_kv_heads, codec.tokens_per_row, self.head_dim))
        rows = tokens // codec.tokens_per_row
        fields = {n: take(x, batch_size, x.shape[1], rows, *x.shape[3:]) for n, x in sorted(like.fields.items())}
        counts = replace(like, fields=fields, ragged={}).counts
        ragged = {n: take(x, int(counts(n).sum()), *x.shape[1:]) for n, x in sorted(like.ragged.items())}
        return replace(like, fields=fields, ragged=ragged)


def _codecs(stored, new: list[Tensor]) -> list[Codec]:
    """The codec of each tensor of a step."""
    head_dim = new[0].shape[-1]
    if stored == "int4":
        stored = presets.quanto(4).key_codec(head_dim).fit(new[0][:1, :, :1])  # it has nothing to learn
    elif isinstance(stored, str):
        exact = str(new[0].dtype).removeprefix("torch.")
        stored = Verbatim(head_dim, {"fp32": "float32", "exact": exact}[stored])
    return [stored] * len(new) if isinstance(stored, Codec) else [codec for pair in stored for codec in pair]


def write_stream(path, live: list[list[Tensor]], keyframes="fp32", deltas="int4", interval: int = 64) -> None:
    """Write a cache, keys and values over layers (batch, num_kv_heads, seq_len, head_dim), as it grows: a token a step.

    ``keyframes`` and ``deltas`` are each ``"exact"`` (bit for bit, in the cache's dtype), ``"fp32"``, ``"int4"`` (4-bit
    affine, the codec of ``presets.quanto(4)``), one fitted codec for everything, or a list over layers of (key codec,
    value codec) such as ``Compressor.codecs``. The defaults are the source's. ``interval``: steps per keyframe.
    """
    tensors = [x.detach().cpu() for pair in zip(*live, strict=True) for x in pair]
    layout, crc = Layout.of(tensors, keyframes, deltas, interval), 0
    with open(path, "wb") as file:
        file.write(MAGIC)
        for number in range(tensors[0].shape[2] + 1):
            kind = layout.kind(number)
            tokens = number if kind == KEYFRAME else 1  # the header's are 0
            new = [x[:, :, number - tokens : number] for x in tensors]
            contents = layout.encode(kind, new) if number else layout.header()
            crc = _checksum(crc, tokens, contents)
            file.write(WORDS.pack(len(contents), tokens, crc) + contents)


class SnapshotReader:
    """Reads any snapshot of a stream back: ``len()`` steps, of caches as ``layout`` describes them. Raises
    ``FormatError`` for a file that was cut or altered."""

    def __init__(self, path):
        data, crc, end, self._records = Path(path).read_bytes(), 0, len(MAGIC), []
        while end + WORDS.size <= len(data):
            length, tokens, found = WORDS.unpack_from(data, end)
            end += WORDS.size + length
            self._records.append((tokens, data[end - length : end]))  # the header's, then step 1's
            crc = _checksum(crc, *self._records[-1])
            if crc != found or end > len(data):
                raise FormatError(f"{path} was cut or altered, or is no stream")
        self.layout, self.file_bytes = Layout.parse(self._records[0][1]), end

    def __len__(self) -> int:
        return len(self._records) - 1

    def state(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """(keys, values), lists over layers of (batch, num_kv_heads, seq_len, head_dim) in the stream's dtype: the
        cache after ``step``, counted from 0."""
        last, interval = step + 1, self.layout.interval
        numbers = range(max(1, last - last % interval), last + 1)
        parts = [self.layout.decode(self.layout.kind(number), *self._records[number]) for number in numbers]
        whole = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
        return whole[0::2], whole[1::2]

    def report(self) -> dict:
        """Bytes on disk by kind, and ratios, header apart, against every snapshot in fp32, the source's baseline, and
        the last one alone in fp16, the cache that a server really holds."""
        about, written, seq_len, every = self.layout, dict.fromkeys(KINDS, 0), 0, 0
        for number, (tokens, contents) in enumerate(self._records[1:], 1):
            kind = about.kind(number)
            written[kind] += len(contents)
            seq_len = tokens + (seq_len if kind == DELTA else 0)
            every += seq_len
        values = 2 * about.num_layers * about.batch_size * about.num_kv_heads * about.head_dim  # of one token
        header = len(self._records[0][1])
        baselines = {"every_fp32": every * values * 4, "live_fp16": seq_len * values * 2}
        return {
            "keyframe_bytes": written[KEYFRAME],
            "delta_bytes": written[DELTA],
            "header_bytes": header,
            "side_bytes": sum(codec.side_bytes for codec in about.codecs),
            "file_bytes": self.file_bytes,
            **{f"{name}_bytes": count for name, count in baselines.items()},
            **{f"ratio_{name}": count / (self.file_bytes - header) for name, count in baselines.items()},
        }


def _checksum(before: int, tokens: int, contents: bytes) -> int:
    """CRC32 of a record; ``before``: that of the one before it."""
    return zlib.crc32(contents, zlib.crc32(WORDS.pack(len(contents), tokens, before)))
