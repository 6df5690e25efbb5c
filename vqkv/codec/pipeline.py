"""scale . transform . quantize . store: every system in this study is one such chain."""

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.codec.base import Codec
from vqkv.codec.checks import check_head_dim, check_num_kv_heads
from vqkv.codec.learning import collected, hand_out
from vqkv.codec.payload import Payload, payload_field
from vqkv.codec.stage import MAX_ROW, Quantizer, Side, Stage
from vqkv.errors import DataError, FormatError
from vqkv.kernels import Packed, decode, which

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
        self.stages = list(self.stages)
        if not all(isinstance(stage, Stage) for stage in self.stages) or not isinstance(self.quantizer, Quantizer):
            raise DataError("a Chain takes a list of Stage objects and one Quantizer")
        if len(self.stages) > MAX_STAGES:
            raise DataError(f"{len(self.stages)} stages in one Chain: use at most {MAX_STAGES}")
        self._names = _unique_names(self.stages)
        if self.head_dim is not None:
            self._build()

    @property
    def tokens_per_row(self) -> int:
        """Tokens that the stages fold into one row."""
        return math.prod([stage.tokens_per_row for stage in self.stages])  # a generator could not be traced

    @property
    def learns(self) -> bool:
        """See ``Codec.learns``."""
        return any(type(part).partial_fit not in NOTHING_TO_LEARN for _, part in self._parts())

    @property
    def weighted(self) -> bool:
        """See ``Codec.weighted``."""
        return any(stage.weighted for stage in self.stages)

    def weigh(self, metric: Tensor) -> None:
        """See ``Codec.weigh``."""
        for stage in self.stages:
            if stage.weighted:
                stage.weigh(metric)

    def vectors(self, x: Tensor) -> Tensor:
        """What the quantizer sees of ``x``: scaled and transformed rows, float32 (for losses and plots)."""
        return self._forward(x.detach().float())[0]

    def rates(self, x: Tensor) -> Tensor:
        """See ``Quantizer.rates``; errors are those of ``vectors(x)``."""
        return self.quantizer.rates(self.vectors(x))

    def with_bits(self, bits: float) -> "Chain":
        """An unfitted chain like this one, still unfitted too, whose quantizer has so many bits a value."""
        return dataclasses.replace(self, quantizer=self.quantizer.with_bits(bits))

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
        shape = _bounded((check_num_kv_heads(self.num_kv_heads), self.head_dim))
        for stage in self.stages:
            shape = _bounded(stage.build(shape))
        self.quantizer.build(shape)

    def _partial_fit(self, x: Tensor) -> None:
        parts = [*self.stages, self.quantizer]
        learning = [i for i, part in enumerate(parts) if type(part).partial_fit not in NOTHING_TO_LEARN]
        for i, part in enumerate(parts[: max(learning, default=-1) + 1]):
            part.partial_fit(x)
            if i < learning[-1]:
                x, _ = part.encode(x)

    def _learning_state(self) -> dict[str, Tensor]:
        return collected(self._parts())

    def _load_learning_state(self, state: dict[str, Tensor]) -> None:
        hand_out(state, self._parts())

    def _finalize(self) -> None:
        for _, part in self._parts():
            part.finalize()

    def _forward(self, x: Tensor, stop: int | None = None) -> tuple[Tensor, Side]:
        """What the stages up to ``stop`` make of x, and all that they store."""
        fields = {}
        for stage, names in zip(self.stages[:stop], self._names[:stop], strict=True):
            x, side = stage.encode(x)
            fields.update({names[name]: tensor for name, tensor in side.items()})
        return x, fields

    def _stored(self, x: Tensor) -> tuple[Payload, Side]:
        last = len(self.stages) - 1
        if last < 0:
            return self.quantizer.store(x), {}
        x, fields = self._forward(x, last)
        if both := self.stages[last].encode_codes(self.quantizer, x):
            stored, side = both
        else:
            y, side = self.stages[last].encode(x)
            stored = self.quantizer.store(y)
        return stored, fields | {self._names[last][name]: tensor for name, tensor in side.items()}

    def _encode(self, x: Tensor) -> Payload:
        stored, fields = self._stored(x)
        return dataclasses.replace(stored, fields={**stored.fields, **fields}, tokens_per_row=self.tokens_per_row)

    def _read_back(self, x: Tensor) -> Tensor:
        sides = []
        for stage in self.stages:
            x, side = stage.encode(x)
            sides.append(side)
        y = self.quantizer.read_back(x)
        for stage, side in zip(reversed(self.stages), reversed(sides), strict=True):
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
        """What the stages from the ``first`` on give back."""
        y, stop = self._decoded_codes(payload, first), len(self.stages) - 1
        if y is None:
            y, stop = self.quantizer.load(payload), len(self.stages)
        for i in reversed(range(first, stop)):
            y = self.stages[i].decode(y, self._side(payload, i))
        return y

    def _decoded_codes(self, payload: Payload, first: int) -> Tensor | None:
        """What the last stage gives back, if it is not before the ``first`` and a kernel decodes codes for it."""
        last, shape = len(self.stages) - 1, self.quantizer.row_shape
        if last < first or shape is None:
            return None
        codes = payload_field(payload, "codes", self.tokens_per_row)
        out = torch.empty(*payload.shape, *shape, dtype=torch.float32, device=codes.device)
        done = self.stages[last].decodes_codes(self.quantizer, out) and self.stages[last].decode_codes(
            self.quantizer, payload, self._side(payload, last), out
        )
        return out if done else None

    def _side(self, payload: Payload, stage: int) -> Side:
        names = self._names[stage]
        return {name: payload_field(payload, names[name], self.tokens_per_row) for name in names}

    def packed(self, payload: Payload) -> Packed | None:
        """See ``Codec``."""
        found = self.quantizer.packed(payload)
        for i in reversed(range(len(self.stages))):
            if found is None:
                return None
            found = self.stages[i].packed(found, self._side(payload, i))
        return found

    def decodes_directly(self, out: Tensor) -> bool:
        """See ``Codec``."""
        return bool(self.stages) and self.stages[-1].decodes_codes(self.quantizer, out)

    def _decode_into(self, payload: Payload, out: Tensor) -> None:
        if (found := self._decoded_on_gpu(payload)) is not None:
            out.copy_(found)
            return
        for i, stage in enumerate(self.stages):
            inner = stage.place(out)
            if inner is None:  # the first stages only change the shape, and this one computes
                side, last = self._side(payload, i), i + 1 == len(self.stages)
                if not (last and stage.decode_codes(self.quantizer, payload, side, out)):
                    stage.decode_into(self._back(payload, i + 1), side, out)
                return
            out = inner
        out.copy_(self._back(payload, len(self.stages)))


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` (num_kv_heads, *row_shape), before anything of that size is made. Raises ``DataError`` if too large."""
    if math.prod(shape) > MAX_ROW:
        raise DataError(f"rows of {tuple(shape)} have more than {MAX_ROW} values: use smaller blocks of tokens")
    return shape


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
