"""A transformers ``Cache`` that stores packed payloads and nothing else of a token."""

import copy
import inspect
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from vqkv.cache import saving
from vqkv.cache.batch import Batch, Group, Pair
from vqkv.cache.hooks import watch
from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.packed_attention import packed_states, reads_packed
from vqkv.cache.settings import MOST, LiveSettings
from vqkv.cache.store import TokenStore
from vqkv.kernels.precision import full_precision
from vqkv.models.load import layer_devices, position_rotary
from vqkv.runtime.checks import check_whole


@dataclass(eq=False)
class CompressedLayer(CacheLayerMixin):
    """One layer of a ``CompressedCache``. What it stores is in ``batch``, which all layers share."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    index: int
    batch: Batch

    def __post_init__(self):
        super().__init__()

    @property
    def stores(self) -> tuple[TokenStore, TokenStore]:
        """This layer's keys and values, of the first group of sequences."""
        return self.batch.groups[0].stores[self.index]

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to allocate: payloads grow by concatenation."""
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Store new keys (after RoPE) and values (batch, num_kv_heads, new_tokens, head_dim); return what attention
        reads: decoded history and, unless ``in_place``, the new tokens as they came. Slots of padding read as zeros.
        Where attention can read quantized tokens, the same ``PackedStates`` for both."""
        self.is_initialized = True
        if self.index == 0:
            self.batch.begin(key_states)
        parts = self.batch.split(key_states, value_states)
        with full_precision(key_states.device):
            out = packed_states(self.batch, self.index, key_states, parts) if self.batch.direct else None
            out = (out, out) if out else self.batch.join([self._pass(*part) for part in parts])
        self._end()
        return out

    def _pass(self, group: Group, pair: Pair) -> Pair:
        return tuple(store.update(x, group.step) for store, x in zip(group.stores[self.index], pair, strict=True))

    def _end(self) -> None:
        if self.index == self.batch.settings.num_layers - 1:
            self.batch.end()

    def get_seq_length(self) -> int:
        """Slots of this layer: tokens, padding included."""
        return self.batch.slots

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """(length of keys the next ``query_length`` queries read, offset)."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + length, 0

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def reset(self) -> None:
        """Forget every token, of all layers."""
        self.batch.reset()
        self.is_initialized = False


class CompressedCache(Cache):
    """Pass it to a model or to ``generate`` as ``past_key_values``. Made by ``Compressor.new_cache``.

    ``in_place``: pack every token at once and let attention read the packed form of the current tokens too, with no
    sinks and no recent window (the protocol of residual VQ's paper). ``decoded_cache_bytes``: how much of what
    attention reads of quantized tokens is kept from step to step, the oldest tokens first; by default nothing, so that
    every step decodes the history once. Padding in ``attention_mask`` is not stored. Layers with a sliding window keep
    all their tokens, of which the model's mask shows attention the last. One forward pass at a time.
    """

    layer_class = CompressedLayer

    def __init__(self, compressor, model, in_place: bool = False, decoded_cache_bytes: int = 0):
        check_whole("decoded_cache_bytes", decoded_cache_bytes, 0, MOST)
        compressor.check(model)
        compressor.to_layers(layer_devices(model))
        self.compressor, self.model = compressor, weakref.ref(model)
        self.settings = LiveSettings.of(compressor, model, in_place, decoded_cache_bytes)
        rotary = position_rotary(model) if self.settings.pre_rope else None
        self.batch = Batch(compressor, self.settings, rotary)
        super().__init__(layers=[self.layer_class(i, self.batch) for i in range(self.settings.num_layers)])
        self._watch(model)

    def _watch(self, model) -> None:
        """Have ``see`` called at the beginning of every forward pass, for its attention_mask."""
        self._watch_positions()
        watch(self, "see", model.base_model.register_forward_pre_hook, with_kwargs=True)

    def _watch_positions(self) -> None:
        if self.batch.rotary is not None:
            watch(self.batch, "see_positions", self.batch.rotary.register_forward_pre_hook, with_kwargs=True)

    def see(self, module, args, kwargs) -> None:
        """A forward pass begins, perhaps with another cache."""
        if any(value is self for value in (*args, *kwargs.values())):
            given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
            self.batch.see(given.get("attention_mask"))

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Hand a layer its new tokens, as ``CompressedLayer.update`` says. Raises ``DataError`` if an earlier forward
        pass broke off half-way."""
        if torch.compiler.is_compiling():
            return self._update_uncompiled(key_states, value_states, layer_idx)
        if layer_idx == 0:
            self.batch.check_complete()
            model = self.model()
            self.batch.direct = (
                self.batch.direct
                and model is not None
                and reads_packed(model, self.batch.slots + key_states.shape[2])
                and not self.settings.decoded_cache_bytes
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def _update_uncompiled(self, key_states, value_states, layer_idx: int):
        self.batch.direct = False  # a graph takes tensors only
        return self.update(key_states, value_states, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (transformers passes a negative number). Raises ``DataError`` if
        a forward pass broke off half-way, ``ValueError`` for a positive number."""
        self.batch.check_complete()
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove from the end")
        self.batch.truncate(self.batch.slots + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch.size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences that ``indices`` (integers or a boolean mask) names. Raises ``IndexError`` for one that
        is not here, ``DataError`` if a forward pass broke off half-way."""
        self.batch.check_complete()
        self.batch.select(indices)

    def __deepcopy__(self, memo) -> "CompressedCache":
        """A copy with its own tokens; compressor and rotary embedding, which never change, are shared."""
        coders = [coder for pair in self.compressor.coders for coder in pair]
        memo |= {id(shared): shared for shared in (self.compressor, self.batch.rotary, *coders)}
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if (model := self.model()) is not None:
            twin._watch(model)
        return twin

    def report(self) -> Report:
        """Bytes by kind, measured from the storage of the tensors held now."""
        groups, settings = self.batch.groups, self.settings
        kinds = Counter(sinks=0, window=0, decoded=0)
        kinds["positions"] = tensor_bytes([group.positions.explicit for group in groups])
        kinds["padding"] = tensor_bytes(self.batch.tokens)
        packed_bytes = packed_values = values = 0
        for group in groups:
            per_token = len(group.rows) * settings.num_kv_heads * settings.head_dim
            for store in group.all_stores:
                kinds.update({name: tensor_bytes(getattr(store, name)) for name in ("sinks", "window", "decoded")})
                if store.payload is not None:
                    kinds.update({name: tensor_bytes(tensor) for name, tensor in store.payload.tensors.items()})
                    packed_bytes += tensor_bytes(store.payload)
                packed_values += store.parts[1] * per_token
                values += sum(store.parts) * per_token
        side = self.compressor.side_bytes
        return Report(dict(kinds), packed_bytes, packed_values, values, self.batch.slots, self.batch.size, side)

    def __repr__(self) -> str:
        return f"CompressedCache({self.compressor.name}: {self.report()})"

    def save(self, path) -> None:
        """Write all that is stored to one safetensors file, as ``saving`` says; only what ``decoded_cache_bytes`` keeps
        is left out. Raises ``DataError`` if a forward pass broke off half-way, ``OSError`` if the file cannot be
        written: an older one at ``path`` then stays as it was."""
        saving.save(self, path)

    @classmethod
    def load(cls, path, compressor, model, decoded_cache_bytes: int = 0) -> "CompressedCache":
        """The cache that ``save`` wrote, which goes on as if it had never been away. Raises ``FormatError`` for a file
        that was cut or altered, or was saved with another compressor or another model (or dtype) than these."""
        return saving.load(cls, path, compressor, model, decoded_cache_bytes)
