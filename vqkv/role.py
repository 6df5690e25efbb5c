"""One layer's keys or its values in a cache: which tokens are exact, which are packed, and when they change over."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.payload import Payload
from vqkv.coder import Coder, Known
from vqkv.errors import DataError
from vqkv.positions import Positions, pick_rows


@dataclass
class Settings:
    """What the layers of one cache share. ``block``: tokens are packed in multiples of it; ``rows``: the tokens that
    every codec can pack and unpack without others."""

    sink_tokens: int
    recent_window: int
    in_place: bool
    rows: int
    block: int
    dtype: torch.dtype
    last_layer: int

    @property
    def exact(self) -> torch.dtype:
        """What sinks and window are kept in: the model's dtype if it has 16 bits, else fp16."""
        return self.dtype if self.dtype.itemsize == 2 else torch.float16


@dataclass
class Role:
    """One layer's keys or its values: full-precision sinks, packed history, full-precision recent window."""

    coder: Coder
    rotated: bool
    sinks: torch.Tensor | None = None
    packed: Payload | None = None
    window: torch.Tensor | None = None

    @property
    def parts(self) -> tuple[int, int, int]:
        """Tokens in the sinks, in the packed history and in the window."""
        window = 0 if self.window is None else self.window.shape[-2]
        return (
            0 if self.sinks is None else self.sinks.shape[-2],
            0 if self.packed is None else self.packed.seq_len,
            window,
        )

    def read(self, positions: Positions, dtype: torch.dtype, known: Known) -> list[torch.Tensor]:
        """The stored tokens in order, as attention reads them; ``known``: other places' packed tokens."""
        sinks, packed, _ = self.parts
        out = [] if self.sinks is None else [self.sinks.to(dtype)]
        if packed:
            history = self.coder.decode(self.packed, known)
            out.append((positions.rotate(history, sinks) if self.rotated else history).to(dtype))
        return out if self.window is None else [*out, self.window.to(dtype)]

    def write(self, states: torch.Tensor, positions: Positions, settings: "Settings", known: Known) -> None:
        """Store new tokens, then pack the oldest of those beyond the sinks and the recent window; ``known``: other
        places' tokens that are packed in this step."""
        states = states.detach().float()  # a stored graph would hold every activation
        missing = settings.sink_tokens - self.parts[0]
        if missing > 0:
            head, states = states[..., :missing, :], states[..., missing:, :]
            self.sinks = _append(self.sinks, _checked(head, settings.exact))
        sinks, packed, window = self.parts
        if window:
            states = torch.cat([self.window.float(), states], dim=-2)
        spare = max(0, states.shape[-2] - settings.recent_window)
        flush = spare - spare % settings.block
        window = _checked(states[..., flush:, :], settings.exact) if states.shape[-2] > flush else None
        if flush:  # last of all that may fail: a write that is refused must not look like one that was not
            old = states[..., :flush, :]
            payload = self.coder.encode(positions.unrotate(old, sinks + packed) if self.rotated else old, known)
            self.packed = payload if self.packed is None else Payload.concat([self.packed, payload])
        self.window = window

    def truncate(self, seq_len: int, positions: Positions, settings: "Settings", known: Known) -> None:
        """Keep the first ``seq_len`` tokens; what is left of a block of tokens goes back to the window; ``known``:
        other places' tokens of that block."""
        sinks, packed, _ = self.parts
        keep_window = seq_len - sinks - packed
        if self.window is not None:
            self.window = self.window[..., :keep_window, :].clone() if keep_window > 0 else None
        if self.packed is not None and keep_window < 0:
            keep = max(0, seq_len - sinks)
            whole = keep - keep % settings.rows
            if keep > whole:
                block = self.packed.tokens(whole, whole + settings.rows)
                tail = self.coder.decode(block, known)[..., : keep - whole, :]
                tail = positions.rotate(tail, sinks + whole) if self.rotated else tail
                self.window = _checked(tail, settings.exact)
            self.packed = self.packed.tokens(0, whole) if whole else None
        if self.sinks is not None and seq_len < sinks:
            self.sinks = self.sinks[..., :seq_len, :].clone() if seq_len else None

    def select(self, index: torch.Tensor) -> None:
        """Keep (or repeat) the sequences of the batch that ``index`` names."""
        if self.sinks is not None:
            self.sinks = self.sinks[index.to(self.sinks.device)]
        if self.window is not None:
            self.window = self.window[index.to(self.window.device)]
        if self.packed is not None:
            self.packed = self.packed.batch_select(index)


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
            self.packed = _pick_rows(self.packed, rows)


def _pick_rows(payload: Payload, index: Tensor) -> Payload | None:
    if type(payload) is not Payload or payload.shape[:2] != index.shape[:2]:
        raise DataError(
            f"this codec's {type(payload).__name__} of shape {payload.shape} mixes heads or has rows of unequal size, "
            "from which one head's tokens cannot be dropped: use H2O(..., streaming=False)"
        )
    if not index.shape[-1]:
        return None
    return dataclasses.replace(payload, fields={name: pick_rows(x, index) for name, x in payload.fields.items()})


def _append(stored: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if stored is None else torch.cat([stored, new], dim=-2)


def _checked(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in 16 bits that owns just its own storage; refuses what the dtype cannot hold."""
    out = states.to(dtype, copy=True).contiguous()
    if not out.isfinite().all():
        raise DataError(f"keys or values hold NaN, infinity or numbers beyond {dtype}'s range and cannot be cached")
    return out
