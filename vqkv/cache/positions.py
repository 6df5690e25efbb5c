"""Where cached tokens are: positions as the model's rotary embedding saw them, and those left after eviction."""

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.cache.attention_mass import token_mask
from vqkv.cache.hooks import watch
from vqkv.errors import DataError
from vqkv.kernels import Rope, pack_codes, unpack_codes
from vqkv.kernels.rope import rotate, unrotate


class Rotary:
    """A model's rotary embedding, and the position_ids that it was given in the forward pass that is running.

    The positions are read off the embedding as it runs, so left padding and explicit position_ids are right.
    """

    def __init__(self, module):
        self.module = module
        self._ids: weakref.ref | None = None
        self.thread: int | None = None  # the only one whose passes are this cache's; None: any
        watch(self, "see", module.register_forward_pre_hook, with_kwargs=True)

    def __deepcopy__(self, memo) -> "Rotary":
        """A copy that watches the same rotary embedding on its own."""
        memo[id(self)] = twin = Rotary(self.module)
        return twin

    def see(self, module, args, kwargs) -> None:
        """The embedding runs with these arguments."""
        if self.thread in (None, threading.get_ident()):
            ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            self._ids = weakref.ref(ids)  # lives as long as the forward pass, and no longer

    def take(self) -> Tensor:
        """This pass's position_ids (batch or 1, new_tokens). Raises ``DataError`` if the embedding did not run."""
        ids, self._ids = self._ids and self._ids(), None
        if ids is None:
            raise DataError("this cache was made for another model, whose rotary embedding did not run: make a new one")
        return ids

    def tables(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32, of positions (batch or 1, seq_len)."""
        cos, sin = self.module.forward(like, position_ids)  # .forward: not through the hook
        return cos.float(), sin.float()


@dataclass(eq=False)
class Positions:
    """The position of every cached token of some sequences of equal length, and the model's own cos and sin for them.

    ``explicit`` (sequences or 1, seq_len), int32, is stored only where positions are not 0, 1, 2, ...; without
    ``rotary`` just the tokens are counted.
    """

    rotary: Rotary | None
    explicit: Tensor | None = None
    seq_len: int = 0
    _table: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    _like: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def advance(self, new_tokens: int, like: Tensor, position_ids: Tensor | None) -> None:
        """Take in the positions (sequences or 1, new_tokens) of new tokens; None without RoPE."""
        start, self.seq_len = self.seq_len, self.seq_len + new_tokens
        if self.rotary is None:
            return
        implicit = _count(start, self.seq_len, like.device)
        step = position_ids.to(torch.int32)
        if self.explicit is not None or not torch.equal(step, implicit.expand_as(step)):
            before = _count(0, start, like.device) if self.explicit is None else self.explicit
            rows = max(before.shape[0], step.shape[0])
            self.explicit = torch.cat([before.expand(rows, -1), step.expand(rows, -1)], dim=1)
        self._like, self._table = like.new_empty(0), None

    def rotate(self, keys: Tensor, start: int) -> Tensor:
        """fp32 keys of tokens start, start + 1, ... -> the keys that attention reads."""
        return rotate(keys, *self.tables(start, keys.shape[-2]))

    def unrotate(self, keys: Tensor, start: int) -> Tensor:
        """The keys that attention reads -> fp32 keys before RoPE."""
        return unrotate(keys, *self.tables(start, keys.shape[-2]))

    def rope(self, start: int) -> Rope | None:
        """RoPE of the keys from token ``start`` on, for kernels that rotate them; None if their positions do not count
        up from there."""
        if self.explicit is not None:
            return None
        module = self.rotary.module
        return Rope(module.inv_freq.float(), start, getattr(module, "attention_scaling", 1.0))

    def tables(self, start: int, length: int) -> tuple[Tensor, ...]:
        """cos and sin of the tokens start, start + 1, ...; those of all are made once in a forward pass."""
        if self._table is None:
            whole = _count(0, self.seq_len, self._like.device) if self.explicit is None else self.explicit
            self._table = self.rotary.tables(whole, self._like)
        return tuple(table[:, start : start + length] for table in self._table)

    def done(self) -> None:
        """Drop the cos and sin of all tokens."""
        self._table = None

    def truncate(self, seq_len: int) -> None:
        """Forget all but the first ``seq_len`` tokens' positions."""
        self.seq_len, self._table = seq_len, None
        if self.explicit is not None:
            self.explicit = self.explicit[:, :seq_len].clone() if seq_len else None

    def select(self, index: Tensor) -> "Positions":
        """A copy with the sequences that ``index`` names."""
        explicit = self.explicit
        if explicit is not None and len(explicit) > 1:
            explicit = explicit[index.to(explicit.device)]
        twin = Positions(self.rotary, explicit, self.seq_len)
        twin._like = self._like
        return twin

    def select_from(self, whole: "Positions", index: Tensor) -> "Positions":
        """A layer's own positions of the sequences ``index``, whose positions are ``whole``: the same ones."""
        return whole


def _count(start: int, stop: int, device) -> Tensor:
    return torch.arange(start, stop, device=device, dtype=torch.int32)[None]


def pick_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (batch, num_kv_heads, kept) of ``x`` (batch, num_kv_heads, rows, ...), each head its own."""
    index = index.view(*index.shape, *[1] * (x.ndim - 3))
    return x.gather(2, index.expand(*index.shape[:3], *x.shape[3:]))


@dataclass(eq=False)
class KeptPositions:
    """The positions of one layer's stored keys: those of ``whole``, less the evicted tokens', for each KV head.

    ``bits`` (uint8, batch x num_kv_heads x bytes) has a bit for each of the first ``upto`` tokens, set if the token is
    kept; all tokens from ``upto`` on are. ``start`` below counts stored tokens.
    """

    whole: Positions
    bits: Tensor | None = None
    upto: int = 0

    def rotate(self, keys: Tensor, start: int) -> Tensor:
        """fp32 keys -> the keys that attention reads."""
        return self.whole.rotate(keys, start) if self.bits is None else self._turn(rotate, keys, start)

    def unrotate(self, keys: Tensor, start: int) -> Tensor:
        """The keys that attention reads -> fp32 keys before RoPE."""
        return self.whole.unrotate(keys, start) if self.bits is None else self._turn(unrotate, keys, start)

    def rope(self, start: int) -> Rope | None:
        """None once tokens were evicted: positions then do not count up."""
        return self.whole.rope(start) if self.bits is None else None

    def keep(self, chosen: Tensor) -> None:
        """Of the stored tokens, forget all but ``chosen`` (batch, num_kv_heads, kept)."""
        chosen = chosen if self.bits is None else self.tokens().gather(-1, chosen)
        self.bits, self.upto = pack_codes(token_mask(chosen, self.whole.seq_len), 1), self.whole.seq_len

    def tokens(self) -> Tensor:
        """The numbers of the stored tokens among all seen: (batch, num_kv_heads, stored)."""
        kept = unpack_codes(self.bits, 1, self.upto)
        new = torch.ones(*kept.shape[:2], self.whole.seq_len - self.upto, dtype=kept.dtype, device=kept.device)
        return torch.cat([kept, new], dim=-1).nonzero()[:, -1].view(*kept.shape[:2], -1)

    def select_from(self, whole: Positions, index: Tensor) -> "KeptPositions":
        """Those of the sequences ``index``, whose positions are ``whole``."""
        return KeptPositions(whole, None if self.bits is None else self.bits[index.to(self.bits.device)], self.upto)

    def _turn(self, turn, keys: Tensor, start: int) -> Tensor:
        index = self.tokens()[..., start : start + keys.shape[-2]]
        tables = self.whole.tables(0, self.whole.seq_len)
        cos, sin = (pick_rows(table[:, None].expand(*keys.shape[:2], -1, -1), index).flatten(0, 1) for table in tables)
        return turn(keys.flatten(0, 1)[:, None], cos, sin).view_as(keys)  # each head as a sequence of its own
