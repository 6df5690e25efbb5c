"""One layer's keys or its values in a cache: which tokens are exact, which are quantized, and when they change over."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.cache.positions import Kept, Positions
from vqkv.cache.settings import LiveSettings
from vqkv.codecs.payload import Payload
from vqkv.codecs.predictive import Known, PredictiveCodec
from vqkv.errors import DataError
from vqkv.kernels import KernelView
from vqkv.kernels.rope import rotate, unrotate
from vqkv.models.rope import Rotation
from vqkv.runtime.checks import FP16_MAX

PIECE = {True: 1 << 18, False: 1 << 22}  # values that are decoded at a time on a CPU, and elsewhere
ROUND = 64  # tokens: memory of the same size step after step is memory that the allocator has at hand


@dataclass
class ForwardPass:
    """What layers tell each other in one forward pass: reconstructions of the tokens that were quantized before it
    (``past``), and in it (``fresh``). ``room``: of how many quantized tokens what is read may be kept."""

    past: Known
    fresh: Known
    room: int = 0


@dataclass(eq=False)
class TokenStore:
    """Full-precision sinks, quantized tokens, full-precision recent window: (batch, num_kv_heads, tokens, head_dim).

    ``payload`` holds the quantized tokens in order. ``holes`` are the numbers of those, ascending, that were taken back
    from the end of a block: as forgetting a part of a block would mean to quantize the rest again, at the price of a
    second error, they stay and are never read. ``decoded``: what attention reads of the first ``upto`` quantized
    tokens, if it is kept from step to step. ``positions``: of keys stored before their ``rotation``; ``kept``: the
    tokens that these keys are of, once some were evicted. ``reach``: how many of the last tokens a later query can see,
    of a layer with a sliding window; ``first``: the number of the first token that is still here.
    """

    coder: PredictiveCodec
    settings: LiveSettings
    positions: Positions | None = None
    rotation: Rotation | None = None
    kept: Kept | None = None
    sinks: Tensor | None = None
    payload: Payload | None = None
    window: Tensor | None = None
    holes: tuple[int, ...] = ()
    decoded: Tensor | None = None
    upto: int = 0
    reach: int | None = None
    first: int = 0
    view: tuple[Payload | None, KernelView | None] = None, None  # of the payload it was made of, for kernels

    @property
    def quantized(self) -> int:
        """Tokens in the payload."""
        return 0 if self.payload is None else self.payload.seq_len

    @property
    def parts(self) -> tuple[int, int, int]:
        """Tokens in the sinks, quantized ones that are read, and tokens in the window."""
        sinks, window = (0 if x is None else x.shape[2] for x in (self.sinks, self.window))
        return sinks, self.count(self.quantized), window

    def count(self, stop: int) -> int:
        """Tokens that are read among the first ``stop`` quantized ones."""
        return stop - sum(hole < stop for hole in self.holes)

    def nothing(self, *shape: int) -> Tensor:
        """No tokens, (batch, num_kv_heads, 0, head_dim), as new ones would come."""
        here = next(
            x for x in (self.sinks, self.window, *(self.payload or Payload({})).tensors.values()) if x is not None
        )
        return here.new_empty(shape, dtype=self.settings.dtype)

    def update(self, states: Tensor, step: ForwardPass) -> Tensor:
        """Store new tokens; return all tokens as attention reads them: decoded history and, unless ``in_place``, the
        new tokens as they came."""
        if self.settings.in_place:
            self.write(states, step)
            return self.read(states[:, :, :0], step)
        out = self.read(states, step)
        self.write(states, step)
        return out

    def read(self, states: Tensor, step: ForwardPass) -> Tensor:
        """All stored tokens in order, then ``states``, in their type."""
        sinks, quantized, window = self.parts
        stored = sinks + quantized + window
        length = stored + states.shape[2]
        out = states.new_empty(*states.shape[:2], length + -length % ROUND, states.shape[3]).narrow(2, 0, length)
        self.trim(step.room)
        start = self.count(self.upto)
        for x, at in ((self.sinks, 0), (self.decoded, sinks), (self.window, sinks + quantized), (states, stored)):
            if x is not None:
                out.narrow(2, at, x.shape[2]).copy_(x)
        if quantized > start:
            into = out.narrow(2, sinks + start, quantized - start)
            self._decode(into, sinks + start, step.past)
            self._keep(into, start, step.room)
        return out

    def write(self, states: Tensor, step: ForwardPass) -> None:
        """Store new tokens, then quantize the oldest of those beyond the sinks and the recent window. Raises
        ``DataError`` that names layer and role for what cannot be stored."""
        try:
            self._write(states.detach(), step)  # a stored graph would hold every activation
        except DataError as error:
            role, layer = self.coder.place
            raise DataError(f"the {role}s of layer {layer} cannot be cached: {error}") from error

    def _write(self, states: Tensor, step: ForwardPass) -> None:
        settings, (sinks, quantized, window) = self.settings, self.parts
        if sinks < settings.sink_tokens and states.shape[2] and not self.first:
            head = states[:, :, : settings.sink_tokens - sinks]
            self.sinks = _append(self.sinks, _checked(head, settings.exact))
            sinks, states = sinks + head.shape[2], states[:, :, head.shape[2] :]
        waits = settings.joint or settings.recent_window or settings.block > 1
        if waits and states.shape[2]:  # also what is quantized at once: codes are the same in any pieces
            states = _checked(states, settings.exact, FP16_MAX if self.rotation is None else FP16_MAX / math.sqrt(2))
        spare = max(0, window + states.shape[2] - settings.recent_window)
        flush = 0 if settings.joint else spare - spare % settings.block
        if not flush:
            if states.shape[2]:
                self.window = _append(self.window, states)
            return
        states = _append(self.window, states)
        old, left = states[:, :, :flush].float(), states[:, :, flush:]
        payload = self.coder.encode(self._turn(unrotate, old, sinks + quantized), step.fresh)
        self.payload = payload if self.payload is None else Payload.concat([self.payload, payload])
        self.window, self.view = left.clone() if left.shape[2] else None, (None, None)  # nor keep the old payload

    @staticmethod
    def pack_together(stores: "list[TokenStore]") -> None:
        """Quantize the oldest tokens of the windows of all layers' ``stores``, keys or values, as ``write`` does those
        of one: what is stored is the first layer's, the others read it."""
        first, (sinks, quantized, window) = stores[0], stores[0].parts
        spare = max(0, window - first.settings.recent_window)
        flush = spare - spare % first.settings.block
        if not flush:
            return
        states = [
            store._turn(unrotate, store.window[:, :, :flush].float(), sinks + quantized).to(first.window.device)
            for store in stores
        ]
        for store, x in zip(stores, [torch.cat(states, dim=1), *states[1:]]):
            payload = store.coder.codec.encode(x)
            store.payload = payload if store.payload is None else Payload.concat([store.payload, payload])
            store.window = store.window[:, :, flush:].clone() if window > flush else None

    def drop(self, recorded: int) -> None:
        """Forget tokens that no later query can see, even if the last ``recorded`` are taken back: all sinks, whole
        blocks, and once none is left the window's."""
        sinks, block = self.parts[0], self.settings.block
        spare = 0 if self.reach is None else sum(self.parts) - self.reach - recorded
        if spare <= 0 or spare < sinks:
            return
        gone = min(self.quantized, spare - sinks + len(self.holes)) // block * block
        while (read := self.count(gone)) > spare - sinks:
            gone -= block
        waiting = spare - sinks - read if gone == self.quantized else 0
        self.sinks, self.first = None, self.first + sinks + read + waiting
        if waiting:
            self.window = self.window[:, :, waiting:].clone()
        if gone:
            self.decoded = None if self.upto <= gone else self.decoded[:, :, read:].clone()
            self.payload = self.payload.tokens(gone, self.quantized) if gone < self.quantized else None
            self.holes = tuple(hole - gone for hole in self.holes if hole >= gone)
            self.upto = max(0, self.upto - gone)

    def kernel_view(self, known: Known) -> KernelView | None:
        """The quantized tokens for kernels that decode them as they read; None if there are none, or if more than the
        codec has a say in them, their positions do not count up, or they rotate in a way that kernels do not know."""
        shared = self.coder.prediction is not None or self.coder.place in known.last_reader
        turns = self.positions is not None and (self.positions.explicit is not None or not self.rotation.half_split)
        uneven = self.kept is not None or turns
        if shared or uneven or self.holes or self.payload is None:
            return None
        if self.view[0] is not self.payload:
            self.view = self.payload, self.coder.codec.kernel_view(self.payload)
        return self.view[1]

    def exact(self, states: Tensor) -> Tensor:
        """Sinks, window and the new ``states``, side by side."""
        return torch.cat([*(x.to(states.dtype) for x in (self.sinks, self.window) if x is not None), states], dim=2)

    def truncate(self, seq_len: int) -> None:
        """Keep the first ``seq_len`` tokens. What was quantized stays as it was quantized."""
        sinks, quantized, _ = self.parts
        self.window = _first(self.window, seq_len - sinks - quantized)
        if seq_len < sinks + quantized:
            end, rows = max(0, seq_len - sinks), self.settings.tokens_per_row
            for hole in self.holes:
                end += hole < end
            stop = end + -end % rows
            self.holes = (*(hole for hole in self.holes if hole < end), *range(end, stop))
            self.payload = self.payload.tokens(0, stop) if stop else None
            self.upto = min(self.upto, stop)
            self.decoded = _first(self.decoded, self.count(self.upto))
        self.sinks = _first(self.sinks, seq_len)

    def trim(self, room: int) -> None:
        """Forget decoded tokens beyond the first ``room`` quantized ones."""
        if self.upto > room:
            self.decoded, self.upto = _first(self.decoded, self.count(room)), room

    def select(self, index: Tensor, positions: Positions) -> "TokenStore":
        """A copy with the sequences ``index``, which may come more than once; ``positions``: of all their tokens."""
        tensors = {name: getattr(self, name) for name in ("sinks", "window", "decoded")}
        chosen = {name: None if x is None else x[index.to(x.device)] for name, x in tensors.items()}
        chosen["payload"] = None if self.payload is None else self.payload.batch_select(index)
        chosen["kept"] = None if self.kept is None else self.kept.select(index)
        return dataclasses.replace(self, **chosen, positions=self.positions and positions)

    def number(self, chosen: Tensor) -> None:
        """Note whose keys are left, if of the stored tokens only ``chosen`` (batch, num_kv_heads, kept) will be."""
        if self.positions is not None:
            self.kept = Kept.of(chosen, self.positions.seq_len)

    def _decode(self, out: Tensor, start: int, known: Known) -> None:
        """Fill ``out`` with the quantized tokens from ``upto`` on, of which the first is the ``start``-th of all."""
        place, pieces = start, self._pieces(out, known)
        for first, last in pieces:
            number = self.count(last) - self.count(first)
            into = out if len(pieces) == 1 else out.narrow(2, place - start, number)
            payload = self.payload if last - first == self.quantized else self.payload.tokens(first, last)
            x = self._without_holes(self.coder.decode(payload, known), first)
            into.copy_(self._turn(rotate, x, place))
            place += number

    def _without_holes(self, x: Tensor, first: int) -> Tensor:
        """x, the quantized tokens from the ``first``-th on, less those that are never read."""
        if not self.holes:
            return x
        read = torch.ones(x.shape[2], dtype=torch.bool)
        read[[hole - first for hole in self.holes if 0 <= hole - first < len(read)]] = False
        return x[:, :, read.nonzero()[:, 0].to(x.device)]

    def _turn(self, turn, keys: Tensor, start: int) -> Tensor:
        if self.positions is None:
            return keys
        return self.positions.turn(self.rotation, turn, keys, self.first + start, self.kept)

    def _pieces(self, out: Tensor, known: Known) -> list[tuple[int, int]]:
        """Spans of quantized tokens to decode at a time; all at once where other layers read them too."""
        first, last, coder = self.upto, self.quantized, self.coder
        few, known_elsewhere = PIECE[out.device.type == "cpu"], coder.place in known.last_reader
        if out.numel() <= few or known_elsewhere or coder.prediction is not None:
            return [(first, last)]
        row = coder.tokens_per_row * out.shape[0] * out.shape[1] * out.shape[3]
        step = max(1, few // row) * coder.tokens_per_row
        return [(i, min(i + step, last)) for i in range(first, last, step)]

    def _keep(self, x: Tensor, start: int, room: int) -> None:
        """Keep what fits of ``x``, the decoded tokens from the ``start``-th on."""
        upto = min(self.quantized, room)
        if upto > self.upto:
            fitting = x[:, :, : self.count(upto) - start]
            self.decoded, self.upto = _append(self.decoded, fitting.clone(memory_format=torch.contiguous_format)), upto


def _append(stored: Tensor | None, new: Tensor) -> Tensor:
    return new if stored is None else torch.cat([stored, new], dim=2)


def _first(stored: Tensor | None, tokens: int) -> Tensor | None:
    """The first tokens alone, without the rest kept alive behind a view."""
    if stored is None or tokens >= stored.shape[2]:
        return stored
    return stored[:, :, :tokens].clone() if tokens > 0 else None


def _checked(states: Tensor, dtype: torch.dtype, most: float = math.inf) -> Tensor:
    """A copy in 16 bits that owns just its own storage. Raises ``DataError`` for what the type cannot hold, and for
    magnitudes above ``most``, which a codec would refuse once the tokens leave the window."""
    out = states.to(dtype, copy=True).contiguous()
    low, high = torch.stack(torch.aminmax(out)).tolist()  # one pass, and NaN is passed on
    if not -most <= low <= high <= most or not math.isfinite(high - low):
        raise DataError(
            f"they hold NaN, infinity or magnitudes above {min(most, torch.finfo(dtype).max):g}; check the model's "
            "weights and dtype, or use an uncompressed cache"
        )
    return out
