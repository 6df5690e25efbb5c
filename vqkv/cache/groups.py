"""Sequences of a batch and what is stored of them. Padding is never stored, and counts neither for sinks, window nor
blocks: each sequence of a padded batch reads what it would read alone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.cache.store import ForwardPass, Positions, TokenStore

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass(eq=False)
class Group:
    """Sequences without padding, or one row of a padded batch, of which ``slots``, bool (slots), is True where a slot
    holds a token: the index from its tokens to the batch. ``stores``: keys and values by layer. ``step`` serves the
    forward pass that runs."""

    rows: list[int]
    stores: list[tuple[TokenStore, TokenStore]]
    positions: Positions
    slots: Tensor | None = None
    step: ForwardPass = field(default_factory=ForwardPass)

    @property
    def all_stores(self) -> list[TokenStore]:
        """Those of all layers, keys before values."""
        return [store for pair in self.stores for store in pair]

    def take(self, x: Tensor) -> Tensor:
        """Take this row's tokens (1, heads, tokens, dim) out of the last slots (batch, heads, slots, dim) of a padded
        batch."""
        return x[self.rows][:, :, self._last(x)]

    def put(self, out: Tensor, x: Tensor) -> None:
        """Undo ``take``, in place."""
        out[self.rows[0]][:, self._last(out)] = x[0].to(out.dtype)

    def _last(self, x: Tensor) -> Tensor:
        slots = torch.ones(x.shape[2], dtype=torch.bool) if self.slots is None else self.slots
        return slots[len(slots) - x.shape[2] :].to(x.device)

    def truncate(self, slots: int) -> None:
        """Keep the first ``slots`` slots."""
        if self.slots is not None:
            self.slots = self.slots[:slots].clone()
            slots = int(self.slots.sum())
        for store in self.all_stores:
            store.truncate(slots - store.first)
        self.positions.truncate(slots)

    def select(self, index: Tensor, rows: list[int]) -> "Group":
        """Copy the sequences ``index``, which become ``rows`` of the batch."""
        positions = self.positions.select(index)
        stores = [(k.select(index, positions), v.select(index, positions)) for k, v in self.stores]
        return Group(rows, stores, positions, None if self.slots is None else self.slots.clone())
