"""The sequences of a cache: which slots of the padded batch hold tokens, and which sequences are as long as each other.

Padding is never stored, and takes no place among sinks, window or blocks, so that each sequence of a padded batch reads
what it would read alone.
"""

import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.errors import DataError
from vqkv.group import Group
from vqkv.packed_attention import PackedStates
from vqkv.positions import Rotary

FEW = 16  # new tokens, up to which attention reads packed tokens; it decodes them for more


class Watch:
    """Hands the attention_mask of a forward pass to a cache's ``Batch`` without keeping a dropped cache alive."""

    def __init__(self, cache=None):
        self.cache = cache and weakref.ref(cache)

    @torch.compiler.disable
    def __call__(self, module, args, kwargs) -> None:
        cache = self.cache and self.cache()
        if cache is None or not any(value is cache for value in (*args, *kwargs.values())):
            return
        if args:
            kwargs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        cache.batch.see(kwargs.get("attention_mask"))

    def __reduce__(self):
        return Watch, ()  # a saved or copied model watches for no cache


@dataclass(eq=False)
class Batch:
    """``slots``: length of the padded batch; ``tokens``, bool (size, slots): which of them hold a token, None while all
    do. ``make_group`` gives an empty group of so many sequences."""

    make_group: Callable[[int], Group]
    rotary: Rotary | None
    groups: list[Group] = field(default_factory=list)
    tokens: Tensor | None = None
    slots: int = 0
    size: int = 0
    room: int = field(default=0, init=False)
    mask: Tensor | None = field(default=None, init=False)  # of the pass that is running
    packed: bool = field(default=False, init=False)  # whether attention may read packed tokens as they are
    _places: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)  # by group: new tokens, all tokens
    _judged: list[tuple[Tensor, bool]] = field(default_factory=list, init=False)  # this pass's masks, for PackedStates

    def see(self, attention_mask) -> None:
        """A forward pass begins with this mask; only one of shape (batch, slots) says what is padding."""
        is_padding = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        self.mask = attention_mask.bool() if is_padding else None
        if self.rotary is not None:
            self.rotary.thread = threading.get_ident()

    def begin(self, new_slots: int, size: int, like: Tensor) -> None:
        """Make place for ``new_slots`` slots. Raises ``DataError`` for another number of sequences than are here, or
        for a token in a slot that was padding."""
        if self.slots and size != self.size:
            raise DataError(f"the cache holds {self.size} sequences, but {size} came: reset() it or make a new one")
        new = self._new_tokens(new_slots, size)
        position_ids = None if self.rotary is None else self.rotary.take()
        if not self.slots:
            self.groups, self.size = [self.make_group(size)], size
        if new is None:
            self.groups[0].positions.advance(new_slots, like, position_ids)
        else:
            self._advance(new, like, position_ids)
        self.slots += new_slots
        self.room, self._judged = self.groups[0].settings.room(size), []
        for group in self.groups:
            group.begin()

    def _new_tokens(self, new_slots: int, size: int) -> Tensor | None:
        """Which new slots hold tokens, on the CPU; None if all slots so far and now do."""
        mask, self.mask = self.mask, None
        if mask is None or mask.shape[0] != size:
            return None if self.tokens is None else torch.ones(size, new_slots, dtype=torch.bool)
        mask = F.pad(mask[:, : self.slots + new_slots], (0, max(0, self.slots + new_slots - mask.shape[1])))
        if self.tokens is None and mask.all():
            return None
        mask = mask.cpu()
        if self.tokens is None and self.slots and mask[:, self.slots :].all():
            return None  # attention is told to pass over tokens that are here: that is its own affair
        if self.tokens is not None and (mask[:, : self.slots] & ~self.tokens).any():
            raise DataError("attention_mask shows a slot that was padding when it was cached: nothing is stored there")
        return mask[:, self.slots :]

    def _advance(self, new: Tensor, like: Tensor, position_ids: Tensor | None) -> None:
        before = torch.ones(self.size, self.slots, dtype=torch.bool) if self.tokens is None else self.tokens
        self.tokens = torch.cat([before, new], dim=1)
        self._split(new.sum(dim=1))
        self._places = []
        for group in self.groups:
            places = [_slots(mask[group.rows]).to(like.device) for mask in (new, self.tokens)]
            ids = None
            if position_ids is not None:
                ids = position_ids.expand(self.size, -1)[group.rows].gather(1, places[0])
            group.positions.advance(places[0].shape[1], like, ids)
            self._places.append(places)

    def _split(self, counts: Tensor) -> None:
        """Part the groups' sequences by ``counts`` (size)."""
        groups = []
        for group in self.groups:
            own = counts[group.rows]
            if (own == own[0]).all():
                groups.append(group)
                continue
            for count in own.unique():
                index = (own == count).nonzero().flatten()
                groups.append(group.select(index, [group.rows[i] for i in index]))
        self.groups = groups

    def update(
        self, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[PackedStates, PackedStates]:
        """See ``Group.update``; slots of padding read as zeros. Where attention can read packed tokens, those."""
        if self.packed and keys.shape[2] <= FEW and (states := self._packed(layer, keys, values)):
            return states, states
        if self.tokens is None:
            return self.groups[0].update(layer, keys, values, self.room)
        out = [x.new_zeros(*x.shape[:2], self.slots, x.shape[3]) for x in (keys, values)]
        for group, (rows, new, all_) in zip(self.groups, self._rows(keys.device), strict=True):
            read = group.update(layer, *(x[rows, :, new].transpose(1, 2) for x in (keys, values)), self.room)
            for padded, x in zip(out, read, strict=True):
                padded[rows, :, all_] = x.transpose(1, 2)
        return tuple(out)

    def _rows(self, device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """By group: its sequences (rows, 1), the slots of their new tokens and of all."""
        rows = [torch.tensor(group.rows, device=device)[:, None] for group in self.groups]
        return [(row, *places) for row, places in zip(rows, self._places, strict=True)]

    def _packed(self, layer: int, keys: Tensor, values: Tensor) -> PackedStates | None:
        """``update`` for attention that reads packed tokens; None, and nothing is stored, if some group's cannot be."""
        places = [] if self.tokens is None else self._rows(keys.device)
        pairs = [(keys, values)]
        if places:
            pairs = [[x[rows, :, new].transpose(1, 2) for x in (keys, values)] for rows, new, _ in places]
        stored = [group.stored(layer, *pair) for group, pair in zip(self.groups, pairs, strict=True)]
        if None in stored:
            return None
        for group, pair in zip(self.groups, pairs, strict=True):
            group.write(layer, *pair)
        shape = torch.Size((*keys.shape[:2], self.slots, keys.shape[3]))
        return PackedStates(stored, shape, places, self.tokens, self._judged)

    def end(self) -> None:
        """The pass ends."""
        self._places = []  # not what was judged: the last layer's attention comes after this
        for group in self.groups:
            group.end()

    def reset(self) -> None:
        """Forget every token."""
        self.groups, self.tokens, self.slots, self.size, self.mask = [], None, 0, 0, None

    def truncate(self, slots: int) -> None:
        """Keep the first ``slots`` slots."""
        if slots >= self.slots:
            return
        if slots <= 0:
            return self.reset()
        counts = torch.full((self.size,), slots)
        if self.tokens is not None:
            self.tokens = self.tokens[:, :slots].clone()
            counts = self.tokens.sum(dim=1)
            self._split(counts)
        for group in self.groups:
            group.truncate(int(counts[group.rows[0]]))
        self.slots = slots

    def select(self, indices: Tensor) -> None:
        """Keep (or repeat) the sequences that ``indices`` (integers or a boolean mask) names. Raises ``DataError`` for
        one that is not here, or for none; what is stored is then as it was."""
        if not self.slots:
            return
        indices = torch.as_tensor(indices).cpu()
        indices = indices.nonzero().flatten() if indices.dtype is torch.bool else indices.long().flatten()
        if not len(indices) or not ((indices >= -self.size) & (indices < self.size)).all():
            raise DataError(f"sequences {indices.tolist()} of a cache that holds {self.size}: name some of these")
        indices = indices % self.size
        groups = []
        for group in self.groups:
            place = {row: i for i, row in enumerate(group.rows)}
            rows = [i for i, row in enumerate(indices.tolist()) if row in place]
            if rows:
                groups.append(group.select(torch.tensor([place[int(indices[i])] for i in rows]), rows))
        self.groups, self.size = groups, len(indices)
        self.tokens = None if self.tokens is None else self.tokens[indices]
        room = groups[0].settings.room(self.size)
        for group in groups:
            group.trim(room)


def _slots(mask: Tensor) -> Tensor:
    """bool (sequences, slots), equally many True in each -> int64 (sequences, tokens), ascending."""
    return mask.nonzero()[:, 1].view(len(mask), -1)
