"""scale . transform . quantize . store: every system in this study is one such chain."""

import dataclasses
import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from vqkv.codecs.base import Codec
from vqkv.codecs.payload import Payload, payload_field
from vqkv.codecs.stage import MAX_ROW, Quantizer, Side, Stage
from vqkv.errors import DataError
from vqkv.kernels import Packed, decode, which
from vqkv.runtime.checks import check_head_dim, check_num_kv_heads

MAX_STAGES = 16
NOTHING_TO_LEARN = (Stage.partial_fit, Quantizer.partial_fit)  # what follows the last part that learns need not run


@dataclass(eq=False)
class Chain(Codec):
    """``stages`` in order, then ``quantizer``, which stores its codes (by default in one bit string per row).

    The payload has what the quantizer stores and each stage's side fields; a name that stages share gets a number.
    With ``head_dim`` given, sizes that do not fit raise ``DataError`` at once; otherwise at the first fit, which also
    sets ``num_kv_heads``.
    """

    stages: list[Stage]
    quantizer: Quantizer
    head_dim: int | None = None
    num_kv_heads: int | None = None
    _names: list[dict[str, str]] = field(init=False, repr=False)

    def __post_init__(self):
        if not all(isinstance(stage, Stage) for stage in self.stages) or not isinstance(self.quantizer, Quantizer):
            raise DataError("a Chain takes a list of Stage objects and one Quantizer")
        if len(self.stages) > MAX_STAGES:
            raise DataError(f"{len(self.stages)} stages in one Chain: use at most {MAX_STAGES}")
        self._names = _unique_names(self.stages, {"codes", *self.quantizer.side_fields})
        self.tokens_per_row = math.prod([stage.tokens_per_row for stage in self.stages])
        self._stages, self._parts = (*self.stages,), (*self.stages, self.quantizer)  # faster to go through than modules
        self.stages = nn.ModuleList(self.stages)
        if self.head_dim is not None:
            self._build()

    @property
    def learns(self) -> bool:
        return any(type(part).partial_fit not in NOTHING_TO_LEARN for part in self._parts)

    @property
    def weighted(self) -> bool:
        return any(stage.weighted for stage in self._stages)

    def weigh(self, metric: Tensor) -> None:
        for stage in self._stages:
            if stage.weighted:
                stage.weigh(metric)

    def vectors(self, x: Tensor) -> Tensor:
        """The quantizer's input for ``x``: scaled and transformed rows, float32 (for losses and plots)."""
        return self._forward(x.detach().float())[0]

    def rates(self, x: Tensor) -> Tensor:
        """``Quantizer.rates`` of ``vectors(x)``."""
        return self.quantizer.rates(self.vectors(x))

    def with_bits(self, bits: float) -> "Chain":
        """An unfitted chain like this one, still unfitted too, whose quantizer has so many bits a value."""
        return dataclasses.replace(self, quantizer=self.quantizer.with_bits(bits))

    def _build(self) -> None:
        check_head_dim(self.head_dim)
        shape = _bounded((check_num_kv_heads(self.num_kv_heads), self.head_dim))
        for stage in self._stages:
            shape = _bounded(stage.build(shape))
        self.quantizer.build(shape)

    def _partial_fit(self, x: Tensor) -> None:
        learning = [i for i, part in enumerate(self._parts) if type(part).partial_fit not in NOTHING_TO_LEARN]
        for i, part in enumerate(self._parts[: max(learning, default=-1) + 1]):
            part.partial_fit(x)
            if i < learning[-1]:
                x, _ = part.encode(x)

    def _finalize(self) -> None:
        for part in self._parts:
            part.finalize()

    def _forward(self, x: Tensor) -> tuple[Tensor, Side]:
        """Rows after the stages, and all that these store."""
        fields = {}
        for stage, names in zip(self._stages, self._names, strict=True):
            x, side = stage.encode(x)
            fields |= {names[name]: tensor for name, tensor in side.items()}
        return x, fields

    def _encode(self, x: Tensor) -> Payload:
        y, fields = self._forward(x)
        stored = self._parts[-1].store(y)
        return dataclasses.replace(stored, fields=stored.fields | fields, tokens_per_row=self.tokens_per_row)

    def _quantize_dequantize(self, x: Tensor) -> Tensor:
        sides = []
        for stage in self._stages:
            x, side = stage.encode(x)
            sides.append(side)
        y = self.quantizer.quantize_dequantize(x)
        for stage, side in zip(reversed(self._stages), reversed(sides), strict=True):
            y = stage.decode(y, side)
        return y

    def _decode(self, payload: Payload) -> Tensor:
        found = self._decoded_on_gpu(payload)
        return self._back(payload, 0) if found is None else found

    def _decoded_on_gpu(self, payload: Payload) -> Tensor | None:
        """All stages in one kernel, if there is one that reads this payload; payloads that do not fit, and codes that
        may not exist, are for the stages to refuse."""
        if which("decode", next(iter(payload.fields.values()))) != "triton":
            return None
        packed = self.packed(payload)
        shape = (*payload.shape[:2], payload.seq_len, self.head_dim)
        return decode(packed) if packed is not None and packed.complete and packed.shape == shape else None

    def _back(self, payload: Payload, first: int) -> Tensor:
        """Undo the quantizer and the stages from the ``first`` on."""
        y = self._parts[-1].load(payload)
        for i in reversed(range(first, len(self._stages))):
            y = self._stages[i].decode(y, self._side(payload, i))
        return y

    def _side(self, payload: Payload, stage: int) -> Side:
        names = self._names[stage]
        return {name: payload_field(payload, names[name]) for name in names}

    def packed(self, payload: Payload) -> Packed | None:
        found = self._parts[-1].packed(payload)
        for i in reversed(range(len(self._stages))):
            if found is None:
                return None
            found = self._stages[i].packed(found, self._side(payload, i))
        return found

    def decodes_directly(self, out: Tensor) -> bool:
        return self._parts[-1].loads_directly(out)

    def _decode_into(self, payload: Payload, out: Tensor) -> None:
        if (found := self._decoded_on_gpu(payload)) is not None:
            out.copy_(found)
            return
        for i, stage in enumerate(self._stages):
            inner = stage.inner_view(out)
            if inner is None:  # the first stages only change the shape, and this one computes
                stage.decode_into(self._back(payload, i + 1), self._side(payload, i), out)
                return
            out = inner
        self._parts[-1].load_into(payload, out)


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` (num_kv_heads, *row_shape), before anything of that size is made. Raises ``DataError`` if too large."""
    if math.prod(shape) > MAX_ROW:
        raise DataError(f"rows of {tuple(shape)} have more than {MAX_ROW} values: use smaller blocks of tokens")
    return shape


def _unique_names(stages: list[Stage], used: set[str]) -> list[dict[str, str]]:
    """Each stage's own field names -> names that are unique in the payload, of which some are ``used``."""
    renamed = []
    for stage in stages:
        names = {}
        for name in stage.side_fields:
            candidates = (name if i == 0 else f"{name}{i}" for i in range(len(stages) + 2))
            names[name] = next(candidate for candidate in candidates if candidate not in used)
            used.add(names[name])
        renamed.append(names)
    return renamed
