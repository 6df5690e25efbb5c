"""One layer of a ``CompressedCache``, as transformers talks to it, and the batch that all layers share."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from vqkv.cache.groups import Group, Pair
from vqkv.cache.packed_attention import packed_states
from vqkv.cache.settings import LiveSettings
from vqkv.cache.store import Sequences, TokenStore, quantize_together
from vqkv.codecs.predictive import LayerRole, PredictiveCodec, Reconstructions
from vqkv.errors import DataError
from vqkv.kernels.precision import full_precision
from vqkv.models.rope import Rotation


@dataclass(eq=False)
class Batch:
    """The sequences of a cache: one group of all, or once some slots are padding one for each.

    ``slots``: length of the (padded) batch of ``size`` sequences. By layer: ``coders``; ``rotations`` of keys that are
    stored before them; ``reaches``, how many of the last tokens are kept, as later queries see no others (None: all).
    ``decoded_tokens`` of one sequence may be kept decoded. Of the forward pass that runs: ``new_slots``, 0 between
    passes; ``layer``, the last that has stored its tokens; ``packed``, whether attention may read quantized tokens as
    they are.
    """

    coders: list[tuple[PredictiveCodec, PredictiveCodec]]
    settings: LiveSettings
    rotations: list[Rotation | None]
    reaches: list[int | None]
    last_readers: dict[LayerRole, LayerRole]
    decoded_tokens: int
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
    def stores(self) -> list[TokenStore]:
        """Those of all groups and layers."""
        return [store for group in self.groups for store in group.all_stores]

    @property
    def room(self) -> int:
        """Quantized tokens of each sequence, complete blocks, that may be kept decoded."""
        block = self.settings.row_tokens
        return self.decoded_tokens // self.size // block * block

    def new_group(self, row: int = 0) -> Group:
        """Make empty stores."""
        sequences, settings = Sequences(), self.settings
        stores = [
            (TokenStore(keys, settings, sequences, rotation), TokenStore(values, settings, sequences))
            for (keys, values), rotation in zip(self.coders, self.rotations, strict=True)
        ]
        return Group(stores, sequences, row)

    def begin(self, size: int, new_slots: int, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Count the new tokens of a forward pass. ``mask``, bool (size, slots), says which slots hold a token (None:
        all); ``position_ids`` (size or 1, new_slots): None where no key rotates. Raises ``DataError`` for a token in a
        slot that was padding, and for padding after a sliding window has dropped tokens."""
        if not self.slots:
            self.groups, self.size = [self.new_group()], size
        real = torch.ones(size, new_slots, dtype=torch.bool)
        if mask is not None and (self.padded or not mask.all()):
            shown, real = mask.cpu().split([self.slots, new_slots], dim=1)
            self._check_shown(shown, real)
        self.slots, self.new_slots, self.layer = self.slots + new_slots, new_slots, -1
        for group in self.groups:
            shared, positions, count = group.sequences, position_ids, new_slots
            shared.past, shared.fresh = (
                Reconstructions(self.last_readers) if self.last_readers else None for _ in range(2)
            )
            shared.room = self.room
            if group.slots is not None:
                own = real[group.row]
                group.slots, count = torch.cat([group.slots, own]), int(own.sum())
                if positions is not None:
                    positions = positions.expand(size, -1)[[group.row]][:, own.to(positions.device)]
            shared.advance(count, positions)

    def _check_shown(self, shown: Tensor, real: Tensor) -> None:
        """Compare the stored slots that attention is to see (size, slots) with those that hold tokens. Store each row
        by itself once a new slot (size, new_slots) is not ``real``."""
        before = torch.ones_like(shown)
        if self.padded:
            before = torch.stack([group.slots for group in self.groups if group.slots is not None])
        if (shown & ~before).any():
            raise DataError("attention_mask shows a slot that was padding when it was cached: nothing is stored there")
        self.packed = self.packed and torch.equal(shown, before)  # else it hides tokens that are here
        if self.padded or real.all():
            return
        [group] = self.groups
        if any(store.first for store in self.stores):
            raise DataError(
                "padding came after a sliding window had dropped tokens of some layers: pad all turns or none"
            )
        self.groups = [group.select(torch.tensor([row]), row) for row in range(len(real))]
        for group, slots in zip(self.groups, before, strict=True):
            group.slots = slots.clone()

    def join(self, read: list[Pair]) -> Pair:
        """Put what groups read into one batch (size, num_kv_heads, slots, head_dim); slots of padding are zeros."""
        if not self.padded:
            return read[0]
        keys, values = (x.new_zeros(self.size, x.shape[1], self.slots, x.shape[3]) for x in read[0])
        for group, pair in zip(self.groups, read, strict=True):
            group.put(keys, pair[0])
            group.put(values, pair[1])
        return keys, values

    def end(self, recorded: int = 0) -> None:
        """Quantize, where all layers are stored together, and drop what no query sees: all layers have stored the
        pass's tokens, the last ``recorded`` of which may be cropped."""
        for group in self.groups:
            group.sequences.tables, group.sequences.past, group.sequences.fresh = {}, None, None
            if self.settings.joint:
                for stores in zip(*group.stores, strict=True):
                    quantize_together(stores)
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
        """Keep (or repeat) the sequences ``rows``, at least one."""
        if not self.slots:
            return
        if self.padded:
            only = torch.tensor([0])
            self.groups = [self.groups[row].select(only, i) for i, row in enumerate(rows.tolist())]
        elif not torch.equal(rows, torch.arange(self.size)):
            self.groups = [self.groups[0].select(rows)]
        self.size = len(rows)
        for store in self.stores:
            store.trim(self.room)


@dataclass(eq=False)
class CompressedLayer(CacheLayerMixin):
    """One layer of a ``CompressedCache``. What it stores is in ``batch``, which all layers share."""

    is_compileable = False

    index: int
    batch: Batch
    record_past: bool = field(default=False, init=False)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Store new keys (after RoPE) and values (batch, num_kv_heads, new_tokens, head_dim); return what attention
        reads: decoded history and, unless ``in_place``, the new tokens as they came. Slots of padding read as zeros.
        Where attention can read quantized tokens, the same ``PackedStates`` for both."""
        batch = self.batch
        batch.layer = self.index
        pairs = [(key_states, value_states)]
        if batch.padded:
            pairs = [(group.take(key_states), group.take(value_states)) for group in batch.groups]
        with full_precision(key_states.device):
            packed = packed_states(batch.groups, self.index, pairs) if batch.packed else None
            if packed is None:
                read = batch.join([self._pass(group, pair) for group, pair in zip(batch.groups, pairs, strict=True)])
            if self.index == len(batch.coders) - 1:
                batch.end(batch.new_slots if self.record_past else 0)
        return read if packed is None else (packed, packed)

    def _pass(self, group: Group, pair: Pair) -> Pair:
        keys, values = group.stores[self.index]
        return keys.update(pair[0]), values.update(pair[1])

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
        """Allocate nothing: payloads grow by concatenation."""

    @property
    def is_initialized(self) -> bool:
        """Whether there is a token."""
        return bool(self.batch.slots)

    def get_seq_length(self) -> int:
        """Count the slots of this layer: tokens, padding included; those of a running pass once they were handed
        over."""
        waits = self.batch.new_slots and self.index > self.batch.layer
        return self.batch.slots - (self.batch.new_slots if waits else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Count the keys that the next ``query_length`` queries read, and those before them that are gone."""
        return self.get_seq_length() - self.first + query_length, self.first

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def reset(self) -> None:
        """Forget every token, of all layers."""
        self.batch.reset()


class MixedLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with states besides its keys and values (Falcon-H1), which stay as transformers keeps them."""

    lazy_initialization = LinearAttentionLayer.lazy_initialization  # of the states

    def __init__(self, index: int, batch: Batch, number_of_states: int):
        LinearAttentionLayer.__init__(self, number_of_states)
        CompressedLayer.__init__(self, index, batch)

    def reset(self) -> None:
        """Forget every token, of all layers, and this one's states."""
        LinearAttentionLayer.reset(self)
        CompressedLayer.reset(self)
