"""Where cached tokens are: positions as the model was told them, and those left after eviction."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.cache.attention_mass import token_mask
from vqkv.kernels import pack_codes, unpack_codes
from vqkv.models.rope import Rotation


@dataclass(eq=False)
class Kept:
    """Tokens of one layer that eviction left, for each KV head: ``bits`` (uint8, batch x num_kv_heads x bytes) has a
    bit for each of the first ``upto`` tokens of all that were seen, set if the token is kept; later ones all are."""

    bits: Tensor
    upto: int

    @classmethod
    def of(cls, index: Tensor, seq_len: int) -> "Kept":
        """Of ``seq_len`` tokens those that ``index`` (batch, num_kv_heads, kept) names."""
        return cls(pack_codes(token_mask(index, seq_len), 1), seq_len)

    def tokens(self, seq_len: int) -> Tensor:
        """The numbers of the kept ones among ``seq_len`` tokens: (batch, num_kv_heads, kept)."""
        first = unpack_codes(self.bits, 1, self.upto)
        new = torch.ones(*first.shape[:2], seq_len - self.upto, dtype=first.dtype, device=first.device)
        return torch.cat([first, new], dim=-1).nonzero()[:, -1].view(*first.shape[:2], -1)

    def select(self, index: Tensor) -> "Kept":
        """Those of the sequences ``index``."""
        return Kept(self.bits[index.to(self.bits.device)], self.upto)


@dataclass(eq=False)
class Positions:
    """The position of every token of some sequences of equal length. ``explicit`` (sequences or 1, seq_len), int32:
    unless they are 0, 1, 2, ... ``tables``: cos and sin of all tokens by rotation, made once a pass."""

    explicit: Tensor | None = None
    seq_len: int = 0
    tables: dict[Rotation, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def advance(self, new_tokens: int, position_ids: Tensor | None) -> None:
        """Take in the positions (sequences or 1, new_tokens) of new tokens; None where nothing depends on them."""
        start, self.seq_len, self.tables = self.seq_len, self.seq_len + new_tokens, {}
        if position_ids is None:
            return
        step = position_ids.to(torch.int32)
        implicit = _count(start, self.seq_len, step.device)
        if self.explicit is not None or not torch.equal(step, implicit.expand_as(step)):
            before = _count(0, start, step.device) if self.explicit is None else self.explicit
            rows = max(before.shape[0], step.shape[0])
            self.explicit = torch.cat([before.expand(rows, -1), step.expand(rows, -1)], dim=1)

    def turn(
        self, rotation: Rotation, turn: Callable[..., Tensor], keys: Tensor, start: int, kept: Kept | None
    ) -> Tensor:
        """``rotate`` or ``unrotate`` fp32 keys of the stored tokens start, start + 1, ...; ``kept``: which of all are
        stored, if some are not."""
        stop = start + keys.shape[-2]
        if rotation not in self.tables:
            whole = _count(0, self.seq_len, keys.device) if self.explicit is None else self.explicit
            self.tables[rotation] = rotation.table(whole)
        tables = [table.to(keys.device) for table in self.tables[rotation]]
        if kept is None:
            return rotation.turn(turn, keys, *(table[:, start:stop] for table in tables))
        index = kept.tokens(self.seq_len)[..., start:stop]
        wide = (table[:, None].expand(*keys.shape[:2], -1, -1) for table in tables)
        cos, sin = (pick_rows(table, index).flatten(0, 1) for table in wide)
        heads = keys.flatten(0, 1)[:, None]  # each as a sequence of its own
        return rotation.turn(turn, heads, cos, sin).view_as(keys)

    def truncate(self, seq_len: int) -> None:
        """Forget all but the first ``seq_len`` tokens' positions."""
        self.seq_len, self.tables = seq_len, {}
        if self.explicit is not None:
            self.explicit = self.explicit[:, :seq_len].clone() if seq_len else None

    def select(self, index: Tensor) -> "Positions":
        """A copy with the sequences that ``index`` names."""
        explicit = self.explicit
        if explicit is not None and len(explicit) > 1:
            explicit = explicit[index.to(explicit.device)]
        return Positions(explicit, self.seq_len)


def _count(start: int, stop: int, device) -> Tensor:
    return torch.arange(start, stop, device=device, dtype=torch.int32)[None]


def pick_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (batch, num_kv_heads, kept) of ``x`` (batch, num_kv_heads, rows, ...), each head its own."""
    index = index.view(*index.shape, *[1] * (x.ndim - 3))
    return x.gather(2, index.expand(*index.shape[:3], *x.shape[3:]))
