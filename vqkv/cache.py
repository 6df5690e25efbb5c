"""A transformers ``Cache`` that stores packed payloads and nothing else of a token."""

import copy
import math
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from vqkv.coder import Known
from vqkv.errors import DataError
from vqkv.meter import Report, tensor_bytes
from vqkv.models import rotary_embedding
from vqkv.positions import Positions
from vqkv.precision import full_precision
from vqkv.role import Role, Settings


@dataclass
class Step:
    """What the layers tell each other in one forward pass, so that no history is decoded twice: reconstructions of the
    ``past`` tokens that were packed before, and of those that are packed now (``fresh``). Empty between passes."""

    last_reader: dict
    past: Known = field(init=False)
    fresh: Known = field(init=False)

    def __post_init__(self):
        self.begin()

    def begin(self) -> None:
        """Forget the pass before."""
        self.past, self.fresh = Known(self.last_reader), Known(self.last_reader)


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
    step: "Step"
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
            self.step.begin()
        self.batch_size = key_states.shape[0]
        with full_precision(key_states.device):
            out = [self._pass(role, x) for role, x in zip(self.roles, (key_states, value_states), strict=True)]
        if self.index == self.settings.last_layer:
            self.positions.done()
            self.step.begin()
        return tuple(out)

    def _pass(self, role: Role, states: torch.Tensor) -> torch.Tensor:
        """Store ``states`` and return what attention reads."""
        if self.settings.in_place:
            role.write(states, self.positions, self.settings, self.step.fresh)
            parts = role.read(self.positions, states.dtype, self.step.past)
        else:
            parts = [*role.read(self.positions, states.dtype, self.step.past), states]
            role.write(states, self.positions, self.settings, self.step.fresh)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

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
        if self.index == 0:
            self.step.begin()
        for role in self.roles:
            role.truncate(seq_len, self.positions, self.settings, self.step.past)
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
    sinks and no recent window (the protocol of residual VQ's paper). One forward pass at a time: threads that share a
    model with RoPE would read each other's positions.
    """

    def __init__(self, compressor, model, in_place: bool = False):
        self.compressor = compressor
        compressor.check(model)
        compressor.to(model.device)
        preset = compressor.settings
        positions = Positions(rotary_embedding(model) if preset.pre_rope else None)
        rows = compressor.tokens_per_row
        settings = Settings(
            sink_tokens=0 if in_place else preset.sink_tokens,
            recent_window=0 if in_place else preset.recent_window,
            in_place=in_place,
            rows=rows,
            block=rows if in_place else math.lcm(rows, preset.flush_block),
            dtype=model.dtype,
            last_layer=len(compressor.codecs) - 1,
        )
        step = Step(compressor.last_readers)
        layers = [
            CompressedLayer(i, (Role(key, preset.pre_rope), Role(value, False)), positions, settings, step)
            for i, (key, value) in enumerate(compressor.coders)
        ]
        super().__init__(layers=layers)

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """See ``CompressedLayer.update``. Raises ``DataError`` if an earlier forward pass broke off half-way."""
        if layer_idx == 0 and not all(layer.intact for layer in self.layers):
            raise DataError("an earlier forward pass failed half-way: reset() the cache and feed the tokens again")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises ``DataError`` if a forward pass broke off half-way."""
        if not all(layer.intact for layer in self.layers):
            raise DataError("an earlier forward pass failed half-way: reset() the cache and feed the tokens again")
        super().crop(tokens_to_remove)

    def __deepcopy__(self, memo) -> "CompressedCache":
        """A copy with its own tokens; the compressor, which never changes, is shared."""
        coders = [coder for pair in self.compressor.coders for coder in pair]
        memo |= {id(shared): shared for shared in (self.compressor, *coders)}
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
