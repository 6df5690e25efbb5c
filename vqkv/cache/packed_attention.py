"""Attention that reads packed tokens where they are, without a decoded copy of them.

``model.set_attn_implementation("vqkv_packed")``, or that name for ``attn_implementation`` when a model is loaded, makes
a ``CompressedCache`` hand over what it stores instead of decoding it. Everything else (prompts, other caches, presets
that kernels cannot read) goes to transformers' ``sdpa``.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vqkv.cache.batch import Batch, Group, Pair, pad
from vqkv.errors import DataError
from vqkv.kernels import Packed, Rope, decode, decode_attention
from vqkv.kernels.naive import merge
from vqkv.kernels.precision import full_precision

NAME = "vqkv_packed"
FEW = 16  # new tokens, up to which attention reads packed tokens; it decodes them for more
HIDDEN = -1e4  # what is added to a score that softmax is to pass over is below it
NOT_A_TENSOR = (
    "keys and values are packed, and only attention set to 'vqkv_packed' reads them: this model changes them first, or "
    "the cache was made for another model. Make a cache for this one, or call set_attn_implementation('sdpa') on both"
)
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models pass for attention to do, and this does not


@dataclass
class PackedGroup:
    """Tokens of some sequences of equal length as attention reads them: packed ones after the first ``sinks`` of the
    exact ones, which are sinks, recent window and the new tokens, (sequences, num_kv_heads, tokens, head_dim)."""

    keys: Packed
    values: Packed
    rope: Rope | None  # of packed keys that are stored before it
    exact_keys: Tensor
    exact_values: Tensor
    sinks: int

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """query (sequences, num_heads, new_tokens, head_dim), rotated, -> float32 of that shape. New tokens see those
        before them, and all that is stored."""
        with full_precision(query.device):
            parts = [decode_attention(query, self.keys, self.values, scaling, self.rope)]
            if self.exact_keys.shape[2]:
                parts.append(_causal(query.float(), self.exact_keys.float(), self.exact_values.float(), scaling))
            return merge(parts)[0] if len(parts) > 1 else parts[0][0]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens in their order, decoded."""
        turn = self.rope and self.rope.turn(self.keys.shape[2])
        both = zip((self.keys, self.values), (self.exact_keys, self.exact_values), (turn, None), strict=True)
        return tuple(
            torch.cat([x[:, :, : self.sinks], decode(packed, turn=turned, dtype=x.dtype), x[:, :, self.sinks :]], dim=2)
            for packed, x, turned in both
        )


@dataclass
class PackedStates:
    """Stand for keys and for values where a ``CompressedCache`` hands them to attention: ``groups`` of sequences.

    ``places``: of each group the sequences, the slots of their new tokens and of all; empty where nothing is padded.
    ``tokens``, bool (batch, slots): which slots are none; None: all hold tokens. ``judged``: masks that other layers of
    this pass were given, and whether they are ``plain``.
    """

    groups: list[PackedGroup]
    shape: torch.Size  # of the keys that it stands for
    places: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    tokens: Tensor | None = None
    judged: list[tuple[Tensor, bool]] = field(default_factory=list)

    def __getattr__(self, name: str):
        raise DataError(NOT_A_TENSOR)

    @classmethod
    def __torch_function__(cls, *_, **__):
        raise DataError(NOT_A_TENSOR)

    def plain(self, mask: Tensor | None) -> bool:
        """True if ``mask`` (batch or 1, num_heads or 1, new_slots, slots), bool or to be added to scores, shows each
        new token just the tokens up to itself. Read once a pass, as reading it waits for a GPU."""
        if mask is None:
            return True
        for seen, verdict in self.judged:
            if seen is mask:
                return verdict
        self.judged.append((mask, self._judge(mask)))
        return self.judged[-1][1]

    def _judge(self, mask: Tensor) -> bool:
        slots, new = self.shape[2], mask.shape[2]
        if mask.ndim != 4 or mask.shape[3] != slots:
            return False
        shown = mask if mask.dtype is torch.bool else mask == 0
        if mask.dtype is not torch.bool and not (shown | (mask < HIDDEN)).all():
            return False  # it shifts scores
        last = torch.arange(slots - new, slots, device=mask.device)
        expected = torch.arange(slots, device=mask.device) <= last.unsqueeze(-1)
        if self.tokens is None:
            return bool((shown == expected).all())
        tokens = self.tokens.to(mask.device)
        asking = tokens[:, None, slots - new :, None]  # what padding attends to is nobody's affair
        return bool(((shown == (expected & tokens[:, None, None])) | ~asking).all())

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attention of query (batch, num_heads, new_slots, head_dim); 0 where the slot is padding."""
        if not self.places:
            return self.groups[0].attend(query, scaling).to(query.dtype)
        out = torch.zeros_like(query)
        for group, (rows, new, _) in zip(self.groups, self.places, strict=True):
            found = group.attend(query[rows, :, new].transpose(1, 2), scaling)
            out[rows, :, new] = found.transpose(1, 2).to(out.dtype)
        return out

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, num_kv_heads, slots, head_dim), decoded; slots of padding read as zeros."""
        read = [group.dense() for group in self.groups]
        return pad(read, self.places, self.shape[0], self.shape[2]) if self.places else read[0]


def packed_states(batch: Batch, layer: int, keys: Tensor, parts: list[tuple[Group, Pair]]) -> PackedStates | None:
    """Store the new tokens ``parts`` of ``keys`` and values; return what attention reads of this layer, them included.
    None, and nothing is stored, if they are many or some group's tokens must be decoded."""
    groups = [] if keys.shape[2] > FEW or batch.settings.in_place else [_packed_group(layer, *part) for part in parts]
    if not groups or None in groups:
        return None
    for group, pair in parts:
        for store, x in zip(group.stores[layer], pair, strict=True):
            store.write(x, group.step)
    shape = torch.Size((*keys.shape[:2], batch.slots, keys.shape[3]))
    return PackedStates(groups, shape, batch.places(keys.device), batch.tokens, batch.judged)


def _packed_group(layer: int, group: Group, pair: Pair) -> PackedGroup | None:
    keys, values = group.stores[layer]
    sinks, turned = keys.parts[0], keys.positions is not None
    rope = keys.positions.rope(sinks) if turned else None
    packed = keys.packed(group.step.past), values.packed(group.step.past)
    if None in packed or (turned and rope is None):
        return None
    return PackedGroup(*packed, rope, keys.exact(pair[0]), values.exact(pair[1]), sinks)


def packed_attention(module, query, key, value, attention_mask, dropout: float = 0.0, scaling=None, **kwargs):
    """An attention function as transformers calls it. Raises ``DataError`` for a model whose attention does what
    neither this nor ``sdpa`` does (soft caps, learned sinks)."""
    extra = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if extra:
        raise DataError(f"{NAME} does not know this model's {extra}: load it with attn_implementation='eager'")
    if not isinstance(key, PackedStates):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if dropout or not key.plain(attention_mask):  # sliding windows, chunks, masks of the caller's own
        keys, values = key.dense()
        return sdpa_attention_forward(module, query, keys, values, attention_mask, dropout, scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.attend(query, scaling).transpose(1, 2).contiguous(), None


def chosen(model) -> bool:
    """True if ``model`` is set to attend by ``packed_attention``."""
    return model.config.get_text_config()._attn_implementation == NAME


def _causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention to exact tokens, of which the last are the queries' own, and its log-sum-exp."""
    batch, num_kv_heads, stored, head_dim = keys.shape
    new = query.shape[2]
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    scores = grouped @ keys.mT * scaling
    if new > 1:
        last = torch.arange(new, device=query.device).repeat(grouped.shape[2] // new) + stored - new
        hidden = torch.arange(stored, device=query.device) > last.unsqueeze(-1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out, total = scores.softmax(dim=-1) @ values, scores.logsumexp(dim=-1)
    return out.view(query.shape), total.view(query.shape[:3])


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
