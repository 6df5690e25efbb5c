"""Where cached tokens are: positions as the model's rotary embedding saw them, and those left after eviction."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.attention import token_mask
from vqkv.codec.packing import pack, unpack
from vqkv.errors import DataError
from vqkv.rope import rotate, unrotate

CHANGING_ROPE = ("dynamic", "longrope")


class _Watch:
    """Hands a rotary embedding's position_ids to ``Positions`` without keeping a dropped cache alive."""

    def __init__(self, positions: "Positions | None" = None):
        self.positions = positions and weakref.ref(positions)

    def __call__(self, module, args, kwargs) -> None:
        if self.positions and (positions := self.positions()) is not None:
            step = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            positions._step = weakref.ref(step)  # lives as long as the forward pass, and no longer

    def __reduce__(self):
        return _Watch, ()  # a saved or copied model watches for no cache


class Positions:
    """The position of every cached token and the model's own cos and sin for them.

    The positions are read off the model's rotary embedding as it runs, so left padding and explicit position_ids are
    right; they are stored only where they differ from 0, 1, 2, ...
    """

    def __init__(self, rotary):
        self.rotary = rotary
        self.explicit: torch.Tensor | None = None
        self.seq_len = 0
        self._step: weakref.ref | None = None
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._like = torch.empty(0)
        if self.rotary is None:
            return
        if getattr(self.rotary, "rope_type", "default") in CHANGING_ROPE:
            raise DataError(
                f"rope_type {self.rotary.rope_type!r} changes its angles with the length, so stored pre-RoPE keys "
                "cannot be rotated back as they were: use a preset with pre_rope=False"
            )
        hook = self.rotary.register_forward_pre_hook(_Watch(self), with_kwargs=True)
        weakref.finalize(self, hook.remove)

    def __deepcopy__(self, memo) -> "Positions":
        """A copy that watches the same rotary embedding on its own."""
        twin = Positions(self.rotary)
        twin._like = self._like
        twin.seq_len, twin.explicit = self.seq_len, None if self.explicit is None else self.explicit.clone()
        return twin

    def advance(self, new_tokens: int, batch_size: int, like: torch.Tensor) -> None:
        """Take in the positions of this step's ``new_tokens``."""
        start, self.seq_len = self.seq_len, self.seq_len + new_tokens
        if self.rotary is None:
            return
        implicit = torch.arange(start, self.seq_len, device=like.device, dtype=torch.int32)[None]
        step, self._step = self._step and self._step(), None
        if step is None:
            raise DataError("this cache was made for another model, whose rotary embedding did not run: make a new one")
        step = step.to(torch.int32)
        if self.explicit is not None or not torch.equal(step, implicit.expand_as(step)):
            before = self.explicit
            if before is None:
                before = torch.arange(start, device=like.device, dtype=torch.int32)[None]
            rows = max(before.shape[0], step.shape[0], batch_size)
            self.explicit = torch.cat([before.expand(rows, -1), step.expand(rows, -1)], dim=1)
        self._like, self._table = like.new_empty(0), None

    def rotate(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """fp32 keys of tokens start, start + 1, ... -> the keys that attention reads."""
        return keys if self.rotary is None else rotate(keys, *self._slice(start, keys.shape[-2]))

    def unrotate(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """The keys that attention reads -> fp32 keys before RoPE."""
        return keys if self.rotary is None else unrotate(keys, *self._slice(start, keys.shape[-2]))

    def _slice(self, start: int, length: int):
        if self._table is None:
            whole = self.explicit
            if whole is None:
                whole = torch.arange(self.seq_len, device=self._like.device, dtype=torch.int32)[None]
            cos, sin = self.rotary.forward(self._like, whole)  # .forward: not through the hook
            self._table = cos.float(), sin.float()
        return tuple(table[:, start : start + length] for table in self._table)

    def done(self) -> None:
        """Drop the cos and sin of all tokens, which are made when first needed and serve one forward pass."""
        self._table = None

    def truncate(self, seq_len: int) -> None:
        """Forget all but the first ``seq_len`` tokens' positions."""
        self.seq_len = seq_len
        if self.explicit is not None:
            self.explicit = self.explicit[:, :seq_len].clone() if seq_len else None

    def select(self, pick) -> None:
        """Apply ``pick`` (a function of a tensor whose first dimension is the batch) to per-sequence positions."""
        if self.explicit is not None:
            self.explicit = pick(self.explicit)


def pick_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (batch, num_kv_heads, kept) of ``x`` (batch, num_kv_heads, rows, ...), each head its own."""
    index = index.view(*index.shape, *[1] * (x.ndim - 3))
    return x.gather(2, index.expand(*index.shape[:3], *x.shape[3:]))


@dataclass(eq=False)
class KeptPositions:
    """The positions of one layer's stored tokens: those of ``whole``, less the evicted tokens', for each KV head.

    ``bits`` (uint8, batch x num_kv_heads x bytes) has a bit for each of the first ``upto`` tokens, set if the token is
    kept; all tokens from ``upto`` on are. Nothing is stored where keys need no rotation.
    """

    whole: Positions
    bits: Tensor | None = None
    upto: int = 0

    @property
    def explicit(self) -> Tensor | None:
        """See ``Positions``."""
        return self.whole.explicit

    def advance(self, new_tokens: int, batch_size: int, like: Tensor) -> None:
        """See ``Positions.advance``."""
        self.whole.advance(new_tokens, batch_size, like)

    def done(self) -> None:
        """Keep the tables: tokens are packed after attention, and only then is the layer done with them."""

    def rotate(self, keys: Tensor, start: int) -> Tensor:
        """See ``Positions.rotate``; ``start`` counts stored tokens."""
        return self.whole.rotate(keys, start) if self.bits is None else self._turn(rotate, keys, start)

    def unrotate(self, keys: Tensor, start: int) -> Tensor:
        """See ``Positions.unrotate``; ``start`` counts stored tokens."""
        return self.whole.unrotate(keys, start) if self.bits is None else self._turn(unrotate, keys, start)

    def keep(self, chosen: Tensor) -> None:
        """Of the stored tokens, forget all but ``chosen`` (batch, num_kv_heads, kept)."""
        if self.whole.rotary is None:
            return
        seen = self.whole.seq_len
        chosen = chosen if self.bits is None else self._tokens().gather(-1, chosen)
        self.bits, self.upto = pack(token_mask(chosen, seen), 1), seen

    def truncate(self, seq_len: int) -> None:
        """See ``Positions.truncate``; possible while nothing was evicted, or to forget all."""
        self.whole.truncate(seq_len)

    def select(self, pick) -> None:
        """See ``Positions.select``."""
        self.whole.select(pick)

    def _tokens(self) -> Tensor:
        """The numbers of the stored tokens among all seen: (batch, num_kv_heads, stored)."""
        kept = unpack(self.bits, 1, self.upto)
        new = torch.ones(*kept.shape[:2], self.whole.seq_len - self.upto, dtype=kept.dtype, device=kept.device)
        return torch.cat([kept, new], dim=-1).nonzero()[:, -1].view(*kept.shape[:2], -1)

    def _turn(self, turn, keys: Tensor, start: int) -> Tensor:
        index = self._tokens()[..., start : start + keys.shape[-2]]
        tables = self.whole._slice(0, self.whole.seq_len)
        cos, sin = (pick_rows(table[:, None].expand(*keys.shape[:2], -1, -1), index).flatten(0, 1) for table in tables)
        return turn(keys.flatten(0, 1)[:, None], cos, sin).view_as(keys)  # each head as a sequence of its own
