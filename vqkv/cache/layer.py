"""One layer of a ``CompressedCache``, as transformers talks to it, and the batch that all layers share."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from vqkv.cache.groups import Group, Pair
from vqkv.cache.meter import tensors
from vqkv.cache.packed_attention import packed_states
from vqkv.cache.settings import LiveSettings
from vqkv.cache.store import ForwardPass, Positions, TokenStore
from vqkv.codecs.predictive import Known, Place, PredictiveCodec
from vqkv.errors import DataError
from vqkv.kernels.precision import full_precision
from vqkv.models.rope import Rotation


@dataclass(eq=False)
class Batch:
    """The sequences of a cache: one group of all, or once some slots are padding one for each. ``slots``: length of the
    (padded) batch of ``size`` sequences. By layer: ``coders``; ``rotations`` of keys that are stored before them;
    ``reaches``, how many of the last tokens are kept, as later queries see no others (None: all). Of the forward pass
    that runs: ``new_slots``, 0 between passes; ``layer``, the last that has stored its tokens; ``packed``, whether
    attention may read quantized tokens as they are."""

    coders: list[tuple[PredictiveCodec, PredictiveCodec]]
    settings: LiveSettings
    rotations: list[Rotation | None]
    reaches: list[int | None]
    last_readers: dict[Place, Place]
    groups: list[Group] = field(default_factory=list)
    slots: int = 0
    size: int = 0
    new_slots: int = 0
    layer: int = -1
    packed: bool = False

    @property
    def padded(self) -> bool:
        """Whether some slot is, or was, padding."""
        return any(group.slots is not None for group in self.groups)

    @property
    def room(self) -> int:
        """Quantized tokens, whole blocks, of which ``decoded_cache_bytes`` holds what is decoded."""
        block, token = self.settings.tokens_per_row, self.settings.token_bytes * self.size
        return self.settings.decoded_cache_bytes // token // block * block

    def new_group(self, rows: list[int]) -> Group:
        """Make empty stores for these sequences."""
        positions, settings = Positions(), self.settings
        stores = [
            (TokenStore(keys, settings, positions, rotation), TokenStore(values, settings, positions))
            for (keys, values), rotation in zip(self.coders, self.rotations, strict=True)
        ]
        return Group(rows, stores, positions)

    def new_step(self) -> ForwardPass:
        """Begin to go through the layers."""
        past, fresh = (Known(self.last_readers) if self.last_readers else None for _ in range(2))
        return ForwardPass(past, fresh, self.room)

    def begin(self, size: int, new_slots: int, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Count the new tokens of a forward pass. ``mask``, bool (size, slots), says which slots hold a token (None:
        all); ``position_ids`` (size or 1, new_slots): None where no key rotates. Raises ``DataError`` for a token in a
        slot that was padding, and for padding after a sliding window has dropped tokens."""
        if not self.slots:
            self.groups, self.size = [self.new_group(list(range(size)))], size
        if mask is not None and (self.padded or not mask.all()):
            mask = mask.cpu()
            self._check_mask(mask[:, : self.slots], mask[:, self.slots :])
        self.slots, self.new_slots, self.layer = self.slots + new_slots, new_slots, -1
        for group in self.groups:
            group.step, positions, count = self.new_step(), position_ids, new_slots
            if group.slots is not None:
                row = group.rows[0]
                new = torch.ones(new_slots, dtype=torch.bool) if mask is None else mask[row, -new_slots:]
                group.slots, count = torch.cat([group.slots, new]), int(new.sum())
                if positions is not None:
                    positions = positions.expand(size, -1)[[row]][:, new.to(positions.device)]
            group.positions.advance(count, positions)

    def _check_mask(self, shown: Tensor, new: Tensor) -> None:
        """Compare the stored slots that attention is to see (size, slots) with those that hold tokens. Store each row
        by itself once a ``new`` slot (size, new_slots) is padding."""
        everything = torch.ones(self.slots, dtype=torch.bool)
        before = torch.stack([everything if x.slots is None else x.slots for x in self.groups for _ in x.rows])
        if (shown & ~before).any():
            raise DataError("attention_mask shows a slot that was padding when it was cached: nothing is stored there")
        self.packed = self.packed and torch.equal(shown, before)  # else it hides tokens that are here
        if not (self.padded or new.all()):
            if any(store.first for store in self.groups[0].all_stores):
                raise DataError(
                    "padding came after a sliding window had dropped tokens of some layers: pad all turns or none"
                )
            self.split(before)

    def split(self, tokens: Tensor) -> None:
        """Store each row by itself; ``tokens``, bool (size, slots): which slots hold one."""
        rows = {
            row: group.select(torch.tensor([i]), [row]) for group in self.groups for i, row in enumerate(group.rows)
        }
        self.groups = [rows[row] for row in sorted(rows)]
        for group, slots in zip(self.groups, tokens, strict=True):
            group.slots = slots.clone()

    def join(self, read: list[Pair]) -> Pair:
        """Put what groups read into one batch (size, num_kv_heads, slots, head_dim); slots of padding are zeros."""
        keys, values = read[0]
        if self.padded:
            keys, values = (x.new_zeros(self.size, x.shape[1], self.slots, x.shape[3]) for x in read[0])
            for group, pair in zip(self.groups, read, strict=True):
                group.put(keys, pair[0])
                group.put(values, pair[1])
        return keys, values

    def end(self, recorded: int = 0) -> None:
        """Quantize, where all layers are stored together, and drop what no query sees: all layers have stored the
        pass's tokens, the last ``recorded`` of which may be cropped."""
        for group in self.groups:
            group.step, group.positions.tables = ForwardPass(), {}
            if self.settings.joint:
                for stores in zip(*group.stores, strict=True):
                    TokenStore.write_together(list(stores))
            for pair, reach in zip(group.stores, self.reaches, strict=True):
                if reach is not None and group.slots is None:  # padded sequences do not line up
                    for store in pair:
                        store.drop(reach, recorded)
        self.new_slots, self.packed = 0, False

    def reset(self) -> None:
        """Forget every token."""
        self.groups, self.slots, self.size, self.new_slots, self.packed = [], 0, 0, 0, False

    def truncate(self, slots: int) -> None:
        """Keep the first ``slots`` slots."""
        if slots <= 0:
            self.reset()
        elif slots < self.slots:
            for group in self.groups:
                group.truncate(slots)
            self.slots = slots

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the sequences ``rows``, at least one. Raises ``IndexError`` for none."""
        if not self.slots:
            return
        if not len(rows):
            raise IndexError("no sequence is chosen: reset() forgets them all")
        if self.padded:
            self.groups = [self.groups[row].select(torch.tensor([0]), [i]) for i, row in enumerate(rows.tolist())]
        elif not torch.equal(rows, torch.arange(self.size)):
            self.groups = [self.groups[0].select(rows, list(range(len(rows))))]
        self.size = len(rows)
        for store in (store for group in self.groups for store in group.all_stores):
            store.trim(self.room)


@dataclass(eq=False)
class CompressedLayer(CacheLayerMixin):
    """One layer of a ``CompressedCache``. What it stores is in ``batch``, which all layers share."""

    is_compileable = False

    index: int
    batch: Batch
    record_past: bool = field(default=False, init=False)

    def __post_init__(self):
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Store new keys (after RoPE) and values (batch, num_kv_heads, new_tokens, head_dim); return what attention
        reads: decoded history and, unless ``in_place``, the new tokens as they came. Slots of padding read as zeros.
        Where attention can read quantized tokens, the same ``PackedStates`` for both."""
        batch, self.is_initialized = self.batch, True
        batch.layer = self.index
        pairs = [(key_states, value_states)]
        if batch.padded:
            pairs = [(group.take(key_states), group.take(value_states)) for group in batch.groups]
        with full_precision(key_states.device):
            packed = packed_states(batch.groups, self.index, pairs) if batch.packed else None
            if packed is None:
                read = batch.join([self._pass(group, pair) for group, pair in zip(batch.groups, pairs, strict=True)])
            self._end()
        return read if packed is None else (packed, packed)

    def _pass(self, group: Group, pair: Pair) -> Pair:
        keys, values = group.stores[self.index]
        return keys.update(pair[0], group.step), values.update(pair[1], group.step)

    def _end(self) -> None:
        if self.index == len(self.batch.coders) - 1:
            self.batch.end(self.batch.new_slots if self.record_past else 0)

    def decoded(self) -> Pair | None:
        """Keys and values as attention reads them (batch, num_kv_heads, seq_len, head_dim); None if there are none."""
        batch, read = self.batch, []
        for group in batch.groups:
            step = batch.new_step()
            for layer in range(0 if batch.last_readers else self.index, self.index + 1):  # it may be predicted
                heads, *dims = batch.settings.shapes[layer]
                keys, values = (
                    store.read(x.new_empty(len(group.rows), heads, 0, dim, dtype=batch.settings.dtype), step)
                    for store, dim in zip(group.stores[layer], dims, strict=True)
                    for x in tensors([store.sinks, store.window, store.payload])[:1]
                )
            read.append((keys, values))
        return batch.join(read) if read else None

    @property
    def keys(self) -> Tensor | None:
        """``decoded`` keys, under the name that transformers' layers have for them."""
        return (self.decoded() or (None, None))[0]

    @property
    def values(self) -> Tensor | None:
        """As ``keys``."""
        return (self.decoded() or (None, None))[1]

    @property
    def stores(self) -> tuple[TokenStore, TokenStore]:
        """This layer's keys and values, of the first group of sequences."""
        return self.batch.groups[0].stores[self.index]

    @property
    def is_sliding(self) -> bool:
        """True if its queries see the last tokens only."""
        return self.batch.reaches[self.index] is not None

    @property
    def first(self) -> int:
        """The number of the first token that is still here."""
        return self.stores[0].first if self.batch.groups else 0

    @property
    def is_croppable(self) -> bool:
        """False once tokens were dropped that a cropped cache would need."""
        return not self.first

    def activate_past_recording(self) -> None:
        """From now on the tokens of the last forward pass can be cropped, past a sliding window, too."""
        self.record_past = True

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to allocate: payloads grow by concatenation."""
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Slots of this layer: tokens, padding included; those of a running pass once they were handed over."""
        waits = self.batch.new_slots and self.index > self.batch.layer
        return self.batch.slots - (self.batch.new_slots if waits else 0)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """(length of keys the next ``query_length`` queries read, offset)."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() - self.first + length, self.first

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def reset(self) -> None:
        """Forget every token, of all layers."""
        self.batch.reset()
        self.is_initialized = False


class MixedLayer(LinearAttentionLayer, CompressedLayer):
    """A layer with states besides its keys and values (Falcon-H1), which stay as transformers keeps them."""

    is_compileable = False

    def __init__(self, index: int, batch: Batch, number_of_states: int):
        LinearAttentionLayer.__init__(self, number_of_states)
        CompressedLayer.__init__(self, index, batch)

    def reset(self) -> None:
        """Forget every token, of all layers, and this one's states."""
        LinearAttentionLayer.reset(self)
        CompressedLayer.reset(self)
