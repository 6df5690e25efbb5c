"""scale . transform . quantize . store: a codec is a chain of stages, and every system in this study is one."""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vqkv.codecs.layout import MergeHeads
from vqkv.codecs.payload import Payload
from vqkv.codecs.pca import PCA
from vqkv.codecs.scaling import MeanRemoval
from vqkv.codecs.stage import Part, Quantizer, Side, Stage
from vqkv.errors import DataError
from vqkv.kernels import KernelView, decode
from vqkv.kernels.precision import full_precision
from vqkv.runtime.checks import FP16_MAX, check_values, whole_blocks


class Codec(Part):
    """A tensor (batch, num_kv_heads, seq_len, head_dim) -> ``Payload`` -> a tensor. Knows no model.

    Subclasses write ``_encode`` and ``_decode``, and ``_build``, ``_partial_fit`` and ``_finalize`` if they learn."""

    head_dim: int | None = None
    num_kv_heads: int | None = None  # that it was fitted on
    block_tokens: int = 1  # encoded together; ``seq_len`` must be a multiple of it
    ready: bool = False
    by_head: bool = False  # whether it serves just as many KV heads as it was fitted on
    learns: bool = False  # whether more than the first batch has anything to teach it
    passes: int = 1  # over all batches, that learning takes
    weighted: bool = False  # whether it needs ``weigh`` before it learns
    costs: str = "loss"  # and of which costs, see ``Stage.costs``

    def weigh(self, metric: Tensor) -> None:
        """Learn what errors cost: that of e in a head's vector is e' metric e, (num_kv_heads, head_dim, head_dim)."""

    def fit(self, x: Tensor) -> "Codec":
        """Learn from one batch and freeze. Raises ``DataError`` for bad values or too few of them."""
        for _ in range(self.passes):
            self.partial_fit(x).end_pass()
        return self.finalize()

    def partial_fit(self, x: Tensor) -> "Codec":
        """Learn from one batch of a stream, without an incomplete block: the first call initialises. Go through the
        stream ``passes`` times, with ``end_pass`` after each."""
        if self.ready:
            raise RuntimeError(f"this {type(self).__name__} is frozen: make a new one to learn again")
        values = self._checked(whole_blocks(x, self.block_tokens), most=math.inf)
        self.prepare(values.shape[1], values.shape[-1])
        self.to(values.device)
        with full_precision(values.device):
            self._partial_fit(values)
        return self

    def end_pass(self) -> None:
        """Conclude one of ``passes``."""

    def finalize(self) -> "Codec":
        """Freeze what was learned in the precision it is stored in."""
        if not self.ready:
            if self.num_kv_heads is None:
                raise RuntimeError(f"this {type(self).__name__} has learned nothing yet: call partial_fit(x) first")
            self._finalize()
        self.ready = True
        return self

    def prepare(self, num_kv_heads: int, head_dim: int) -> None:
        """Become a codec of this size, as the first batch would make it."""
        if self.num_kv_heads is None:
            self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
            self._build(num_kv_heads, head_dim)

    def encode(self, x: Tensor) -> Payload:
        """Store ``x`` (any float dtype). Raises ``DataError`` for bad values or magnitudes beyond fp16's, which most
        codecs keep scales or values in; ``RuntimeError`` before ``fit``."""
        values = self._checked(x, self.ready)
        with full_precision(values.device):
            return self._encode(values)

    def decode(self, payload: Payload, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (batch, num_kv_heads, seq_len, head_dim) in ``dtype``, of a payload that this codec has made."""
        with full_precision(payload.device):
            values = self._decode(payload).to(dtype)
        if dtype == torch.float16:
            values = values.clamp(-FP16_MAX, FP16_MAX)  # a finite value must not become infinite by its type
        return values

    def reader(self, payload: Payload) -> Callable[[int, int], Tensor]:
        """Decode by parts: return a function (first, last) that gives these KV heads."""
        values = self.decode(payload)
        return lambda first, last: values[:, first:last]

    def quantize_dequantize(self, x: Tensor) -> Tensor:
        """Read back ``x`` (any float dtype) as if learning had ended now, except that nothing is rounded to fp16 yet:
        float32. Raises ``DataError`` as ``encode`` does, ``RuntimeError`` before any learning."""
        values = self._checked(x, self.ready or self.num_kv_heads is not None)
        with full_precision(values.device):
            return self._quantize_dequantize(values)

    def kernel_view(self, payload: Payload) -> KernelView | None:
        """Return a payload as kernels read it without decoding it all; None if they cannot."""
        return None

    def _checked(self, x: Tensor, fitted: bool = True, most: float = FP16_MAX) -> Tensor:
        if not fitted:
            name = type(self).__name__
            raise RuntimeError(f"this {name} is not fitted: call fit(x), or partial_fit(x) and then finalize()")
        values = check_values(x, self.head_dim, self.block_tokens, most)
        if self.by_head and self.num_kv_heads not in (None, values.shape[1]):
            raise DataError(f"{values.shape[1]} KV heads, but this codec was fitted on {self.num_kv_heads}: fit again")
        return values

    def _build(self, num_kv_heads: int, head_dim: int) -> None:
        """Prepare what depends on sizes only."""

    def _partial_fit(self, x: Tensor) -> None:
        """Learn; nothing to do by default."""

    def _finalize(self) -> None:
        """Freeze; nothing to do by default."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Payload: ...

    @abstractmethod
    def _decode(self, payload: Payload) -> Tensor: ...

    def _quantize_dequantize(self, x: Tensor) -> Tensor:
        return self._decode(self._encode(x))


@dataclass(eq=False)
class Chain(Codec):
    """Apply ``stages`` in order, then ``quantizer``, which stores its codes.

    The payload has what the quantizer stores and each stage's side fields, whose names must differ. With ``head_dim``
    given, sizes that do not fit raise ``DataError`` at once, otherwise at the first fit."""

    stages: list[Stage]
    quantizer: Quantizer
    head_dim: int | None = None
    num_kv_heads: int | None = None

    def __post_init__(self):
        self._stages, self._parts = (*self.stages,), (*self.stages, self.quantizer)  # faster to go through than modules
        self.stages = cast(list[Stage], nn.ModuleList(self.stages))
        self._viewed = all(type(stage).kernel_view_before is not Stage.kernel_view_before for stage in self._stages)
        self.block_tokens = math.prod(stage.block_tokens for stage in self._stages)
        self.by_head = any(part.by_head for part in self._parts)
        self.weighted = any(part.weighted for part in self._parts)
        self.costs = next((part.costs for part in self._parts if part.weighted), "loss")
        # in each pass learn: up to the last part that ``learns_first`` one alone, then all others
        learning = [i for i, part in enumerate(self._parts) if type(part).partial_fit is not Stage.partial_fit]
        last = max((i for i in learning if self._parts[i].learns_first), default=-1)
        rest = [i for i in learning if i > last]
        self._learners = [[i] for i in learning if i <= last] + ([rest] if rest or last < 0 else [])
        self._pass, self.passes, self.learns = 0, len(self._learners), bool(learning)
        stored = [name for part in self._parts for name in part.side_fields]
        if len(set(stored)) < len(stored):
            raise DataError(f"stages of one Chain store {stored}: leave out those whose fields have the same name")
        if self.head_dim is not None:
            self._build(self.num_kv_heads or 1, self.head_dim)

    def weigh(self, metric: Tensor) -> None:
        for part in self._parts:
            if part.weighted:
                part.weigh(metric)

    def vectors(self, x: Tensor) -> Tensor:
        """Scale and transform ``x`` to the quantizer's input, float32 (for losses and plots)."""
        return self._forward(x.detach().float())[0]

    def with_bits(self, bits: float) -> "Chain":
        """Return a chain like this one, also unfitted, whose quantizer has so many bits a value."""
        return dataclasses.replace(self, quantizer=self.quantizer.with_bits(bits))

    def end_pass(self) -> None:
        for i in self._learners[self._pass]:
            self._parts[i].settle()
        self._pass += 1

    def reader(self, payload: Payload) -> Callable[[int, int], Tensor]:
        """Decode only components of merged heads at once: all heads may be many times as large."""
        if [type(stage) for stage in self._stages[:3]] != [MeanRemoval, MergeHeads, PCA]:
            return super().reader(payload)
        mean, _, basis = cast(Any, self._stages[:3])
        starts = range(0, payload.seq_len, self.block_tokens)
        blocks = (payload.tokens(start, start + self.block_tokens) for start in starts)
        with full_precision(payload.device):
            rows = torch.cat([self._read(block, 3)[..., : self.quantizer.kept] for block in blocks], dim=2)

        def read(first: int, last: int) -> Tensor:
            head_dim = mean.mean.shape[-1]
            with full_precision(rows.device):
                heads = basis.decode(rows, {}, slice(first * head_dim, last * head_dim))
                heads = heads.squeeze(1).unflatten(-1, (last - first, -1)).movedim(-2, 1)
                return heads.add_(mean.mean[first:last].float().unsqueeze(1))

        return read

    def kernel_view(self, payload: Payload) -> KernelView | None:
        view = self.quantizer.kernel_view(payload) if self._viewed else None
        for stage in reversed(self._stages):
            view = None if view is None else stage.kernel_view_before(view, stage.side_of(payload))
        return view

    def _build(self, num_kv_heads: int, head_dim: int) -> None:
        shape: tuple[int, ...] = (num_kv_heads, head_dim)
        for part in self._parts:
            shape = part.build(shape)
        self.quantizer.share = math.prod(stage.share for stage in self._stages)

    def _partial_fit(self, x: Tensor) -> None:
        learning = self._learners[self._pass]
        for i, part in enumerate(self._parts[: max(learning, default=-1) + 1]):  # those after it need not run
            if i in learning:
                part.partial_fit(x)
            if i < learning[-1]:
                x, _ = part.encode(x)

    def _finalize(self) -> None:
        for part in self._parts:
            part.finalize()
        kept = self.quantizer.kept
        for stage in self._stages if kept is not None else ():
            stage.keep(cast(int, kept))

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Side]]:
        """Return rows after the stages, and what each of these stores."""
        sides = []
        for stage in self._stages:
            x, side = stage.encode(x)
            sides.append(side)
        return x, sides

    def _backward(self, y: Tensor, sides: list[Side]) -> Tensor:
        """Undo the last stages, one for each of ``sides``."""
        for stage, side in zip(reversed(self._stages), reversed(sides)):
            y = stage.decode(y, side)
        return y

    def _encode(self, x: Tensor) -> Payload:
        y, sides = self._forward(x)
        stored = self.quantizer.store(y)
        fields = {name: tensor for side in sides for name, tensor in side.items()}
        return dataclasses.replace(stored, fields=stored.fields | fields, block_tokens=self.block_tokens)

    def _decode(self, payload: Payload) -> Tensor:
        packed = self.kernel_view(payload)
        return self._read(payload) if packed is None else decode(packed)

    def _read(self, payload: Payload, start: int = 0) -> Tensor:
        """Decode rows as they were before the stages from ``start`` on."""
        sides = [stage.side_of(payload) for stage in self._stages[start:]]
        return self._backward(self.quantizer.load(payload), sides)

    def _quantize_dequantize(self, x: Tensor) -> Tensor:
        y, sides = self._forward(x)
        return self._backward(self.quantizer.quantize_dequantize(y), sides)
