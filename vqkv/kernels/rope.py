"""Rotary position embedding applied to keys, and undone, at given positions."""

import torch


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE as the Llama family does: channel i is paired with channel i + rotary_dim / 2. ``keys`` (batch,
    num_kv_heads, seq_len, head_dim); ``cos`` and ``sin`` (batch or 1, seq_len, rotary_dim). Channels beyond rotary_dim
    pass through."""
    cos, sin = (table.unsqueeze(1).to(keys.device) for table in (cos, sin))
    rotated, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
    rotated = rotated * cos + _rotate_half(rotated) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def unrotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Undo ``rotate`` with the same ``cos`` and ``sin``; in fp32 to about 1e-6 of the keys' size."""
    return rotate(keys, cos, -sin)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
