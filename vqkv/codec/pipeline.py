"""scale . transform . quantize . store: every system in this study is one such chain."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from vqkv.codec.base import Codec, Part, check_head_dim
from vqkv.codec.packing import pack, unpack
from vqkv.codec.payload import Payload, payload_field
from vqkv.errors import DataError, FormatError

Side = dict[str, Tensor]


class Stage(Part):
    """An invertible step on rows: (batch, num_kv_heads, rows, *row_shape) -> the same with another row shape.

    ``side_fields`` names what it stores per row. A stage that folds tokens into rows sets ``tokens_per_row``.
    """

    side_fields: tuple[str, ...] = ()
    tokens_per_row: int = 1

    def build(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows of this shape and return the shape of rows going out. Raises ``DataError`` if impossible."""
        return row_shape

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch; nothing to learn by default."""

    def finalize(self) -> None:
        """Freeze what was learned; nothing by default."""

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Rows going out, and what must be stored per row to come back."""
        raise NotImplementedError

    def decode(self, y: Tensor, side: Side) -> Tensor:
        """The inverse of ``encode``, up to what the quantizer lost."""
        raise NotImplementedError


class Quantizer(Part):
    """Rows of values -> integer codes (batch, num_kv_heads, rows, codes_per_row) and back."""

    code_bits: int
    codes_per_row: int

    def build(self, row_shape: tuple[int, ...]) -> None:
        """Prepare for rows of this shape: sets ``codes_per_row``. Raises ``DataError`` if impossible."""
        raise NotImplementedError

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch; nothing to learn by default."""

    def finalize(self) -> None:
        """Freeze what was learned; nothing by default."""

    def encode(self, x: Tensor) -> Tensor:
        """Codes, int64."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """Values in float32."""
        raise NotImplementedError


@dataclass(eq=False)
class Chain(Codec):
    """``stages`` in order, then ``quantizer``, then codes packed into one bit string per row.

    The payload has the fields ``codes`` (uint8) and each stage's side fields; a name that stages share gets a number.
    With ``head_dim`` given, sizes that do not fit raise ``DataError`` at once; otherwise at the first fit.
    """

    stages: list[Stage]
    quantizer: Quantizer
    head_dim: int | None = None
    _names: list[dict[str, str]] = field(init=False, repr=False)

    def __post_init__(self):
        self.stages = list(self.stages)
        if not all(isinstance(stage, Stage) for stage in self.stages) or not isinstance(self.quantizer, Quantizer):
            raise DataError("a Chain takes a list of Stage objects and one Quantizer")
        self._names = _unique_names(self.stages)
        if self.head_dim is not None:
            self._build()

    @property
    def tokens_per_row(self) -> int:
        """Tokens that the stages fold into one row."""
        return math.prod(stage.tokens_per_row for stage in self.stages)

    def vectors(self, x: Tensor) -> Tensor:
        """What the quantizer sees of ``x``: scaled and transformed rows, float32 (for losses and plots)."""
        return self._forward(x.detach().float())[0]

    def state(self) -> dict[str, Tensor]:
        """Learned tensors of all parts, as ``stages.0.mean`` or ``quantizer.codebooks``."""
        return {f"{owner}.{name}": tensor for owner, part in self._parts() for name, tensor in part.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Hand every part its own tensors. Raises ``FormatError`` for a missing, misshapen or unknown one."""
        if self.head_dim is None:
            raise FormatError("the stored settings name no head_dim: the codec was saved before it was fitted")
        left = dict(state)
        for owner, part in self._parts():
            mine = [name for name in left if name.startswith(owner + ".")]
            part.load_state({name.removeprefix(owner + "."): left.pop(name) for name in mine})
        if left:
            raise FormatError(f"unexpected tensors {sorted(left)}: the file was altered or is for another codec")

    def _parts(self):
        return [(f"stages.{i}", stage) for i, stage in enumerate(self.stages)] + [("quantizer", self.quantizer)]

    def _build(self) -> None:
        check_head_dim(self.head_dim)
        row_shape = (self.head_dim,)
        for stage in self.stages:
            row_shape = stage.build(row_shape)
        self.quantizer.build(row_shape)

    def _partial_fit(self, x: Tensor) -> None:
        for stage in self.stages:
            stage.partial_fit(x)
            x, _ = stage.encode(x)
        self.quantizer.partial_fit(x)

    def _finalize(self) -> None:
        for _, part in self._parts():
            part.finalize()

    def _forward(self, x: Tensor) -> tuple[Tensor, Side]:
        fields = {}
        for stage, names in zip(self.stages, self._names, strict=True):
            x, side = stage.encode(x)
            fields.update({names[name]: tensor for name, tensor in side.items()})
        return x, fields

    def _encode(self, x: Tensor) -> Payload:
        y, fields = self._forward(x)
        codes = pack(self.quantizer.encode(y), self.quantizer.code_bits)
        return Payload({"codes": codes, **fields}, self.tokens_per_row)

    def _decode(self, payload: Payload) -> Tensor:
        packed = payload_field(payload, "codes", self.tokens_per_row)
        y = self.quantizer.decode(unpack(packed, self.quantizer.code_bits, self.quantizer.codes_per_row))
        for stage, names in zip(reversed(self.stages), reversed(self._names), strict=True):
            y = stage.decode(y, {name: payload_field(payload, names[name], self.tokens_per_row) for name in names})
        return y


def _unique_names(stages: list[Stage]) -> list[dict[str, str]]:
    """Each stage's own field names -> names that are unique in the payload."""
    used = {"codes"}
    renamed = []
    for stage in stages:
        names = {}
        for name in stage.side_fields:
            candidates = (name if i == 0 else f"{name}{i}" for i in range(len(stages) + 2))
            names[name] = next(candidate for candidate in candidates if candidate not in used)
            used.add(names[name])
        renamed.append(names)
    return renamed
