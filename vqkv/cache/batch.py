"""The sequences of a cache: which slots of the padded batch hold tokens, and which sequences are as long as each other.
Padding is never stored, and takes no place among sinks, window or blocks, so that each sequence of a padded batch reads
what it would read alone."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.cache.positions import Positions
from vqkv.cache.settings import LiveSettings
from vqkv.cache.store import ForwardPass, TokenStore
from vqkv.codecs.predictive import Known, PredictiveCodec
from vqkv.errors import DataError
from vqkv.models.rope import Rotation

Pair = tuple[Tensor, Tensor]  # keys and values
HALF_WAY = "an earlier forward pass failed half-way: reset() the cache and feed the tokens again"


@dataclass(eq=False)
class Group:
    """Sequences that hold equally many tokens: ``rows`` are their places in the batch, ``stores`` their keys and values
    by layer, ``step`` serves the forward pass that is running."""

    rows: list[int]
    stores: list[tuple[TokenStore, TokenStore]]
    positions: Positions
    step: ForwardPass | None = None

    @property
    def all_stores(self) -> list[TokenStore]:
        """Those of all layers, keys before values."""
        return [store for pair in self.stores for store in pair]

    def truncate(self, seq_len: int) -> None:
        """Keep the first ``seq_len`` tokens."""
        for store in self.all_stores:
            store.truncate(seq_len - store.first)
        self.positions.truncate(seq_len)

    def select(self, index: list[int], rows: list[int]) -> "Group":
        """A copy with its sequences ``index``, which become ``rows`` of the batch; the group itself if they are all."""
        if index == list(range(len(self.rows))):
            self.rows = rows
            return self
        index = torch.tensor(index)
        positions = self.positions.select(index)
        stores = [tuple(store.select(index, positions) for store in pair) for pair in self.stores]
        return Group(rows, stores, positions)


@dataclass(eq=False)
class Batch:
    """``coders`` by layer. ``slots``: length of the padded batch; ``tokens``, bool (size, slots): which of them hold a
    token, None while all do. ``direct``: in this pass attention may read quantized tokens as they are, as it passes
    over padding and nothing else. ``rotations``: of each layer's keys, where they are stored before them; positions are
    those that the model is told, or what it takes without being told: the numbers of the slots. ``reaches``: by layer,
    how many of the last tokens are kept, as later queries see no others; None: all."""

    compressor: object
    coders: list[tuple[PredictiveCodec, PredictiveCodec]]
    settings: LiveSettings
    rotations: list[Rotation | None]
    reaches: list[int | None]
    groups: list[Group] = field(default_factory=list)
    tokens: Tensor | None = None
    slots: int = 0
    size: int = 0
    mask: Tensor | None = field(default=None, init=False)  # of the pass that is running
    running: bool = field(default=False, init=False)
    new_slots: int = field(default=0, init=False)  # of the pass that is running
    place: int = field(default=-1, init=False)  # of the last layer that stored them
    direct: bool = field(default=False, init=False)
    seen_by: int | None = field(default=None, init=False)  # id of the module of the cache's own model that runs
    _position_ids: Tensor | None = field(default=None, init=False)
    _places: list[tuple[Tensor, ...]] = field(default_factory=list, init=False)

    def new_group(self, rows: list[int]) -> Group:
        """Empty stores for these sequences."""
        positions, settings = Positions(), self.settings
        pairs = [
            (
                TokenStore(k, settings, positions if rotation else None, rotation, reach=reach),
                TokenStore(v, settings, reach=reach),
            )
            for (k, v), rotation, reach in zip(self.coders, self.rotations, self.reaches, strict=True)
        ]
        return Group(rows, pairs, positions)

    def see(self, attention_mask, position_ids, module: int = -1) -> None:
        """A forward pass begins with this mask; only one of shape (batch, slots) says what is padding. Raises
        ``DataError`` for positions that are not (batch, new_slots)."""
        if any(self.rotations) and position_ids is not None and position_ids.ndim != 2:
            raise DataError(
                f"position_ids of shape {tuple(position_ids.shape)}: keys can be stored before RoPE for one position a "
                "token; use pre_rope=False"
            )
        self.seen_by, self._position_ids = module, position_ids
        is_padding = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        self.mask = attention_mask.bool() if is_padding else None
        self.direct = is_padding or attention_mask is None

    def check_complete(self) -> None:
        """Raise ``DataError`` if a forward pass broke off before all layers had stored its tokens."""
        if self.running:
            raise DataError(HALF_WAY)

    def begin(self, keys: Tensor) -> None:
        """Make place for the first layer's ``keys``. Raises ``DataError`` for another number of sequences than are
        here, for a token in a slot that was padding, or if it is another model that runs."""
        size, _, new_slots, _ = keys.shape
        if self.slots and size != self.size:
            raise DataError(f"the cache holds {self.size} sequences, but {size} came: reset() it or make a new one")
        new = self._new_tokens(new_slots, size)
        position_ids = self._positions(new_slots, keys.device)
        self.running, self._places = True, []
        if not self.slots:
            self.groups, self.size = [self.new_group(list(range(size)))], size
        if new is None:
            self.groups[0].positions.advance(new_slots, position_ids)
        else:
            self._advance(new, keys, position_ids)
        self.slots, self.new_slots = self.slots + new_slots, new_slots
        readers, room = self.compressor.last_readers, self.settings.room(size)
        for group in self.groups:
            group.step = ForwardPass(Known(readers), Known(readers), room)

    def _positions(self, new_slots: int, device) -> Tensor | None:
        """Of the new slots (sequences or 1, new_slots); None where no key rotates."""
        told, self._position_ids, seen, self.seen_by = self._position_ids, None, self.seen_by, None
        if not any(self.rotations):
            return None
        if not seen:
            raise DataError("this cache was made for another model, which does not run: make a new one")
        return torch.arange(self.slots, self.slots + new_slots, device=device)[None] if told is None else told

    def _new_tokens(self, new_slots: int, size: int) -> Tensor | None:
        """True where a new slot holds a token, on the CPU; None if all slots so far and now do."""
        mask, self.mask = self.mask, None
        if mask is None or mask.shape[0] != size:
            self.direct = self.direct and mask is None
            return None if self.tokens is None else torch.ones(size, new_slots, dtype=torch.bool)
        mask = F.pad(mask[:, : self.slots + new_slots], (0, max(0, self.slots + new_slots - mask.shape[1])))
        if self.tokens is None and mask.all():
            return None
        mask = mask.cpu()
        before, shown, new = self._tokens(size), mask[:, : self.slots], mask[:, self.slots :]
        if (shown & ~before).any():
            raise DataError("attention_mask shows a slot that was padding when it was cached: nothing is stored there")
        if self.tokens is None and not new.all() and any(s.first for group in self.groups for s in group.all_stores):
            raise DataError(
                "padding came after a sliding window had dropped tokens of some layers: pad all turns or none"
            )
        self.direct = self.direct and torch.equal(shown, before)  # it may hide tokens that are here
        return None if self.tokens is None and self.slots and new.all() else new

    def _tokens(self, size: int) -> Tensor:
        return torch.ones(size, self.slots, dtype=torch.bool) if self.tokens is None else self.tokens

    def _advance(self, new: Tensor, like: Tensor, position_ids: Tensor | None) -> None:
        self.tokens = torch.cat([self._tokens(self.size), new], dim=1)
        self._regroup(list(range(self.size)), new.sum(dim=1).tolist())
        for group in self.groups:
            slots, everywhere = (_slots(mask[group.rows]).to(like.device) for mask in (new, self.tokens))
            ids = None
            if position_ids is not None:
                ids = position_ids.expand(self.size, -1)[group.rows].gather(1, slots)
            group.positions.advance(slots.shape[1], ids)
            self._places.append((torch.tensor(group.rows)[:, None], slots, everywhere))

    def _regroup(self, rows: list[int], counts: list[int]) -> None:
        """Let the batch be the sequences ``rows``; those of a group whose ``counts`` differ part."""
        here = {row: (number, i) for number, group in enumerate(self.groups) for i, row in enumerate(group.rows)}
        parts: dict[tuple[int, int], dict[int, int]] = {}  # group and count -> new row -> sequence in the group
        for new, (row, count) in enumerate(zip(rows, counts, strict=True)):
            number, i = here[row]
            parts.setdefault((number, count), {})[new] = i
        self.groups = [
            self.groups[number].select(list(own.values()), list(own)) for (number, _), own in sorted(parts.items())
        ]

    def places(self, device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """By group: its sequences (rows, 1), the slots of their new tokens and of all; nothing without padding."""
        return [tuple(index.to(device) for index in places) for places in self._places]

    def split(self, keys: Tensor, values: Tensor) -> list[tuple[Group, Pair]]:
        """The new tokens of each group of sequences (rows, num_kv_heads, new_tokens, head_dim)."""
        if self.tokens is None:
            return [(self.groups[0], (keys, values))]
        pairs = [
            tuple(x[rows, :, new].transpose(1, 2) for x in (keys, values)) for rows, new, _ in self.places(keys.device)
        ]
        return list(zip(self.groups, pairs, strict=True))

    def join(self, read: list[Pair]) -> Pair:
        """Put what groups read into one batch (size, num_kv_heads, slots, head_dim); slots of padding are zeros."""
        if self.tokens is None:
            return read[0]
        out = tuple(x.new_zeros(self.size, x.shape[1], self.slots, x.shape[3]) for x in read[0])
        for pair, (rows, _, all_) in zip(read, self.places(read[0][0].device), strict=True):
            for padded, x in zip(out, pair, strict=True):
                padded[rows, :, all_] = x.transpose(1, 2)
        return out

    def stored(self, layer: int) -> Pair:
        """A layer's keys and values as attention reads them (size, num_kv_heads, slots, head_dim); slots of padding are
        zeros. Layers that it is predicted from are decoded, too."""
        out = ()
        for group in self.groups:
            group.step = ForwardPass(Known(self.compressor.last_readers), Known())
            for number in range(0 if self.compressor.predictions else layer, layer + 1):
                heads, *dims = self.settings.shapes[number]
                empty = [s.nothing(len(group.rows), heads, 0, dim) for s, dim in zip(group.stores[number], dims)]
                pair = [s.read(x, group.step) for s, x in zip(group.stores[number], empty, strict=True)]
            group.step = None
            if self.tokens is None:
                return tuple(pair)
            out = out or tuple(x.new_zeros(self.size, x.shape[1], self.slots, x.shape[3]) for x in pair)
            slots = _slots(self.tokens[group.rows]).to(pair[0].device)
            for padded, x in zip(out, pair, strict=True):
                padded[torch.tensor(group.rows)[:, None], :, slots] = x.transpose(1, 2)
        return out

    def end(self, recorded: int = 0) -> None:
        """All layers have stored the pass's tokens, the last ``recorded`` of which may be taken back."""
        for group in self.groups:
            group.step = None
            if self.settings.joint:
                for stores in zip(*group.stores, strict=True):
                    TokenStore.pack_together(stores)
            group.positions.tables = {}
            for store in group.all_stores if self.tokens is None else ():  # padded sequences do not line up
                store.drop(recorded)
        self.running, self.direct, self._places = False, False, []

    def reset(self) -> None:
        """Forget every token."""
        self.groups, self.tokens, self.slots, self.size = [], None, 0, 0
        self.mask, self.running, self.direct = None, False, False

    def truncate(self, slots: int) -> None:
        """Keep the first ``slots`` slots."""
        if slots >= self.slots:
            return
        if slots <= 0:
            return self.reset()
        counts = [slots] * self.size
        if self.tokens is not None:
            self.tokens = self.tokens[:, :slots].clone()
            counts = self.tokens.sum(dim=1).tolist()
            self._regroup(list(range(self.size)), counts)
        for group in self.groups:
            group.truncate(counts[group.rows[0]])
        self.slots = slots

    def select(self, indices: Tensor) -> None:
        """Keep (or repeat) the sequences that ``indices`` (integers or a boolean mask) names, at least one. Raises
        ``IndexError`` for one that is not here; what is stored is then as it was."""
        if not self.slots:
            return
        indices = torch.arange(self.size)[torch.as_tensor(indices).cpu()]
        if not len(indices):
            raise IndexError("no sequence is chosen: reset() forgets them all")
        self._regroup(indices.tolist(), [0] * len(indices))
        self.size = len(indices)
        self.tokens = None if self.tokens is None else self.tokens[indices]
        room = self.settings.room(self.size)
        for store in (store for group in self.groups for store in group.all_stores):
            store.trim(room)


def _slots(mask: Tensor) -> Tensor:
    """bool (sequences, slots), equally many True in each -> int64 (sequences, tokens), ascending."""
    return mask.nonzero()[:, 1].view(len(mask), -1)
