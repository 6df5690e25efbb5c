"""One layer's keys or its values in a cache: which tokens are exact, which are quantized, and when they change over."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from vqkv.cache.settings import LiveSettings
from vqkv.codecs.payload import Payload
from vqkv.codecs.predictive import PredictiveCodec, Reconstructions
from vqkv.errors import DataError
from vqkv.kernels import KernelView
from vqkv.kernels.rope import rotate, unrotate
from vqkv.models.rope import Rotation
from vqkv.runtime.checks import FP16_MAX

PIECE = {True: 1 << 18, False: 1 << 22}  # values that are decoded at a time on a CPU, and elsewhere
ROUND = 64  # tokens: memory of the same size step after step is memory that the allocator has at hand


@dataclass(eq=False)
class Sequences:
    """What the stores of some sequences of equal length share. ``positions`` (sequences or 1, seq_len), int32: unless
    they are 0, 1, 2, ... Of the forward pass that runs: ``tables``, cos and sin of all tokens by rotation; where layers
    are predicted from others, reconstructions of the tokens quantized before it (``past``) and in it (``fresh``);
    ``room``, how many decoded tokens may be kept."""

    positions: Tensor | None = None
    seq_len: int = 0
    tables: dict[Rotation, tuple[Tensor, Tensor]] = field(default_factory=dict)
    past: Reconstructions | None = None
    fresh: Reconstructions | None = None
    room: int = 0

    def advance(self, new_tokens: int, position_ids: Tensor | None) -> None:
        """Append the positions (sequences or 1, new_tokens) of new tokens; None where nothing depends on them."""
        start, self.seq_len, self.tables = self.seq_len, self.seq_len + new_tokens, {}
        if position_ids is None:
            return
        new = position_ids.to(torch.int32)
        count = torch.arange(self.seq_len, dtype=torch.int32, device=new.device)[None]
        if self.positions is not None or not torch.equal(new, count[:, start:].expand_as(new)):
            before = count[:, :start] if self.positions is None else self.positions
            rows = max(len(before), len(new))
            self.positions = torch.cat([before.expand(rows, -1), new.expand(rows, -1)], dim=1)

    def table(self, rotation: Rotation, device) -> list[Tensor]:
        """Make cos and sin (sequences or 1, seq_len, rotated channels) of every token."""
        if rotation not in self.tables:
            count = torch.arange(self.seq_len, dtype=torch.int32, device=device)[None]
            self.tables[rotation] = rotation.table(count if self.positions is None else self.positions)
        return [table.to(device) for table in self.tables[rotation]]

    def truncate(self, seq_len: int) -> None:
        """Keep the first ``seq_len`` tokens' positions."""
        self.seq_len = seq_len
        if self.positions is not None:
            self.positions = self.positions[:, :seq_len].clone() if seq_len else None

    def select(self, index: Tensor) -> "Sequences":
        """Copy the sequences ``index``."""
        positions = self.positions
        if positions is not None:
            positions = positions[index.to(positions.device)] if len(positions) > 1 else positions.clone()
        return Sequences(positions, self.seq_len)


@dataclass(eq=False)
class TokenStore:
    """Sinks in 16 bits, quantized tokens, recent window in 16 bits: (batch, num_kv_heads, tokens, head_dim).

    ``payload`` holds the quantized tokens in order. ``holes``: numbers of those, ascending, that were cropped from the
    end of a block. They stay and are never read: quantizing the rest of their block again would add a second error.
    ``decoded``: what attention reads of the first quantized tokens, if it is kept from step to step. ``first``: number
    of the first token that is still here. ``rotation``: of keys that are stored before it.
    """

    coder: PredictiveCodec
    settings: LiveSettings
    sequences: Sequences
    rotation: Rotation | None = None
    sinks: Tensor | None = None
    payload: Payload | None = None
    window: Tensor | None = None
    holes: tuple[int, ...] = ()
    decoded: Tensor | None = None
    first: int = 0
    view: tuple[Payload | None, KernelView | None] = None, None  # of the payload, kept from step to step

    @property
    def quantized(self) -> int:
        """Tokens in the payload."""
        return 0 if self.payload is None else self.payload.seq_len

    @property
    def parts(self) -> tuple[int, int, int]:
        """Tokens in the sinks, quantized ones that are read, and tokens in the window."""
        return _tokens(self.sinks), self.quantized - len(self.holes), _tokens(self.window)

    def update(self, states: Tensor) -> Tensor:
        """Store new tokens; return all tokens as attention reads them: decoded history and, unless ``in_place``, the
        new tokens as they came."""
        out = None if self.settings.in_place else self.read(states)
        self.write(states)
        return self.read(states[:, :, :0]) if out is None else out

    def read(self, states: Tensor) -> Tensor:
        """Decode all stored tokens in order, then append ``states``, in their type."""
        sinks, quantized, window = self.parts
        length = (stored := sinks + quantized + window) + states.shape[2]
        out = states.new_empty(*states.shape[:2], length + -length % ROUND, states.shape[3]).narrow(2, 0, length)
        for x, at in ((self.sinks, 0), (self.decoded, sinks), (self.window, sinks + quantized), (states, stored)):
            if x is not None:
                out.narrow(2, at, x.shape[2]).copy_(x)
        if self.payload is not None and quantized > _tokens(self.decoded):
            self._decode(self.payload, out.narrow(2, sinks, quantized))
        return out

    def _decode(self, payload: Payload, out: Tensor) -> None:
        """Fill ``out`` with the quantized tokens beyond those in ``decoded``, and keep those that there is room for."""
        rows, few, past = self.settings.row_tokens, PIECE[out.device.type == "cpu"], self.sequences.past
        at = kept = _tokens(self.decoded)
        first, last = self._with_holes(at), self.quantized
        first += -first % rows  # the rest of a row that was begun is holes
        piece = last - first
        if out[:, :, kept:].numel() > few and past is None:  # predictors read all tokens at once
            piece = max(1, few // (rows * out[:, :, 0].numel())) * rows
        for start in range(first, last, piece):
            stop = min(start + piece, last)
            part = payload if stop - start == last else payload.tokens(start, stop)
            x = self.coder.codec.decode(part) if past is None else self.coder.decode(part, past)
            if self.holes:
                read = sorted({*range(start, stop)} - {*self.holes})
                x = x[:, :, torch.tensor(read, device=x.device) - start]
            x = self._rotated(rotate, x, _tokens(self.sinks) + at)
            out.narrow(2, at, x.shape[2]).copy_(x)
            at += x.shape[2]
        room = self._without_holes(min(last, self.sequences.room))
        if room > kept:
            self.decoded = _append(self.decoded, out[:, :, kept:room].clone(memory_format=torch.contiguous_format))

    def write(self, states: Tensor) -> None:
        """Store new tokens, then quantize the oldest of those beyond the sinks and the recent window. Raises
        ``DataError`` that names layer and role for what cannot be stored."""
        try:
            self._write(states.detach())  # a stored graph would hold every activation
        except DataError as error:
            role, layer = self.coder.layer_role
            raise DataError(f"the {role}s of layer {layer} cannot be cached: {error}") from error

    def _write(self, states: Tensor) -> None:
        settings, (sinks, quantized, _) = self.settings, self.parts
        if sinks < settings.sink_tokens and states.shape[2] and not self.first:
            head = states[:, :, : settings.sink_tokens - sinks]
            self.sinks = _append(self.sinks, _checked(head, settings.exact_dtype))
            sinks, states = sinks + head.shape[2], states[:, :, head.shape[2] :]
        if not states.shape[2]:
            return
        if settings.joint or settings.recent_window or settings.block_tokens > 1:  # codes are the same in any pieces
            largest = FP16_MAX if self.rotation is None else FP16_MAX / math.sqrt(2)
            states = _checked(states, settings.exact_dtype, largest)
        states = _append(self.window, states)
        count = 0 if settings.joint else self._to_quantize(states.shape[2])
        if not count:
            self.window = states
            return
        old = self._rotated(unrotate, states[:, :, :count].float(), sinks + quantized)
        codec, fresh = self.coder.codec, self.sequences.fresh
        self._quantized(codec.encode(old) if fresh is None else self.coder.encode(old, fresh), states[:, :, count:])

    def _to_quantize(self, waiting: int) -> int:
        """Count the oldest of ``waiting`` tokens that are to be quantized: complete blocks beyond the recent window."""
        spare = max(0, waiting - self.settings.recent_window)
        return spare - spare % self.settings.block_tokens

    def _quantized(self, payload: Payload, window: Tensor) -> None:
        """Append what became of the oldest tokens; ``window``: those after them."""
        self.view = None, None  # which would keep the old payload
        self.payload = payload if self.payload is None else Payload.concat([self.payload, payload])
        self.window = window.clone() if window.shape[2] else None

    def drop(self, reach: int, recorded: int) -> None:
        """Forget tokens that no later query can see, even if the last ``recorded`` are cropped: all but the last
        ``reach``. They are the sinks, complete blocks, and once none is left the window's."""
        (sinks, quantized, window), block = self.parts, self.settings.block_tokens
        spare = quantized + window - reach - recorded  # beyond the sinks, which go first
        if spare < 0 or spare + sinks == 0:
            return
        gone = min(self.quantized, spare + len(self.holes)) // block * block
        while (read := self._without_holes(gone)) > spare:
            gone -= block
        waiting = spare - read if gone == self.quantized else 0
        self.sinks, self.first = None, self.first + sinks + read + waiting
        if waiting:
            self.window = _slice(self.window, waiting, None)
        if gone and self.payload is not None:
            self.decoded = _slice(self.decoded, read, None)
            self.payload = self.payload.tokens(gone) if gone < self.quantized else None
            self.holes = tuple(hole - gone for hole in self.holes if hole >= gone)

    def kernel_view(self) -> KernelView | None:
        """View the quantized tokens as kernels do that decode them as they read; None if there are none, or if more
        than the codec is needed to read them: predictions, positions that do not count up, other kinds of RoPE."""
        by_kernel = self.rotation is None or (self.sequences.positions is None and self.rotation.half_split)
        if self.sequences.past is not None or self.holes or self.payload is None or not by_kernel:
            return None
        if self.view[0] is not self.payload:
            self.view = self.payload, self.coder.codec.kernel_view(self.payload)
        return self.view[1]

    def truncate(self, seq_len: int) -> None:
        """Keep the first ``seq_len`` tokens. What was quantized stays as it was quantized."""
        sinks, quantized, _ = self.parts
        self.window = _slice(self.window, 0, seq_len - sinks - quantized)
        if self.payload is not None and seq_len < sinks + quantized:
            end = self._with_holes(max(0, seq_len - sinks))
            stop = end + -end % self.settings.row_tokens
            self.holes = (*(hole for hole in self.holes if hole < end), *range(end, stop))
            self.payload = self.payload.tokens(0, stop) if stop else None
            self.decoded = _slice(self.decoded, 0, seq_len - sinks)
        self.sinks = _slice(self.sinks, 0, seq_len)

    def trim(self, room: int) -> None:
        """Forget decoded tokens beyond the first ``room`` quantized ones."""
        self.decoded = _slice(self.decoded, 0, self._without_holes(room))

    def select(self, index: Tensor, sequences: Sequences) -> Self:
        """Copy the sequences ``index``, which may come more than once."""
        exact = {name: getattr(self, name) for name in ("sinks", "window", "decoded")}
        rows: dict[str, Any] = {name: None if x is None else x[index.to(x.device)] for name, x in exact.items()}
        payload = None if self.payload is None else self.payload.batch_select(index)
        return dataclasses.replace(self, sequences=sequences, payload=payload, view=(None, None), **rows)

    def _without_holes(self, stop: int) -> int:
        """Count the tokens that are read among the first ``stop`` quantized ones."""
        return stop - sum(hole < stop for hole in self.holes)

    def _with_holes(self, read: int) -> int:
        """Count the quantized tokens before the one that is read after ``read`` others, without holes just before."""
        for hole in self.holes:
            read += hole < read
        return read

    def _rotated(self, how: Callable[..., Tensor], states: Tensor, start: int) -> Tensor:
        """Apply ``rotate`` or ``unrotate`` to the stored tokens start, start + 1, ..."""
        if self.rotation is None:
            return states
        start += self.first
        tables = self.sequences.table(self.rotation, states.device)
        return self.rotation.with_kernel(how, states, *(x[:, start : start + states.shape[2]] for x in tables))


def quantize_together(stores: Sequence[TokenStore]) -> None:
    """Quantize the oldest tokens of the windows of all layers' ``stores``, keys or values, as ``write`` does those of
    one: what is stored is the first layer's, the others read it."""
    windows = [store.window for store in stores if store.window is not None]
    if not (count := stores[0]._to_quantize(stores[0].parts[2])):
        return
    states = [
        store._rotated(unrotate, window[:, :, :count].float(), sum(store.parts[:2])).to(windows[0].device)
        for store, window in zip(stores, windows, strict=True)
    ]
    for store, window, x in zip(stores, windows, [torch.cat(states, dim=1), *states[1:]], strict=True):
        store._quantized(store.coder.codec.encode(x), window[:, :, count:])


def _tokens(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[2]


def _append(stored: Tensor | None, new: Tensor) -> Tensor:
    return new if stored is None else torch.cat([stored, new], dim=2)


def _slice(stored: Tensor | None, start: int, stop: int | None) -> Tensor | None:
    """Copy tokens ``start`` to ``stop`` alone, without the others kept alive behind a view."""
    length = _tokens(stored)
    stop = length if stop is None else min(max(stop, 0), length)
    if stored is None or stop - start == length:
        return stored
    return stored[:, :, start:stop].clone() if stop > start else None


def _checked(states: Tensor, dtype: torch.dtype, largest: float = math.inf) -> Tensor:
    """Copy ``states`` in 16 bits. Raises ``DataError`` for what the type cannot hold, and for magnitudes above
    ``largest``, which a codec would refuse once the tokens leave the window."""
    out = states.to(dtype, copy=True).contiguous()
    low, high = torch.stack(torch.aminmax(out)).tolist()  # one pass, and NaN is passed on
    if not -largest <= low <= high <= largest or not math.isfinite(high - low):
        raise DataError(
            f"they hold NaN, infinity or magnitudes above {min(largest, torch.finfo(dtype).max):g}; check the model's "
            "weights and dtype, or use an uncompressed cache"
        )
    return out
