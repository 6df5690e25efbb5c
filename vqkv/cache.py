"""A transformers ``Cache`` that stores packed payloads and nothing else of a token."""

import copy
import math
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from vqkv.codec.base import Codec
from vqkv.codec.payload import Payload
from vqkv.errors import DataError
from vqkv.meter import Report, tensor_bytes
from vqkv.models import rotary_embedding
from vqkv.positions import Positions


@dataclass
class Role:
    """One layer's keys or its values: full-precision sinks, packed history, full-precision recent window."""

    codec: Codec
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

    def read(self, positions: Positions, dtype: torch.dtype) -> list[torch.Tensor]:
        """The stored tokens in order, as attention reads them."""
        sinks, packed, _ = self.parts
        out = [] if self.sinks is None else [self.sinks.to(dtype)]
        if packed:
            history = self.codec.decode(self.packed)
            out.append((positions.rotate(history, sinks) if self.rotated else history).to(dtype))
        return out if self.window is None else [*out, self.window.to(dtype)]

    def write(self, states: torch.Tensor, positions: Positions, settings: "Settings") -> None:
        """Store new tokens, then pack the oldest of those beyond the sinks and the recent window."""
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
            payload = self.codec.encode(positions.unrotate(old, sinks + packed) if self.rotated else old)
            self.packed = payload if self.packed is None else Payload.concat([self.packed, payload])
        self.window = window

    def truncate(self, seq_len: int, positions: Positions, settings: "Settings") -> None:
        """Keep the first ``seq_len`` tokens; what is left of a block of tokens goes back to the window."""
        sinks, packed, _ = self.parts
        keep_window = seq_len - sinks - packed
        if self.window is not None:
            self.window = self.window[..., :keep_window, :].clone() if keep_window > 0 else None
        if self.packed is not None and keep_window < 0:
            keep = max(0, seq_len - sinks)
            whole = keep - keep % self.packed.tokens_per_row
            if keep > whole:
                block = self.packed.tokens(whole, whole + self.packed.tokens_per_row)
                tail = self.codec.decode(block)[..., : keep - whole, :]
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
class Settings:
    """What the layers of one cache share. ``block``: tokens are packed in multiples of it."""

    sink_tokens: int
    recent_window: int
    in_place: bool
    block: int
    dtype: torch.dtype
    last_layer: int

    @property
    def exact(self) -> torch.dtype:
        """What sinks and window are kept in: the model's dtype if it has 16 bits, else fp16."""
        return self.dtype if self.dtype.itemsize == 2 else torch.float16


@dataclass(eq=False)
class CompressedLayer(CacheLayerMixin):
    """One layer of a ``CompressedCache``."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    index: int
    roles: tuple[Role, Role]
    positions: Positions
    settings: Settings
    batch_size: int = field(default=0, init=False)

    def __post_init__(self):
        super().__init__()

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to allocate: payloads grow by concatenation."""
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Store new keys (after RoPE) and values (batch, num_kv_heads, new_tokens, head_dim); return what attention
        reads: decoded history and, unless ``in_place``, the new tokens as they came."""
        self.lazy_initialization(key_states, value_states)
        if self.get_seq_length() and key_states.shape[0] != self.batch_size:
            raise DataError(
                f"the cache holds {self.batch_size} sequences, but {key_states.shape[0]} came: "
                "reset() it or make a new one"
            )
        if self.index == 0:
            self.positions.advance(key_states.shape[-2], key_states.shape[0], key_states)
        self.batch_size = key_states.shape[0]
        out = []
        for role, states in zip(self.roles, (key_states, value_states), strict=True):
            if self.settings.in_place:
                role.write(states, self.positions, self.settings)
                parts = role.read(self.positions, states.dtype)
            else:
                parts = [*role.read(self.positions, states.dtype), states]
                role.write(states, self.positions, self.settings)
            out.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2))
        if self.index == self.settings.last_layer:
            self.positions.done()
        return tuple(out)

    @property
    def intact(self) -> bool:
        """Whether keys and values hold the tokens whose positions are known: not so after a write that failed."""
        return {sum(role.parts) for role in self.roles} == {self.positions.seq_len}

    def get_seq_length(self) -> int:
        """Tokens stored in this layer."""
        return sum(self.roles[0].parts)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """(length of keys the next ``query_length`` queries read, offset)."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + length, 0

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def reset(self) -> None:
        """Forget every token."""
        self._truncate(0)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (transformers passes a negative number)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove from the end")
        self._truncate(max(0, self.get_seq_length() + tokens_to_remove))

    def _truncate(self, seq_len: int) -> None:
        for role in self.roles:
            role.truncate(seq_len, self.positions, self.settings)
        if self.index == 0:
            self.positions.truncate(seq_len)
        self.positions.done()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that ``indices`` (integers or a boolean mask) names."""
        indices = indices.nonzero().flatten() if indices.dtype is torch.bool else indices
        for role in self.roles:
            role.select(indices)
        self.batch_size = len(indices)
        if self.index == 0:
            self.positions.select(lambda rows: rows[indices.to(rows.device)] if len(rows) > 1 else rows)


class CompressedCache(Cache):
    """Pass it to a model or to ``generate`` as ``past_key_values``. Made by ``Compressor.new_cache``.

    ``in_place``: pack every token at once and let attention read the packed form of the current tokens too, with no
    sinks and no recent window (the protocol of residual VQ's paper).
    """

    def __init__(self, compressor, model, in_place: bool = False):
        self.compressor = compressor
        compressor.check(model)
        for codec in (codec for pair in compressor.codecs for codec in pair):
            codec.to(model.device)
        preset = compressor.settings
        positions = Positions(rotary_embedding(model) if preset.pre_rope else None)
        rows = math.lcm(*(codec.tokens_per_row for pair in compressor.codecs for codec in pair))
        settings = Settings(
            sink_tokens=0 if in_place else preset.sink_tokens,
            recent_window=0 if in_place else preset.recent_window,
            in_place=in_place,
            block=rows if in_place else math.lcm(rows, preset.flush_block),
            dtype=model.dtype,
            last_layer=len(compressor.codecs) - 1,
        )
        layers = [
            CompressedLayer(i, (Role(key, preset.pre_rope), Role(value, False)), positions, settings)
            for i, (key, value) in enumerate(compressor.codecs)
        ]
        super().__init__(layers=layers)

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """See ``CompressedLayer.update``. Raises ``DataError`` if an earlier forward pass broke off half-way."""
        if layer_idx == 0 and not all(layer.intact for layer in self.layers):
            raise DataError("an earlier forward pass failed half-way: reset() the cache and feed the tokens again")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __deepcopy__(self, memo) -> "CompressedCache":
        """A copy with its own tokens; the compressor, which never changes, is shared."""
        codecs = [codec for pair in self.compressor.codecs for codec in pair]
        memo |= {id(shared): shared for shared in (self.compressor, *codecs)}
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def report(self) -> Report:
        """Bytes by kind, measured from the storage of the tensors held now."""
        kinds: dict[str, int] = {"sinks": 0, "window": 0, "positions": tensor_bytes(self.layers[0].positions.explicit)}
        packed_bytes = packed_values = values = 0
        per_token = (
            self.layers[0].batch_size * self.compressor.model["num_kv_heads"] * self.compressor.model["head_dim"]
        )
        for role in (role for layer in self.layers for role in layer.roles):
            kinds["sinks"] += tensor_bytes(role.sinks)
            kinds["window"] += tensor_bytes(role.window)
            if role.packed is not None:
                for name, tensor in role.packed.tensors.items():
                    kinds[name] = kinds.get(name, 0) + tensor_bytes(tensor)
                packed_bytes += tensor_bytes(role.packed)
            packed_values += role.parts[1] * per_token
            values += sum(role.parts) * per_token
        first = self.layers[0]
        side = self.compressor.side_bytes
        return Report(kinds, packed_bytes, packed_values, values, first.get_seq_length(), first.batch_size, side)

    def __repr__(self) -> str:
        return f"CompressedCache({self.compressor.name}: {self.report()})"


def full_cache(model, keys: list[torch.Tensor], values: list[torch.Tensor]) -> DynamicCache:
    """transformers' uncompressed cache holding given keys (after RoPE) and values, lists over layers of
    (batch, num_kv_heads, seq_len, head_dim), in the model's dtype."""
    cache = DynamicCache()
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        cache.update(*(x.to(model.device, model.dtype) for x in pair), layer)
    return cache


def _append(stored: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if stored is None else torch.cat([stored, new], dim=-2)


def _checked(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in 16 bits that owns just its own storage; refuses what the dtype cannot hold."""
    out = states.to(dtype, copy=True).contiguous()
    if not out.isfinite().all():
        raise DataError(f"keys or values hold NaN, infinity or numbers beyond {dtype}'s range and cannot be cached")
    return out
