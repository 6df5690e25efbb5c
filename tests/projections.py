"""The projections that make keys and values, by name: what a model hands to its cache can be checked against them."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class KVSource:
    """The modules whose outputs are one layer's keys and values, before RoPE.

    ``key_module``'s output holds the keys as (batch, seq_len, ...num_kv_heads * head_dim); in a fused projection
    (GPT-2) both modules are the same and ``key_part`` / ``value_part`` say which of ``num_parts`` equal parts.
    """

    layer_idx: int
    attention: nn.Module
    key_module: nn.Module
    value_module: nn.Module
    num_kv_heads: int
    head_dim: int
    key_part: int = 0
    value_part: int = 0
    num_parts: int = 1

    @property
    def sides(self) -> tuple[tuple[nn.Module, int], tuple[nn.Module, int]]:
        """Module and part of the keys, and of the values."""
        return (self.key_module, self.key_part), (self.value_module, self.value_part)

    def heads(self, output: torch.Tensor, part: int) -> torch.Tensor:
        """A projection's output -> (batch, num_kv_heads, seq_len, head_dim)."""
        batch, seq_len = output.shape[:2]
        flat = output.reshape(batch, seq_len, -1).chunk(self.num_parts, dim=-1)[part]
        return flat.reshape(batch, seq_len, self.num_kv_heads, self.head_dim).transpose(1, 2)


def kv_sources(model) -> list[KVSource]:
    """One ``KVSource`` per decoder layer, in layer order."""
    found = [source for module in model.modules() if (source := _kv_source(module)) is not None]
    return sorted(found, key=lambda source: source.layer_idx)


def _kv_source(module: nn.Module) -> KVSource | None:
    if isinstance(getattr(module, "k_proj", None), nn.Module) and isinstance(
        getattr(module, "v_proj", None), nn.Module
    ):
        if not hasattr(module, "layer_idx") or not hasattr(module, "head_dim"):
            return None
        head_dim = module.head_dim
        key = getattr(module, "k_norm", None) or module.k_proj
        width = module.v_proj.weight.shape[0]
        return KVSource(module.layer_idx, module, key, module.v_proj, width // head_dim, head_dim)
    fused = getattr(module, "c_attn", None)
    if isinstance(fused, nn.Module) and not getattr(module, "is_cross_attention", False):
        return KVSource(module.layer_idx, module, fused, fused, module.num_heads, module.head_dim, 1, 2, 3)
    return None
