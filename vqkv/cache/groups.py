"""Sequences of a batch and what is stored of them. Padding is never stored, and counts neither for sinks, window nor
blocks: each sequence of a padded batch reads what it would read alone."""

from dataclasses import dataclass

from torch import Tensor

from vqkv.cache.store import Sequences, TokenStore

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass(eq=False)
class Group:
    """All sequences of a batch without padding, or the one in ``row`` of a padded batch, whose ``slots``, bool (slots),
    are True where they hold a token: the index from its tokens to the batch. ``stores``: keys and values by layer."""

    stores: list[tuple[TokenStore, TokenStore]]
    sequences: Sequences
    row: int = 0
    slots: Tensor | None = None

    @property
    def all_stores(self) -> list[TokenStore]:
        """Those of all layers, keys before values."""
        return [store for pair in self.stores for store in pair]

    @property
    def counts(self) -> dict:
        """Tokens of a sequence that are stored in each way: the same in all layers, keys and values."""
        sinks, _, window = (store := self.all_stores[0]).parts
        return {"sinks": sinks, "quantized": store.quantized, "holes": store.holes, "window": window}

    def take(self, x: Tensor) -> Tensor:
        """Take this row's tokens (1, heads, tokens, dim) out of the last slots (batch, heads, slots, dim) of a padded
        batch."""
        return x[[self.row]][:, :, self._last(x)]

    def put(self, out: Tensor, x: Tensor) -> None:
        """Undo ``take``, in place."""
        out[self.row][:, self._last(out)] = x[0].to(out.dtype)

    def _last(self, x: Tensor) -> Tensor:
        assert self.slots is not None
        return self.slots[len(self.slots) - x.shape[2] :].to(x.device)

    def truncate(self, slots: int) -> None:
        """Keep the first ``slots`` slots."""
        if self.slots is not None:
            self.slots = self.slots[:slots].clone()
            slots = int(self.slots.sum())
        for store in self.all_stores:
            store.truncate(slots - store.first)
        self.sequences.truncate(slots)

    def select(self, index: Tensor, row: int = 0) -> "Group":
        """Copy the sequences ``index``; of a padded batch one, which goes to ``row``."""
        sequences = self.sequences.select(index)
        stores = [(k.select(index, sequences), v.select(index, sequences)) for k, v in self.stores]
        return Group(stores, sequences, row, None if self.slots is None else self.slots.clone())
