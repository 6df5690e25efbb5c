"""What a chain is made of: stages, which can be undone, and a quantizer at the end."""

import torch
from torch import Tensor

from vqkv.codec.packing import check_packed, pack, unpack
from vqkv.codec.part import Part
from vqkv.codec.payload import Payload, payload_field
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

    def decodes_codes(self, quantizer: "Quantizer", out: Tensor) -> bool:
        """Whether ``decode_codes`` does, for memory like ``out``."""
        return False

    def decode_codes(self, quantizer: "Quantizer", payload: Payload, side: Side, out: Tensor) -> bool:
        """``decode_into`` of what ``quantizer`` loads from ``payload``, if a kernel does both in one; else False, and
        nothing is done."""
        return False

    def packed(self, inner: Packed, side: Side) -> Packed | None:
        """What kernels are told of rows before this stage, from what they are told of rows after it; None if they
        cannot undo it."""
        return None

    def encode_codes(self, quantizer: "Quantizer", x: Tensor) -> tuple[Payload, Side] | None:
        """What ``quantizer`` stores of what ``encode`` gives, and the side, if a kernel does both in one; else None,
        and nothing is done."""
        return None

    def place(self, out: Tensor) -> Tensor | None:
        """``out``, memory for what ``decode`` gives, as a view in the shape of what it takes; None if decoding is more
        than a change of shape."""
        return None


class Quantizer(Part):
    """Rows of values -> integer codes (batch, num_kv_heads, rows, codes_per_row) and back.

    ``store`` and ``load`` keep the codes of a row as one packed bit string; what stores them otherwise overrides both.
    ``load`` hands codes to ``decode`` as ``code_dtype``.
    """

    code_bits: int
    codes_per_row: int
    row_shape: tuple[int, ...] | None = None  # of what ``load`` gives, where a stage may decode codes in its place
    code_dtype: torch.dtype = torch.int32

    def build(self, shape: tuple[int, ...]) -> None:
        """Prepare for rows of shape (num_kv_heads, *row_shape): sets ``codes_per_row``. Raises ``DataError`` if
        impossible."""
        raise NotImplementedError

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

    def store(self, y: Tensor) -> Payload:
        """Rows of values as a payload."""
        return Payload({"codes": self.encode_packed(y)})

    def encode_packed(self, y: Tensor) -> Tensor:
        """Codes of each row as one bit string: uint8 (batch, num_kv_heads, rows, bytes)."""
        return pack(self.encode(y), self.code_bits)

    def packed(self, payload: Payload) -> Packed | None:
        """What kernels are told of stored codes; None if they cannot read them."""
        return None

    def store_between_ends(self, x: Tensor) -> tuple[Payload, Tensor, Tensor] | None:
        """``store`` of x as it lies between the smallest and the largest value of each last axis, and these in fp16;
        None if no kernel does all of it."""
        return None

    def levels(self) -> Tensor | None:
        """float32: the value of each code, where a code is one value and means the same wherever it stands."""
        return None

    def rates(self, y: Tensor) -> Tensor:
        """What more or fewer bits would give, for a quantizer that was fitted: float64 (n, 2), bits a value and mean
        squared error of rows y, fewest bits first. Raises ``DataError`` for one whose bits cannot be chosen."""
        raise DataError(f"{type(self).__name__} cannot trade bits for error: use Steps or ResidualVQ")

    def with_bits(self, bits: float) -> "Quantizer":
        """An unfitted one like this, with one of the bits that ``rates`` names."""
        raise DataError(f"{type(self).__name__} cannot be given {bits} bits: use Steps or ResidualVQ")

    def read_back(self, y: Tensor) -> Tensor:
        """What ``load`` would give of what ``store`` would store of rows y, also before ``finalize``."""
        return self.decode(self.encode(y))

    def load(self, payload: Payload) -> Tensor:
        """The inverse. Raises ``FormatError`` for another quantizer's payload."""
        packed = payload_field(payload, "codes", payload.tokens_per_row)
        return self.decode(unpack(packed, self.code_bits, self.codes_per_row, self.code_dtype))

    def look_up(self, payload: Payload, table: Tensor, values: int) -> Tensor:
        """``load`` for codes that mean the same wherever they stand: (batch, num_kv_heads, rows, ``values``) from a
        table of what every byte stands for (``kernels.by_byte``)."""
        packed = payload_field(payload, "codes", payload.tokens_per_row)
        check_packed(packed, self.code_bits, self.codes_per_row)
        found = lookup(packed, table)
        return found if found.shape[-1] == values else found[..., :values].contiguous()
