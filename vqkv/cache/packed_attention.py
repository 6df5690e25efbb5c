"""Attention that reads packed tokens where they are, without a decoded copy of them.

``model.set_attn_implementation("vqkv_packed")`` makes a ``CompressedCache`` hand over what it stores instead of
decoding it. Everything else (prompts, other caches, presets that kernels cannot read) goes to transformers' ``sdpa``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vqkv.cache.groups import Group, Pair
from vqkv.errors import DataError
from vqkv.kernels import Rope, decode_attention
from vqkv.kernels.precision import full_precision

NAME = "vqkv_packed"
FEW = 16  # new tokens, up to which attention reads packed tokens; it decodes them for more
UNLIMITED = 1 << 62  # slots
CHANGE_VALUES = {"diffllama"}  # models that do so between cache and attention, and so need tensors
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models pass for attention to do, and this does not

Reader = Callable[[Tensor, float], Tensor]  # query (sequences, num_heads, new_tokens, head_dim), scaling -> attention


@dataclass
class PackedStates:
    """What a ``CompressedCache`` hands to attention in place of keys and of values, and no tensor: how to read each
    group's tokens."""

    readers: list[tuple[Group, Reader]]

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attend with query (batch, num_heads, new_slots, head_dim); 0 where the slot is padding."""
        out = torch.zeros_like(query)
        for group, reader in self.readers:
            if group.slots is None:
                return reader(query, scaling).to(query.dtype)
            group.put(out, reader(group.take(query), scaling))
        return out


def packed_states(groups: list[Group], layer: int, pairs: list[Pair]) -> PackedStates | None:
    """Store the new ``pairs`` of all groups; return what attention to all tokens needs. None, and nothing is stored, if
    they are many or some group's tokens must be decoded."""
    readers = []
    for group, pair in zip(groups, pairs, strict=True):
        if pair[0].shape[2] > FEW or (reader := _reader(group, layer, pair)) is None:
            return None
        readers.append((group, reader))
    for group, pair in zip(groups, pairs, strict=True):
        for store, x in zip(group.stores[layer], pair, strict=True):
            store.write(x)
    return PackedStates(readers)


def _reader(group: Group, layer: int, pair: Pair) -> Reader | None:
    """Attend to a group's tokens as they are before the new ``pair`` is stored, and to that; None if they must be
    decoded."""
    keys, values = group.stores[layer]
    packed_keys, packed_values = keys.kernel_view(), values.kernel_view()
    if packed_keys is None or packed_values is None:
        return None
    exact_keys, exact_values = (
        torch.cat([x.to(new.dtype) for x in (store.sinks, store.window, new) if x is not None], dim=2).float()
        for store, new in zip((keys, values), pair, strict=True)
    )
    rope = None
    if keys.rotation is not None:
        rope = Rope(keys.rotation.angle.to(pair[0].device), keys.parts[0], keys.rotation.block)

    def attend(query: Tensor, scaling: float) -> Tensor:
        """Attend from new tokens to those before them and all that is stored: float32 of the query's shape."""
        with full_precision(query.device):
            packed = decode_attention(query, packed_keys, packed_values, scaling, rope)
            return _joined(query.float(), exact_keys, exact_values, scaling, *packed)

    return attend


def packed_attention(module, query, key, value, attention_mask, dropout: float = 0.0, scaling=None, **kwargs):
    """Attend, as transformers calls it. Raises ``DataError`` for soft caps and learned sinks."""
    if extra := [name for name in UNKNOWN if kwargs.get(name) is not None]:
        raise DataError(f"{NAME} does not know this model's {extra}: load it with attn_implementation='eager'")
    if not isinstance(key, PackedStates):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.attend(query, scaling).transpose(1, 2).contiguous(), None


def packed_slots(model) -> int:
    """Count the slots up to which ``model``, if it is there, is set to attend by ``packed_attention``, each to all
    before it."""
    if model is None:
        return 0
    config = model.config.get_text_config()
    if config._attn_implementation != NAME or model.training or config.model_type in CHANGE_VALUES:
        return 0
    return min(getattr(config, name, None) or UNLIMITED for name in ("sliding_window", "attention_chunk_size"))


def _joined(query: Tensor, keys: Tensor, values: Tensor, scaling: float, packed: Tensor, total: Tensor) -> Tensor:
    """Attend to exact tokens, the last of which are the queries' own, and to packed ones, which count as one token:
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
