"""A transformers ``Cache`` that stores packed payloads and nothing else of a token."""

import copy
import math
import weakref
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from vqkv.cache import saving
from vqkv.cache.layer import Batch, CompressedLayer, MixedLayer
from vqkv.cache.meter import Report, tensor_bytes, tensors
from vqkv.cache.packed_attention import packed_slots
from vqkv.cache.passes import PassInputs, check_input, watch
from vqkv.cache.settings import LiveSettings
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError, FormatError
from vqkv.models.identity import stamp
from vqkv.models.layers import kv_layers, plain
from vqkv.models.load import layer_devices, values_per_token
from vqkv.models.rope import rotations
from vqkv.runtime.checks import check_whole
from vqkv.runtime.files import load_checked, save_checked


class CompressedCache(Cache):
    """Pass it to a model or to ``generate`` as ``past_key_values``. Made by ``Compressor.new_cache``.

    ``in_place``: pack every token at once and let attention read the current tokens packed too, with no sinks and no
    recent window (residual VQ's protocol). ``decoded_cache_bytes``: how much of what attention reads of quantized
    tokens is kept from step to step, the oldest tokens first; by default every step decodes the history once. Padding
    in ``attention_mask`` is not stored. Layers with a sliding window drop blocks of tokens that no query can see any
    more, but not under predictors or in padded batches, where tokens must line up; what dropped tokens cannot be
    cropped or saved. One forward pass at a time.
    """

    def __init__(self, compressor, model, in_place: bool = False, decoded_cache_bytes: int = 0):
        check_whole("decoded_cache_bytes", decoded_cache_bytes, 0)
        model = plain(model)
        compressor.check(model)
        compressor.to_layers(layer_devices(model))
        self.compressor, self.model = compressor, weakref.ref(model)
        self.read_by: int | None = None  # the stamp of the model as it read the first token
        self.decoded_cache_bytes = decoded_cache_bytes
        nothing_exact = {"sink_tokens": 0, "recent_window": 0, "block_tokens": 1} if in_place else {}
        held, rows = vars(compressor.settings) | nothing_exact, compressor.block_tokens
        self.settings = LiveSettings(
            **held | {"block_tokens": math.lcm(rows, held["block_tokens"])},
            in_place=in_place,
            row_tokens=rows,
            joint=compressor.joint,
            exact_dtype=model.dtype if model.dtype.itemsize == 2 else torch.float16,
        )
        self.inputs = PassInputs()  # from a pass's beginning to its first layer
        own, pre_rope = kv_layers(model), compressor.settings.pre_rope
        layers = DynamicCache(config=model.config).layers
        windows = [getattr(layers[layer.layer_idx], "sliding_window", None) for layer in own]
        self.reaches = [window and window - 1 for window in windows]
        self.batch = Batch(
            compressor.coders,
            self.settings,
            rotations(model, pre_rope) if pre_rope else [None] * len(own),
            [None] * len(own) if compressor.predictions else self.reaches,  # under predictors tokens must line up
            compressor.last_readers,
            decoded_cache_bytes // (values_per_token(compressor.model) * model.dtype.itemsize),
        )
        for index, layer in enumerate(own):
            states = getattr(layers[layer.layer_idx], "number_of_states", None)  # of a hybrid's layer
            own_layer = MixedLayer(index, self.batch, states) if states else CompressedLayer(index, self.batch)
            layers[layer.layer_idx] = own_layer
        super().__init__(layers=layers)
        watch(model)

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that store keys and values."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def with_states(self) -> list[LinearAttentionLayer]:
        """A hybrid's layers that have other states, which are kept as transformers does."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    def begin_pass(self, module: int, given: dict) -> None:
        """Note what ``module`` is given for a forward pass that begins, perhaps with another cache. Raises
        ``DataError`` unless it goes on where this cache ends."""
        if self.inputs.module not in (None, module):
            return  # those of the outer module are known
        check_input(self.batch.slots, given)
        if not self.batch.slots and (model := self.model()) is not None:
            self.read_by = stamp(model)
        self.expect(given.get("attention_mask"), given.get("position_ids"), module)

    def expect(self, attention_mask, position_ids, module: int = -1) -> None:
        """Begin a forward pass with these inputs; only a mask of shape (batch, slots) says what is padding."""
        mask = attention_mask.bool() if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
        by_slot = (attention_mask is None) == (mask is None)
        decodes = self.settings.in_place or self.decoded_cache_bytes or not by_slot
        self.inputs = PassInputs(mask, position_ids, module, 0 if decodes else packed_slots(self.model()))

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Hand a layer its new tokens, as ``CompressedLayer.update`` says. Raises ``DataError`` if an earlier forward
        pass broke off half-way."""
        if torch.compiler.is_compiling():
            return self._update_uncompiled(key_states, value_states, layer_idx)
        if self.layers[layer_idx].index == 0:
            self._begin(key_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def _update_uncompiled(self, key_states, value_states, layer_idx: int):
        self.inputs.packed_slots = 0  # a graph takes tensors only
        return self.update(key_states, value_states, layer_idx)

    def _begin(self, keys: Tensor) -> None:
        """Make room for the first layer's ``keys``. Raises ``DataError`` for another number of sequences than are
        here."""
        self.check_complete()
        batch, (size, _, new_slots, _) = self.batch, keys.shape
        if batch.slots and size != batch.size:
            raise DataError(f"the cache holds {batch.size} sequences, but {size} came: reset() it or make a new one")
        inputs, self.inputs, slots = self.inputs, PassInputs(), batch.slots + new_slots
        positions, mask = inputs.position_ids, inputs.mask
        if not any(batch.rotations):
            positions = None
        elif positions is None:  # the model takes the numbers of the slots
            positions = torch.arange(batch.slots, slots, device=keys.device)[None]
        batch.packed = slots <= inputs.packed_slots and (mask is None or len(mask) == size)
        if mask is not None:
            mask = F.pad(mask, (0, slots - mask.shape[1])) if len(mask) == size else None
        batch.begin(size, new_slots, mask, positions)

    def check_complete(self) -> None:
        """Raise ``DataError`` if a forward pass broke off before all layers had stored its tokens."""
        if self.batch.new_slots:
            raise DataError("an earlier forward pass failed half-way: reset() the cache and feed the tokens again")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (transformers passes a negative number). Raises ``DataError`` if
        a forward pass broke off half-way or a window went on, ``ValueError`` for a positive number."""
        self.check_complete()
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove from the end")
        slots = self.batch.slots + tokens_to_remove
        firsts = [layer.first for layer in self.compressed]
        forgotten = any(first and slots - first < (reach or 0) for first, reach in zip(firsts, self.batch.reaches))
        if tokens_to_remove and (forgotten or not all(layer.is_croppable for layer in self.with_states)):
            raise DataError(
                "a sliding window or a recurrent state has forgotten what a cropped cache would need: reset() it"
            )
        for layer in self.with_states:
            if tokens_to_remove or layer.record_past:
                LinearAttentionLayer.crop(layer, tokens_to_remove)
        self.batch.truncate(slots)
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
        self.check_complete()
        rows = torch.arange(self.batch.size)[indices.cpu()]
        self.batch.select(rows)
        for layer in self.with_states:
            LinearAttentionLayer.reorder_cache(layer, rows)

    def __deepcopy__(self, memo) -> "CompressedCache":
        """Copy what goes on by itself; share what never changes, tensors that hold tokens among it."""
        coders = [coder for pair in self.compressor.coders for coder in pair]
        stored = tensors(self.batch.stores)
        memo |= {id(shared): shared for shared in (self.compressor, *self.batch.rotations, *coders, *stored)}
        twin = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def report(self) -> Report:
        """Measure bytes by kind, from the storage of the tensors held now."""
        kinds = Counter(sinks=0, window=0, decoded=0, positions=0, padding=0)
        packed_bytes = packed_values = values = dynamic = 0
        dims = [heads * dim for heads, *both in self.compressor.model["shapes"] for dim in both]
        reaches = [reach for reach in self.reaches for _ in ROLES]
        for group in self.batch.groups:
            rows, seq_len = self.batch.size // len(self.batch.groups), group.sequences.seq_len
            kinds.update(positions=tensor_bytes(group.sequences.positions), padding=tensor_bytes(group.slots))
            for store, dim, reach in zip(group.all_stores, dims, reaches, strict=True):
                kinds.update({name: tensor_bytes(getattr(store, name)) for name in ("sinks", "window", "decoded")})
                if store.payload is not None:
                    kinds.update({name: tensor_bytes(tensor) for name, tensor in store.payload.tensors.items()})
                    packed_bytes += tensor_bytes(store.payload)
                packed_values += store.parts[1] * rows * dim
                values += sum(store.parts) * rows * dim
                dynamic += min(seq_len, reach or seq_len) * rows * dim
        shape = self.batch.slots, self.batch.size
        side, derived = self.compressor.side_bytes, self.compressor.derived_bytes
        return Report(dict(kinds), packed_bytes, packed_values, values, *shape, side, dynamic, derived)

    def __repr__(self) -> str:
        return f"CompressedCache({self.compressor.name}: {self.report()})"

    def save(self, path) -> None:
        """Write all that is stored, but decoded tokens, to one safetensors file. Raises ``DataError`` if a forward pass
        broke off half-way, ``OSError`` if the file cannot be written: an older one at ``path`` then stays as it was."""
        save_checked(Path(path), saving.header_of(self), dict(saving.tensors_of(self.batch)))

    @classmethod
    def load(cls, path, compressor, model, decoded_cache_bytes: int = 0) -> "CompressedCache":
        """Read what ``save`` wrote, which goes on as if it had never been away. Raises ``FormatError`` for a file that
        was cut or altered, or was saved with another compressor or another model (or dtype) than these."""
        model = plain(model)
        header, stored = load_checked(Path(path), saving.FORMAT, saving.VERSION, "save a cache with cache.save(...)")
        for part, now in saving.made_for(compressor, model).items():
            was = header[part]
            for key in sorted(now.keys() - {"name"}):
                if was[key] != now[key]:
                    saved, given = (f"{about['name']!r} with {key} {about[key]}" for about in (was, now))
                    raise FormatError(f"{path} was saved with {part} {saved}, not {given}: load it with that")
        cache = cls(compressor, model, header["in_place"], decoded_cache_bytes)
        saving.fill(cache, header, stored)
        return cache
