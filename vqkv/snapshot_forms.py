"""Who stores tokens in a snapshot stream: raw values, or a codec's payloads, as tensors one after the other."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.base import Codec
from vqkv.codec.payload import Payload, payload_from
from vqkv.errors import DataError, FormatError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
STORED = DTYPES | {name: getattr(torch, name) for name in ("uint8", "int8", "int16", "int32", "int64")}
VALUES_PER_BYTE = 1 << 15  # that a codec may make of a row's fields: what a reader allocates is in proportion to a file


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


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

    def write(self, tensors: list[Tensor]) -> list[bytes]:
        """The bytes of each tensor's values."""
        return [_bytes(x.to(self.stored)) for x in tensors]

    def least_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that values of this shape take, whatever they are."""
        return math.prod(shape) * self.stored.itemsize

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

    def write(self, tensors: list[Tensor]) -> list[bytes]:
        """Of each tensor (all of one shape) the payload's tensors in the order of their names, fields first. They are
        encoded as one batch: a step of one token is many small tensors."""
        payload, size = self.codec.encode(torch.cat(tensors)), len(tensors[0])
        if payload_layout(payload) != self.layout:
            raise DataError(f"this codec's payload {payload_layout(payload)} is not always laid out as {self.layout}")
        pieces = [payload.batch_select(range(i * size, (i + 1) * size)) for i in range(len(tensors))]
        return [b"".join(_bytes(piece.tensors[name]) for name in self.layout["tensors"]) for piece in pieces]

    def least_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the fields alone; ragged tensors may be empty."""
        specs = (self.layout["tensors"][name] for name in self.layout["payload"]["fields"])
        row = sum(STORED[kind].itemsize * math.prod(size) for kind, size in specs)
        return shape[0] * self.layout["heads"] * (shape[2] // self.tokens_per_row) * row

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


def shares(forms: list[Raw | Coded], tokens: int):
    """Who stores how many of the tokens, in their order: each its whole blocks of what is left."""
    for form in forms:
        whole = tokens - tokens % form.tokens_per_row
        if whole:
            yield form, whole
        tokens -= whole


def check_growth(form: Coded, row: tuple[int, int, int, int]) -> None:
    """Raise ``FormatError`` if a few bytes could stand for any number of values: of one row, a block of tokens."""
    if math.prod(row) > VALUES_PER_BYTE * form.least_bytes(row):
        raise FormatError(
            f"a codec that may store {row[2]} tokens of {row[1]} x {row[3]} values in {form.least_bytes(row)} bytes, "
            f"more than {VALUES_PER_BYTE} values a byte: use smaller blocks of tokens"
        )
