"""scale . transform . quantize . store: every system in this study is one such chain."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vqkv.codecs.base import Codec
from vqkv.codecs.layout import MergeHeads
from vqkv.codecs.payload import Payload
from vqkv.codecs.pca import PCA
from vqkv.codecs.scaling import MeanRemoval
from vqkv.codecs.stage import Quantizer, Stage
from vqkv.errors import DataError
from vqkv.kernels import KernelView, decode
from vqkv.kernels.precision import full_precision


@dataclass(eq=False)
class Chain(Codec):
    """``stages`` in order, then ``quantizer``, which stores its codes (by default in one bit string per row). The
    payload has what the quantizer stores and each stage's side fields, whose names must differ. With ``head_dim``
    given, sizes that do not fit raise ``DataError`` at once; otherwise at the first fit, which also sets
    ``num_kv_heads``."""

    stages: list[Stage]
    quantizer: Quantizer
    head_dim: int | None = None
    num_kv_heads: int | None = None

    def __post_init__(self):
        self._stages, self._parts = (*self.stages,), (*self.stages, self.quantizer)  # faster to go through than modules
        self._viewed = all(type(stage).kernel_view_before is not Stage.kernel_view_before for stage in self._stages)
        self.stages = nn.ModuleList(self.stages)
        self._pass = 0
        self.tokens_per_row = math.prod([stage.tokens_per_row for stage in self._stages])
        stored = [name for part in self._parts for name in part.side_fields]
        if len(set(stored)) < len(stored):
            raise DataError(f"stages of one Chain store {stored}: leave out those whose fields have the same name")
        if self.head_dim is not None:
            self._build()

    @property
    def learns(self) -> bool:
        return any(part.learns for part in self._parts)

    @property
    def passes(self) -> int:
        return len(self._learners())

    @property
    def weighted(self) -> bool:
        return any(part.weighted for part in self._parts)

    @property
    def costs(self) -> str:
        return next((part.costs for part in self._parts if part.weighted), "loss")

    @property
    def by_head(self) -> bool:
        return any(part.by_head for part in self._parts)

    def weigh(self, metric: Tensor) -> None:
        for part in self._parts:
            if part.weighted:
                part.weigh(metric)

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
        shape = (self.num_kv_heads or 1, self.head_dim)
        for part in self._parts:
            shape = part.build(shape)
        self.quantizer.share = math.prod(stage.share for stage in self._stages)

    def _partial_fit(self, x: Tensor) -> None:
        learning = self._learners()[self._pass]
        for i, part in enumerate(self._parts[: max(learning, default=-1) + 1]):  # those after it need not run
            if i in learning:
                part.partial_fit(x)
            if i < learning[-1]:
                x, _ = part.encode(x)

    def end_pass(self) -> None:
        for i in self._learners()[self._pass]:
            self._parts[i].settle()
        self._pass += 1

    def _learners(self) -> list[list[int]]:
        """The parts that learn in each pass: up to the last that ``learns_first`` one by one, then the others."""
        learning = [i for i, part in enumerate(self._parts) if part.learns]
        last = max((i for i in learning if self._parts[i].learns_first), default=-1)
        rest = [i for i in learning if i > last]
        return [[i] for i in learning if i <= last] + ([rest] if rest or last < 0 else [])

    def _finalize(self) -> None:
        for part in self._parts:
            part.finalize()
        for stage in self._stages if self.quantizer.kept is not None else ():
            stage.keep(self.quantizer.kept)

    def _forward(self, x: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Rows after the stages, and what each of these stores."""
        sides = []
        for stage in self._stages:
            x, side = stage.encode(x)
            sides.append(side)
        return x, sides

    def _backward(self, y: Tensor, sides: list[dict[str, Tensor]]) -> Tensor:
        for stage, side in zip(reversed(self._stages), reversed(sides), strict=True):
            y = stage.decode(y, side)
        return y

    def _encode(self, x: Tensor) -> Payload:
        y, sides = self._forward(x)
        stored = self.quantizer.store(y)
        fields = {name: tensor for side in sides for name, tensor in side.items()}
        return dataclasses.replace(stored, fields=stored.fields | fields, tokens_per_row=self.tokens_per_row)

    def _quantize_dequantize(self, x: Tensor) -> Tensor:
        y, sides = self._forward(x)
        return self._backward(self.quantizer.quantize_dequantize(y), sides)

    def _decode(self, payload: Payload) -> Tensor:
        """All stages in one kernel, if there is one that can undo them."""
        packed = self.kernel_view(payload)
        if packed is not None:
            return decode(packed)
        return self._backward(self.quantizer.load(payload), [stage.side_of(payload) for stage in self._stages])

    def reader(self, payload: Payload) -> Callable[[int, int], Tensor]:
        """As ``Codec.reader``. Of merged heads, perhaps those of all layers, only the components are decoded at once, a
        block of tokens at a time: all heads may be many times as large."""
        if [type(stage) for stage in self._stages[:3]] != [MeanRemoval, MergeHeads, PCA]:
            return super().reader(payload)
        first_three: Any = self._stages[:3]
        mean, _, basis = first_three
        starts = range(0, payload.seq_len, self.tokens_per_row)
        rows = torch.cat([self._components(payload.tokens(i, i + self.tokens_per_row)) for i in starts], dim=2)

        def read(first: int, last: int) -> Tensor:
            with full_precision(rows.device):
                heads = basis.decode(rows, {}, slice(first * self.head_dim, last * self.head_dim))
                heads = heads.squeeze(1).unflatten(-1, (last - first, -1)).movedim(-2, 1)
                return heads.add_(mean.mean[first:last].float().unsqueeze(1))

        return read

    def _components(self, payload: Payload) -> Tensor:
        """The input of the third stage's ``decode``, without what no quantizer stores."""
        with full_precision(next(iter(payload.fields.values())).device):
            rows = self.quantizer.load(payload)
            for stage in reversed(self._stages[3:]):
                rows = stage.decode(rows, stage.side_of(payload))
        return rows[..., : self.quantizer.kept]

    def kernel_view(self, payload: Payload) -> KernelView | None:
        found = self.quantizer.kernel_view(payload) if self._viewed else None
        for stage in reversed(self._stages):
            found = None if found is None else stage.kernel_view_before(found, stage.side_of(payload))
        return found
