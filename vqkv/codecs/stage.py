"""Pieces of a chain: stages, which can be undone, and a quantizer at the end."""

import math

from torch import Tensor

from vqkv.codecs.part import Part
from vqkv.codecs.payload import Payload
from vqkv.errors import DataError
from vqkv.kernels import KernelView, decode, pack_codes, unpack_codes

Side = dict[str, Tensor]


class Stage(Part):
    """An invertible step on rows: (batch, num_kv_heads, rows, *row_shape) -> the same with another row shape. Shapes
    that ``build`` takes and returns are (num_kv_heads, *row_shape). ``side_fields`` names what a stage stores per row.
    A stage that folds tokens into rows sets ``tokens_per_row``."""

    side_fields: tuple[str, ...] = ()
    tokens_per_row: int = 1
    share: float = 1.0  # of a row's values that go out; a quantizer's: of a cache's values that it is given
    weighted: bool = False  # whether it wants to be told what errors cost, by ``weigh``
    costs: str = "loss"  # and where: to the model's ``loss`` or in ``attention`` (``calibration.error_costs``)
    by_head: bool = False  # whether it serves just as many KV heads as it was built for
    learns_first: bool = False  # whether it learns from all batches before what comes after it begins

    @property
    def learns(self) -> bool:
        """True if batches have anything to teach it."""
        return type(self).partial_fit not in (Stage.partial_fit, Quantizer.partial_fit)

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows of this shape and return the shape of rows going out. Raises ``DataError`` if impossible."""
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch; nothing to learn by default."""

    def settle(self) -> None:
        """Conclude what all batches taught, where it ``learns_first``."""

    def finalize(self) -> None:
        """Freeze what was learned; nothing by default."""

    def keep(self, count: int) -> None:
        """Forget what only values behind the first ``count`` of the last axis need: they are not stored."""

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Rows going out, and what must be stored per row to come back."""
        raise NotImplementedError

    def decode(self, y: Tensor, side: Side) -> Tensor:
        """The inverse of ``encode``, up to what the quantizer lost. May overwrite y, and return a view of it."""
        raise NotImplementedError

    def side_of(self, payload: Payload) -> Side:
        """Side values of a stored row."""
        return {name: payload.fields[name] for name in self.side_fields}

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        """What kernels are told of rows before this stage, from that of rows after it; None if they cannot."""
        return None


class Quantizer(Stage):
    """The last stage: rows of values -> integer codes (batch, num_kv_heads, rows, codes_per_row) and back. ``store``
    and ``load`` keep the codes of a row as one packed bit string, and in ``side_fields`` what else a row takes."""

    code_bits: int
    codes_per_row: int
    row_shape: tuple[int, ...]  # of the values of a row
    kept: int | None = None  # values of the last axis that are stored, the first ones, if not all are

    def build(self, shape: tuple[int, ...]) -> None:
        """Prepare for rows of (num_kv_heads, *row_shape), a code for each value. Raises ``DataError`` if impossible."""
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape)

    def store(self, y: Tensor) -> Payload:
        """Rows of values as a payload."""
        codes, side = self.encode(y)
        return Payload({"codes": pack_codes(codes, self.code_bits), **side})

    def load(self, payload: Payload) -> Tensor:
        """The inverse: values in float32, in memory of their own."""
        packed = self.kernel_view(payload)
        if packed is not None:
            return decode(packed).unflatten(-1, self.row_shape)
        codes = unpack_codes(payload.fields["codes"], self.code_bits, self.codes_per_row)
        return self.decode(codes.int(), self.side_of(payload))

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        """Rows y as ``load`` would give them after ``store``, also before ``finalize``."""
        return self.decode(*self.encode(y))

    def kernel_view(self, payload: Payload) -> KernelView | None:
        """Stored codes as kernels read them; None if they cannot read them."""
        return None

    def rates(self, y: Tensor) -> Tensor:
        """More or fewer bits, once fitted: float64 (n, 2), bits a value and mean squared error of rows y, fewest bits
        first; ``with_bits`` makes an unfitted one of so many. Raises ``DataError`` where bits cannot be chosen."""
        raise DataError(f"{type(self).__name__} cannot trade bits for error: use EntropyCodedScalar or ResidualVQ")
