"""Pieces of a chain: stages, which can be undone, and a quantizer at the end."""

import math

import torch
from torch import Tensor

from vqkv.codecs.packing import check_packed, pack, unpack
from vqkv.codecs.part import Part
from vqkv.codecs.payload import Payload, payload_field
from vqkv.errors import DataError
from vqkv.kernels import Packed, lookup

MAX_ROW = 1 << 24  # values of a row, all heads: an altered config must not make us allocate more
Side = dict[str, Tensor]


class Stage(Part):
    """An invertible step on rows: (batch, num_kv_heads, rows, *row_shape) -> the same with another row shape.

    Shapes that ``build`` takes and returns are (num_kv_heads, *row_shape). ``side_fields`` names what a stage stores
    per row. A stage that folds tokens into rows sets ``tokens_per_row``.
    """

    side_fields: tuple[str, ...] = ()
    tokens_per_row: int = 1
    weighted: bool = False  # whether it wants to be told what errors cost, by ``weigh``

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows of this shape and return the shape of rows going out. Raises ``DataError`` if impossible."""
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch; nothing to learn by default."""

    def finalize(self) -> None:
        """Freeze what was learned; nothing by default."""

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Rows going out, and what must be stored per row to come back."""
        raise NotImplementedError

    def decode(self, y: Tensor, side: Side) -> Tensor:
        """The inverse of ``encode``, up to what the quantizer lost. May overwrite y, and return a view of it."""
        raise NotImplementedError

    def decode_into(self, y: Tensor, side: Side, out: Tensor) -> None:
        """``decode``, written to ``out`` of any strides. May overwrite y."""
        out.copy_(self.decode(y, side))

    def packed(self, inner: Packed, side: Side) -> Packed | None:
        """Tell kernels of rows before this stage, from what they are told of rows after it; None if they
        cannot undo it."""
        return None

    def inner_view(self, out: Tensor) -> Tensor | None:
        """``out``, memory for what ``decode`` gives, as a view in the shape of what it takes; None if decoding is more
        than a change of shape."""
        return None


class Quantizer(Part):
    """Rows of values -> integer codes (batch, num_kv_heads, rows, codes_per_row) and back.

    ``store`` and ``load`` keep the codes of a row as one packed bit string, and in ``side_fields`` what else a row
    takes. ``load`` hands codes to ``decode`` as ``code_dtype``, or looks them up in ``table``, what every byte of codes
    stands for (``kernels.by_byte``), where there is one.
    """

    code_bits: int
    codes_per_row: int
    row_shape: tuple[int, ...]  # of the values of a row
    code_dtype: torch.dtype = torch.int32
    side_fields: tuple[str, ...] = ()

    def __new__(cls, *args, **kwargs):
        part = super().__new__(cls)
        part.register_buffer("table", None, persistent=False)
        return part

    def build(self, shape: tuple[int, ...]) -> None:
        """Prepare for rows of shape (num_kv_heads, *row_shape), by default with a code for each value. Raises
        ``DataError`` if impossible."""
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape)

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch; nothing to learn by default."""

    def finalize(self) -> None:
        """Freeze what was learned; nothing by default."""

    def encode(self, x: Tensor) -> Tensor:
        """Codes, of any integer type."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """Values in float32, in memory of their own, for codes of any integer type."""
        raise NotImplementedError

    def encode_packed(self, y: Tensor) -> Tensor:
        """Codes of each row as one bit string: uint8 (batch, num_kv_heads, rows, bytes)."""
        return pack(self.encode(y), self.code_bits)

    def store(self, y: Tensor) -> Payload:
        """Rows of values as a payload."""
        return Payload({"codes": self.encode_packed(y)})

    def load(self, payload: Payload) -> Tensor:
        """The inverse. Raises ``FormatError`` for another quantizer's payload."""
        packed = payload_field(payload, "codes")
        if self.table is None:
            return self.decode(unpack(packed, self.code_bits, self.codes_per_row, self.code_dtype))
        check_packed(packed, self.code_bits, self.codes_per_row)
        found, values = lookup(packed, self.table), math.prod(self.row_shape)
        found = found if found.shape[-1] == values else found[..., :values].contiguous()
        return found.unflatten(-1, self.row_shape)

    def load_into(self, payload: Payload, out: Tensor) -> None:
        """``load``, written to ``out`` of any strides."""
        out.copy_(self.load(payload))

    def loads_directly(self, out: Tensor) -> bool:
        """True if ``load_into`` memory like ``out`` takes none beside it."""
        return False

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        """Rows y as ``load`` would give them after ``store``, also before ``finalize``."""
        return self.decode(self.encode(y))

    def packed(self, payload: Payload) -> Packed | None:
        """Stored codes as kernels read them; None if they cannot read them."""
        return None

    def apart(self) -> tuple[list[Stage], "Quantizer"]:
        """Stages and a quantizer of bare codes that together do the same: for who stores codes in another way."""
        return [], self

    def rates(self, y: Tensor) -> Tensor:
        """Trade-off of more or fewer bits, for a quantizer that was fitted: float64 (n, 2), bits a value and mean
        squared error of rows y, fewest bits first. Raises ``DataError`` for one whose bits cannot be chosen."""
        raise DataError(f"{type(self).__name__} cannot trade bits for error: use EntropyCodedScalar or ResidualVQ")

    def with_bits(self, bits: float) -> "Quantizer":
        """An unfitted one like this, with one of the bits that ``rates`` names."""
        raise DataError(f"{type(self).__name__} cannot be given {bits} bits: use EntropyCodedScalar or ResidualVQ")
