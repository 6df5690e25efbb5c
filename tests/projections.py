"""The projections that make keys and values, by name: what a model hands to its cache can be checked against them."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class KVSource:
    """The modules whose outputs are one layer's keys and values, before RoPE: (batch, seq_len, ...num_kv_heads *
    head_dim). A fused projection (GPT-2) is both, and holds keys and values in two of ``num_parts`` equal parts."""

    layer_idx: int
    attention: nn.Module
    key_module: nn.Module
    value_module: nn.Module
    num_kv_heads: int
    head_dim: int
    key_part: int = 0
    value_part: int = 0
    num_parts: int = 1

    def heads(self, output: torch.Tensor, part: int) -> torch.Tensor:
        """A projection's output -> (batch, num_kv_heads, seq_len, head_dim)."""
        batch, seq_len = output.shape[:2]
        flat = output.reshape(batch, seq_len, -1).chunk(self.num_parts, dim=-1)[part]
        return flat.reshape(batch, seq_len, self.num_kv_heads, self.head_dim).transpose(1, 2)


def kv_sources(model) -> list[KVSource]:
    """One ``KVSource`` per decoder layer, in layer order."""
    sources = []
    for module in model.modules():
        if hasattr(module, "k_proj") and hasattr(module, "head_dim"):
            key, heads = getattr(module, "k_norm", None) or module.k_proj, module.v_proj.out_features // module.head_dim
            sources.append(KVSource(module.layer_idx, module, key, module.v_proj, heads, module.head_dim))
        elif fused := getattr(module, "c_attn", None):
            about = module.num_heads, module.head_dim, 1, 2, 3
            sources.append(KVSource(module.layer_idx, module, fused, fused, *about))
    return sorted(sources, key=lambda source: source.layer_idx)


@contextmanager
def changed(model, layer_role, change):
    """Let ``change`` make other keys (before RoPE) or values (batch, num_kv_heads, seq_len, head_dim) of a layer."""
    source = kv_sources(model)[layer_role[1]]
    key = layer_role[0] == "key"
    module, part = (source.key_module, source.key_part) if key else (source.value_module, source.value_part)

    def hook(module, args, output):
        new = change(source.heads(output, part)).transpose(1, 2).flatten(2)
        parts = [*output.flatten(2).chunk(source.num_parts, dim=-1)]
        parts[part] = new.to(output)
        return torch.cat(parts, dim=-1).view(output.shape)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
