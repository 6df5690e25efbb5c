"""Attention that reads packed tokens where they are, without a decoded copy of them.

``model.set_attn_implementation("vqkv_packed")`` makes a ``CompressedCache`` hand over what it stores instead of
decoding it. Everything else (prompts, other caches, presets that kernels cannot read) goes to transformers' ``sdpa``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vqkv.cache.batch import Batch, Group, Pair
from vqkv.cache.store import TokenStore
from vqkv.errors import DataError
from vqkv.kernels import Rope, decode_attention
from vqkv.kernels.precision import full_precision

NAME = "vqkv_packed"
FEW = 16  # new tokens, up to which attention reads packed tokens; it decodes them for more
NOT_A_TENSOR = (
    "keys and values are packed, which only attention set to 'vqkv_packed' reads, but this model changes them first: "
    "call set_attn_implementation('sdpa')"
)
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models pass for attention to do, and this does not


@dataclass
class PackedStates:
    """Stand for keys and for values where a ``CompressedCache`` hands them to attention: ``groups`` of sequences, each
    a function of query (sequences, num_heads, new_tokens, head_dim) and scaling. ``places``: of each group the
    sequences, the slots of their new tokens and of all; empty where nothing is padded."""

    groups: list[Callable[[Tensor, float], Tensor]]
    places: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __getattr__(self, name: str):
        raise DataError(NOT_A_TENSOR)

    @classmethod
    def __torch_function__(cls, *_, **__):
        raise DataError(NOT_A_TENSOR)

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attention of query (batch, num_heads, new_slots, head_dim); 0 where the slot is padding."""
        if not self.places:
            return self.groups[0](query, scaling).to(query.dtype)
        out = torch.zeros_like(query)
        for group, (rows, new, _) in zip(self.groups, self.places, strict=True):
            found = group(query[rows, :, new].transpose(1, 2), scaling)
            out[rows, :, new] = found.transpose(1, 2).to(out.dtype)
        return out


def packed_states(batch: Batch, layer: int, keys: Tensor, parts: list[tuple[Group, Pair]]) -> PackedStates | None:
    """Store the new tokens ``parts`` of ``keys`` and values; return what attention reads of this layer, them included.
    None, and nothing is stored, if they are many or some group's tokens must be decoded."""
    groups = [] if keys.shape[2] > FEW or batch.settings.in_place else [_packed_group(layer, *part) for part in parts]
    if not groups or None in groups:
        return None
    for group, pair in parts:
        for store, x in zip(group.stores[layer], pair, strict=True):
            store.write(x, group.step)
    return PackedStates(groups, batch.places(keys.device))


def _packed_group(layer: int, group: Group, pair: Pair) -> Callable[[Tensor, float], Tensor] | None:
    """Attention to all tokens of a group, the new ``pair`` included; None if they must be decoded."""
    stores = group.stores[layer]
    packed = [store.kernel_view(group.step.past) for store in stores]
    if None in packed:
        return None
    exact = [store.exact(x).float() for store, x in zip(stores, pair, strict=True)]
    keys = stores[0]
    rope = _rope(keys, pair[0].device) if keys.rotation else None

    def attend(query: Tensor, scaling: float) -> Tensor:
        """float32 of the query's shape: new tokens see those before them, and all that is stored."""
        with full_precision(query.device):
            return _joined(query.float(), *exact, scaling, *decode_attention(query, *packed, scaling, rope))

    return attend


def _rope(keys: TokenStore, device) -> Rope:
    return Rope(keys.rotation.angle.to(device), keys.parts[0], keys.rotation.block)


def packed_attention(module, query, key, value, attention_mask, dropout: float = 0.0, scaling=None, **kwargs):
    """An attention function as transformers calls it. Raises ``DataError`` for soft caps and learned sinks."""
    extra = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if extra:
        raise DataError(f"{NAME} does not know this model's {extra}: load it with attn_implementation='eager'")
    if not isinstance(key, PackedStates):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.attend(query, scaling).transpose(1, 2).contiguous(), None


def reads_packed(model, slots: int) -> bool:
    """True if ``model`` is set to attend by ``packed_attention``, each of ``slots`` tokens to all before it."""
    config = model.config.get_text_config()
    reach = [getattr(config, name, None) or slots for name in ("sliding_window", "attention_chunk_size")]
    return config._attn_implementation == NAME and slots <= min(reach) and not model.training


def _joined(query: Tensor, keys: Tensor, values: Tensor, scaling: float, packed: Tensor, total: Tensor) -> Tensor:
    """Attention to exact tokens, the last of which are the queries' own, and to packed ones, which count as one token:
    its value is what attention ``packed`` gave, its score the log-sum-exp ``total`` of theirs."""
    batch, num_kv_heads, stored, head_dim = keys.shape
    new = query.shape[2]
    grouped, packed = (x.reshape(batch, num_kv_heads, -1, head_dim) for x in (query, packed))
    scores = grouped @ keys.mT * scaling
    if new > 1:
        last = torch.arange(new, device=query.device).repeat(grouped.shape[2] // new) + stored - new
        hidden = torch.arange(stored, device=query.device) > last.unsqueeze(-1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.cat([scores, total.reshape(*grouped.shape[:3], 1)], dim=-1).softmax(dim=-1)
    return (weights[..., :-1] @ values + weights[..., -1:] * packed).view(query.shape)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
