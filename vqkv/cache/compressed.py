"""A transformers ``Cache`` that stores packed payloads and nothing else of a token."""

import copy
import dataclasses
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from vqkv.cache import saving
from vqkv.cache.batch import Batch
from vqkv.cache.layer import CompressedLayer, MixedLayer
from vqkv.cache.meter import Report, tensor_bytes, tensors
from vqkv.cache.packed_attention import reads_packed
from vqkv.cache.settings import MOST, LiveSettings
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError
from vqkv.models.identity import stamp, switches
from vqkv.models.layers import kv_layers
from vqkv.models.load import layer_devices
from vqkv.models.plain import plain
from vqkv.models.rope import Rotation, rotations
from vqkv.runtime.checks import check_whole

_registering = threading.Lock()


@dataclasses.dataclass(frozen=True)
class PassHook:
    """On a model for good, as hooks that come and go race with passes of other threads: calls ``method`` of each of
    this model's caches that a pass is given."""

    method: str

    @torch.compiler.disable
    def __call__(self, module, args, kwargs=None, output=None) -> None:
        """Without ``kwargs`` torch is still registering it, for a cache that no pass has yet."""
        for given in (*args, *(kwargs or {}).values()):
            own = isinstance(given, CompressedCache) and given.model()  # a copied model has copies of its hooks
            if own and module in (own, *_first_modules(own)) and hasattr(given, self.method):
                getattr(given, self.method)(module, args, kwargs)


def _first_modules(model) -> list:
    """The modules that may get a pass's mask and positions first: some models call their decoder themselves (OPT)."""
    return [model.base_model, model.get_decoder()]


def watch(method: str, hooks: dict, register: Callable, **options) -> None:
    """``register`` a ``PassHook`` that is not yet among ``hooks``."""
    with _registering:
        if PassHook(method) not in [*hooks.values()]:
            register(PassHook(method), with_kwargs=True, **options)


class CompressedCache(Cache):
    """Pass it to a model or to ``generate`` as ``past_key_values``. Made by ``Compressor.new_cache``.

    ``in_place``: pack every token at once and let attention read the current tokens packed too, with no sinks and no
    recent window (residual VQ's protocol). ``decoded_cache_bytes``: how much of what attention reads of quantized
    tokens is kept from step to step, the oldest tokens first; by default every step decodes the history once. Padding
    in ``attention_mask`` is not stored. Layers with a sliding window drop blocks of tokens that no query can see any
    more, but not under predictors or in padded batches, where tokens must line up; what dropped tokens cannot be
    cropped or saved. One forward pass at a time.
    """

    layer_class = CompressedLayer
    _is_user_defined = 1  # ``generate`` writes True as it begins

    def __init__(self, compressor, model, in_place: bool = False, decoded_cache_bytes: int = 0):
        check_whole("decoded_cache_bytes", decoded_cache_bytes, 0, MOST)
        model = plain(model)
        if model.training and getattr(model, "is_gradient_checkpointing", False):
            raise DataError(
                "gradient checkpointing turns caches off: model.gradient_checkpointing_disable(), or .eval()"
            )
        compressor.check(model)
        compressor.to_layers(layer_devices(model))
        self.compressor, self.model = compressor, weakref.ref(model)
        self.read_by: tuple | None = None  # stamp and switches of the model that read the tokens; () of several
        own, pre_rope = kv_layers(model), compressor.settings.pre_rope
        self.settings = LiveSettings.of(compressor, model, in_place, decoded_cache_bytes)
        turns: list[Rotation | None] = rotations(model, pre_rope) if pre_rope else [None] * len(own)
        layers = DynamicCache(config=model.config).layers
        windows = [getattr(layers[layer.layer_idx], "sliding_window", None) for layer in own]
        self.reaches = [window and window - 1 for window in windows]
        # where layers are predicted from each other their tokens must line up
        kept: list[int | None] = [None] * len(windows) if compressor.predictions else self.reaches
        self.batch = Batch(compressor, compressor.coders, self.settings, turns, kept)
        for place, layer in enumerate(own):
            layers[layer.layer_idx] = self._layer(place, layers[layer.layer_idx])
        super().__init__(layers=layers)
        self._watch(model)

    def _layer(self, number: int, theirs) -> CompressedLayer:
        """In place of transformers' own."""
        if isinstance(theirs, LinearAttentionLayer):
            return MixedLayer(number, self.batch, theirs.number_of_states)
        return self.layer_class(number, self.batch)

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that store keys and values."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def with_states(self) -> list[LinearAttentionLayer]:
        """A hybrid's layers that have other states, which are kept as transformers does."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    @property
    def is_linear(self) -> list[bool]:
        """By layer: whether it has states and no keys and values."""
        return [layer in self.with_states and layer not in self.compressed for layer in self.layers]

    def _watch(self, model) -> None:
        """Have ``see`` called at the beginning of every forward pass, for its attention_mask and position_ids."""
        for module in _first_modules(model):
            watch("see", module._forward_pre_hooks, module.register_forward_pre_hook)

    def _note_model(self) -> None:
        """Which model reads the first token, and that none of its adapters comes or goes before later ones."""
        if (model := self.model()) is not None:
            if not self.batch.slots:
                self.read_by = stamp(model), switches(model)
            elif self.read_by and self.read_by[1] != switches(model):
                self.read_by = ()

    def see(self, module, args, kwargs) -> None:
        """A forward pass begins, perhaps with another cache. Raises ``DataError`` unless it begins where this ends."""
        if self.batch.seen_by not in (None, id(module)):
            return  # the outer module has told
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
        begins, self._is_user_defined = self._is_user_defined is True, 1
        _check_input(self.batch.slots, given, begins)
        self._note_model()
        self.batch.see(given.get("attention_mask"), given.get("position_ids"), id(module))

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Hand a layer its new tokens, as ``CompressedLayer.update`` says. Raises ``DataError`` if an earlier forward
        pass broke off half-way, or the model was cast since ``new_cache``."""
        if torch.compiler.is_compiling():
            return self._update_uncompiled(key_states, value_states, layer_idx)
        if self.layers[layer_idx].index == 0:
            self.batch.check_complete()
            model = self.model()
            if model is not None and model.dtype != self.settings.dtype:
                raise DataError(
                    f"the model is {model.dtype} now, this cache was made for {self.settings.dtype}: make a new one"
                )
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
        a forward pass broke off half-way or a window went on, ``ValueError`` for a positive number."""
        self.batch.check_complete()
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove from the end")
        left = self.batch.slots + tokens_to_remove
        stores = [store for group in self.batch.groups for store in group.all_stores]
        forgotten = any(store.first and left - store.first < (store.reach or 0) for store in stores)
        if tokens_to_remove and (forgotten or not all(layer.is_croppable for layer in self.with_states)):
            raise DataError(
                "a sliding window or a recurrent state has forgotten what a cropped cache would need: reset() it"
            )
        for layer in self.with_states:
            if tokens_to_remove or layer.record_past:
                LinearAttentionLayer.crop(layer, tokens_to_remove)
        self.batch.truncate(left)
        self.batch.end()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch.size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences (integers or a mask). Raises ``IndexError`` for one that is not here, ``DataError`` if a
        forward pass broke off half-way."""
        self.batch.check_complete()
        kept = torch.arange(self.batch.size)[torch.as_tensor(indices).cpu()]
        self.batch.select(kept)
        for layer in self.with_states:
            LinearAttentionLayer.reorder_cache(layer, kept)

    def __iter__(self):
        """(keys, values, None) of each layer, decoded, as transformers' ``DynamicCache`` yields them."""
        return ((layer.keys, layer.values, None) for layer in self.layers)

    def __reduce__(self):
        raise DataError("a cache is not pickled: cache.save(path) and CompressedCache.load(path, compressor, model)")

    def __deepcopy__(self, memo) -> "CompressedCache":
        """A copy that goes on by itself; what never changes is shared, tensors that hold tokens among it."""
        coders = [coder for pair in self.compressor.coders for coder in pair]
        stored = tensors([group.all_stores for group in self.batch.groups])
        memo |= {id(shared): shared for shared in (self.compressor, *self.batch.rotations, *coders, *stored)}
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
        packed_bytes = packed_values = values = dynamic = 0
        for group in groups:
            dims = [heads * dim for heads, *both in settings.shapes for dim in both]
            for store, dim in zip(group.all_stores, dims, strict=True):
                size = len(group.rows) * dim
                kinds.update({name: tensor_bytes(getattr(store, name)) for name in ("sinks", "window", "decoded")})
                if store.payload is not None:
                    kinds.update({name: tensor_bytes(tensor) for name, tensor in store.payload.tensors.items()})
                    packed_bytes += tensor_bytes(store.payload)
                packed_values += store.parts[1] * size
                values += sum(store.parts) * size
            seen = group.positions.seq_len
            reaches = [reach for reach in self.reaches for _ in ROLES]
            dynamic += len(group.rows) * sum(min(seen, reach or seen) * dim for reach, dim in zip(reaches, dims))
        shape = self.batch.slots, self.batch.size
        side, derived = self.compressor.side_bytes, self.compressor.derived_bytes
        return Report(dict(kinds), packed_bytes, packed_values, values, *shape, side, dynamic, derived)

    def __repr__(self) -> str:
        return f"CompressedCache({self.compressor.name}: {self.report()})"

    def save(self, path) -> None:
        """Write all that is stored, but decoded tokens, to one safetensors file. Raises ``DataError`` if a forward pass
        broke off half-way, ``OSError`` if the file cannot be written: an older one at ``path`` then stays as it was."""
        saving.save(self, path)

    @classmethod
    def load(cls, path, compressor, model, decoded_cache_bytes: int = 0) -> "CompressedCache":
        """The cache that ``save`` wrote, which goes on as if it had never been away. Raises ``FormatError`` for a file
        that was cut or altered, or was saved with another compressor or another model (or dtype) than these."""
        return saving.load(cls, path, compressor, plain(model), decoded_cache_bytes)


def _check_input(held: int, given: dict, begins: bool) -> None:
    """Raise ``DataError`` for arguments that leave a cache of ``held`` slots aside or give some of its tokens again.
    ``begins``: a ``generate`` does, which tells the numbers of its tokens."""
    if given.get("use_cache") is False:
        raise DataError("a cache was given with use_cache=False, which reads none: leave out one of both")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    new, mask, told = 1 if tokens is None else tokens.shape[1], given.get("attention_mask"), given.get("position_ids")
    slots = prompt = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else held + new
    if begins and mask is None and told is not None and told.ndim == 2:
        prompt = int(told.max()) + 1 if told.numel() else held
    if held and (not new or (begins and prompt < held + new)):
        remedy = "the whole prompt, cached tokens included, or crop() the cache"
        remedy = "an empty cache, as assisted decoding reads it from its beginning" if prompt > held else remedy
        raise DataError(
            f"the cache holds {held} tokens, the prompt has {prompt if begins else 'no more'}: pass {remedy}"
        )
    if slots < held + new and tokens is not None:
        raise DataError(
            f"attention_mask has {slots} slots, but the cache holds {held} and {new} came: pass one of {held + new}"
        )
