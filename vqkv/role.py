"""One layer's keys or its values in a cache: which tokens are exact, which are packed, and when they change over."""

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.codec.payload import Payload
from vqkv.coder import Coder, Known
from vqkv.errors import DataError
from vqkv.history import History
from vqkv.kernels import Packed
from vqkv.positions import Positions, pick_rows

PIECE = {True: 1 << 18, False: 1 << 22}  # values that are decoded at a time on a CPU, and elsewhere
ROUND = 64  # tokens: memory of the same size step after step is memory that the allocator has at hand


@dataclass
class Settings:
    """What the layers of one cache share. ``block``: tokens are packed in multiples of it; ``rows``: the tokens that
    every codec can pack and unpack without others; ``shape``: (layers, num_kv_heads, head_dim)."""

    sink_tokens: int
    recent_window: int
    in_place: bool
    rows: int
    block: int
    dtype: torch.dtype
    shape: tuple[int, int, int]
    decoded_cache_bytes: int = 0

    @property
    def exact(self) -> torch.dtype:
        """What sinks and window are kept in: the model's dtype if it has 16 bits, else fp16."""
        return self.dtype if self.dtype.itemsize == 2 else torch.float16

    @property
    def last_layer(self) -> int:
        """The layer with which a forward pass ends."""
        return self.shape[0] - 1

    def room(self, batch_size: int) -> int:
        """Packed tokens whose decoded keys and values, of all layers and sequences, ``decoded_cache_bytes`` holds;
        whole blocks."""
        layers, heads, head_dim = self.shape
        tokens = self.decoded_cache_bytes // (2 * layers * heads * head_dim * self.dtype.itemsize * max(1, batch_size))
        return tokens - tokens % self.rows


@dataclass
class Role:
    """One layer's keys or its values: full-precision sinks, packed history, full-precision recent window.

    ``decoded``: what attention reads of the first ``upto`` packed tokens, if it is kept from step to step.
    """

    coder: Coder
    rotated: bool
    sinks: Tensor | None = None
    history: History = field(default_factory=History)
    window: Tensor | None = None
    decoded: Tensor | None = None
    upto: int = 0

    @property
    def packed(self) -> Payload | None:
        """What is stored of the packed tokens."""
        return self.history.payload

    @property
    def parts(self) -> tuple[int, int, int]:
        """Tokens in the sinks, in the packed history and in the window."""
        sinks = 0 if self.sinks is None else self.sinks.shape[-2]
        return sinks, len(self.history), 0 if self.window is None else self.window.shape[-2]

    def read(self, out: Tensor, positions: Positions, known: Known, room: int = 0) -> None:
        """Fill ``out`` (batch, num_kv_heads, stored tokens or more, head_dim) with the tokens in order, as attention
        reads them. ``known``: other places' packed tokens; ``room``: of how many packed ones what is read may be kept
        for the next step."""
        self.trim(room)
        sinks, packed, _ = self.parts
        start = self.history.count(self.upto)
        for x, at in ((self.sinks, 0), (self.decoded, sinks), (self.window, sinks + packed)):
            if x is not None:
                out.narrow(2, at, x.shape[2]).copy_(x)
        if packed > start:
            into = out.narrow(2, sinks + start, packed - start)
            self._read_packed(into, positions, known, sinks + start)
            self._keep(into, start, room)

    def all(self, like: Tensor, positions: Positions, known: Known, room: int = 0, more: int = 0) -> Tensor:
        """What ``read`` reads, of ``like``'s dtype, with place for ``more`` tokens after it."""
        stored = sum(self.parts)
        room_for = stored + more + -(stored + more) % ROUND
        out = like.new_empty(*like.shape[:2], room_for, like.shape[-1]).narrow(2, 0, stored + more)
        self.read(out, positions, known, room)
        return out

    def exact(self, states: Tensor) -> Tensor:
        """Sinks, window and the new ``states`` (batch, num_kv_heads, tokens, head_dim), side by side."""
        stored = [x.to(states.dtype) for x in (self.sinks, self.window) if x is not None]
        return torch.cat([*stored, states], dim=2)

    def readable(self, known: Known) -> Packed | None:
        """The packed tokens for kernels that decode them as they read; None if there are none, or if more than the
        codec has a say in them."""
        coder, history = self.coder, self.history
        plain = coder.prediction is None and coder.place not in known.last_reader and not history.holes
        return coder.codec.packed(history.payload) if plain and history.payload is not None else None

    def _read_packed(self, out: Tensor, positions: Positions, known: Known, start: int) -> None:
        """Fill ``out`` with the packed tokens that are not kept decoded: the ``start``-th of all tokens and on."""
        turned = self.rotated and positions.rotary is not None
        place, pieces = start, self._pieces(out, known)
        for first, last in pieces:
            count = self.history.count(last) - self.history.count(first)
            into = out if len(pieces) == 1 else out.narrow(2, place - start, count)
            x = self.history.decode(self.coder, known, first, last, None if turned else into)
            if x is not into:
                into.copy_(positions.rotate(x, place) if turned else x)
            place += count

    def _pieces(self, out: Tensor, known: Known) -> list[tuple[int, int]]:
        """Spans of the packed tokens that are decoded at a time, so that what decoding works with stays small. All at
        once where it works with nothing, and where other places read the tokens too."""
        first, last, coder = self.upto, self.history.packed, self.coder
        few, known_elsewhere = PIECE[out.device.type == "cpu"], coder.place in known.last_reader
        if out.numel() <= few or known_elsewhere or coder.prediction is not None:
            return [(first, last)]
        if coder.codec.decodes_directly(out) and not self.rotated:
            return [(first, last)]
        row = coder.tokens_per_row * out.shape[0] * out.shape[1] * out.shape[3]
        step = max(1, few // row) * coder.tokens_per_row
        return [(i, min(i + step, last)) for i in range(first, last, step)]

    def _keep(self, x: Tensor, start: int, room: int) -> None:
        """Keep what fits of ``x``, the decoded tokens from the ``start``-th on."""
        upto = min(self.history.packed, room)
        if upto > self.upto:
            fitting = x[..., : self.history.count(upto) - start, :]
            self.decoded, self.upto = _append(self.decoded, fitting.clone(memory_format=torch.contiguous_format)), upto

    def trim(self, room: int) -> None:
        """Forget decoded tokens beyond the first ``room`` packed ones."""
        if self.upto > room:
            keep = self.history.count(room)
            self.decoded, self.upto = (self.decoded[..., :keep, :].clone(), room) if room else (None, 0)

    def write(self, states: Tensor, positions: Positions, settings: Settings, known: Known) -> None:
        """Store new tokens, then pack the oldest of those beyond the sinks and the recent window; ``known``: other
        places' tokens that are packed in this step."""
        states = states.detach()  # a stored graph would hold every activation
        sinks, packed, window = self.parts
        if sinks < settings.sink_tokens and states.shape[-2]:
            head = states[..., : settings.sink_tokens - sinks, :]
            self.sinks = _append(self.sinks, _checked(head, settings.exact))
            sinks, states = sinks + head.shape[-2], states[..., head.shape[-2] :, :]
        spare = max(0, window + states.shape[-2] - settings.recent_window)
        flush = spare - spare % settings.block
        if not flush:
            if states.shape[-2]:
                self.window = _append(self.window, _checked(states, settings.exact))
            return
        states = states.float() if self.window is None else torch.cat([self.window.float(), states.float()], dim=-2)
        window = _checked(states[..., flush:, :], settings.exact) if states.shape[-2] > flush else None
        old = states[..., :flush, :]  # last of all that may fail: a refused write must not look like one that was not
        self.history.append(self.coder.encode(positions.unrotate(old, sinks + packed) if self.rotated else old, known))
        self.window = window

    def truncate(self, seq_len: int, settings: Settings) -> None:
        """Keep the first ``seq_len`` tokens. What was packed stays as it was packed."""
        sinks, packed, _ = self.parts
        keep_window = seq_len - sinks - packed
        if self.window is not None:
            self.window = self.window[..., :keep_window, :].clone() if keep_window > 0 else None
        if keep_window < 0:
            self.history.truncate(max(0, seq_len - sinks), settings.rows)
            if self.upto > self.history.packed or (self.upto and self.decoded.shape[-2] > len(self.history)):
                self.upto = min(self.upto, self.history.packed)
                keep = self.history.count(self.upto)
                self.decoded = self.decoded[..., :keep, :].clone() if keep else None
        if self.sinks is not None and seq_len < sinks:
            self.sinks = self.sinks[..., :seq_len, :].clone() if seq_len else None

    def select(self, index: Tensor) -> "Role":
        """A copy with the sequences that ``index`` names, which may come more than once."""
        tensors = {name: getattr(self, name) for name in ("sinks", "window", "decoded")}
        chosen = {name: None if x is None else x[index.to(x.device)] for name, x in tensors.items()}
        return dataclasses.replace(self, **chosen, history=self.history.select(index))


@dataclass
class HeldRole(Role):
    """Keys or values that are packed only once attention has told which of them matter."""

    fresh: Tensor | None = None

    def write(self, states: Tensor, positions, settings, known) -> None:
        """Hold new tokens back until ``store``."""
        if self.fresh is not None:
            raise DataError("an earlier forward pass failed half-way: reset() the cache and feed the tokens again")
        self.fresh = states.detach()

    def store(self, positions, settings, known) -> None:
        """Store the tokens held back, as ``Role.write`` does."""
        states, self.fresh = self.fresh, None
        super().write(states, positions, settings, known)

    def evict(self, chosen: Tensor) -> None:
        """Drop all packed tokens but ``chosen`` (of the stored ones; all sinks and the window are among them)."""
        sinks, packed, window = self.parts
        rows = chosen[..., sinks : chosen.shape[-1] - window] - sinks
        if rows.shape[-1] < packed:
            self.history = History(_pick_rows(self.packed, rows))


def _pick_rows(payload: Payload, index: Tensor) -> Payload | None:
    if type(payload) is not Payload or payload.shape[:2] != index.shape[:2]:
        raise DataError(
            f"this codec's {type(payload).__name__} of shape {payload.shape} mixes heads or has rows of unequal size, "
            "from which one head's tokens cannot be dropped: use H2O(..., streaming=False)"
        )
    if not index.shape[-1]:
        return None
    return dataclasses.replace(payload, fields={name: pick_rows(x, index) for name, x in payload.fields.items()})


def _append(stored: Tensor | None, new: Tensor) -> Tensor:
    return new if stored is None else torch.cat([stored, new], dim=-2)


def _checked(states: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in 16 bits that owns just its own storage; refuses what the dtype cannot hold."""
    out = states.to(dtype, copy=True).contiguous()
    if not math.isfinite(out.sum(dtype=torch.float64)):  # one step where isfinite().all() takes three
        raise DataError(f"keys or values hold NaN, infinity or numbers beyond {dtype}'s range and cannot be cached")
    return out
