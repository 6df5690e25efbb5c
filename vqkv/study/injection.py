"""Inject outlier channels, loud heads, biases into a model's cache, outputs unchanged, or norms of keys and values.

Attention scores are products of queries and keys, so that what multiplies a key may divide its query (the identity that
SmoothQuant and QServe use to take outliers away, here to make them).
"""

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.layers import kv_layers, plain

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
Rows = tuple[Any, Any]  # weight, a row for each output channel, and bias, which may be None


@torch.no_grad()
def inject(model, keys=None, values=None, key_bias=None):
    """Make a copy of ``model`` with other keys and values, before RoPE: keys times ``keys`` plus ``key_bias``, values
    times ``values``; queries and the output projection are divided by the same.

    All three are broadcast to (num_layers, num_kv_heads, head_dim). Multipliers change no output, if channels that RoPE
    rotates together have the same. A bias is nearly invisible in channels that rotate slowly. Raises ``DataError`` for
    attention that is not four linear layers (Llama, Mistral, Qwen2).
    """
    model = copy.deepcopy(plain(model))
    layers, made = kv_layers(model), hashlib.sha256()
    shape = len(layers), *layers[0].shape[:2]
    for role, x in (("keys", keys), ("values", values), ("bias", key_bias)):
        if x is not None:
            x = torch.as_tensor(x, dtype=torch.float64).broadcast_to(shape)
            made.update(f"{role} {x.tolist()}".encode())
            for layer, own in zip(layers, x, strict=True):
                _change(layer.attention, role, own)
    model.vqkv_name = f"{getattr(model, 'vqkv_name', type(model).__name__)} injected {made.hexdigest()[:8]}"
    return model


def _change(attention: nn.Module, role: str, x: Tensor) -> None:
    """Multiply keys or values of one layer, or add a bias to its keys; ``x`` is (num_kv_heads, head_dim)."""
    queries, key, value, output = _projections(attention, with_bias=role == "bias")
    if role == "keys":
        _times(queries, 1 / x.repeat_interleave(len(queries[0]) // x.numel(), dim=0))
        _times(key, x)
    elif role == "values":
        _times(value, x)
        _times((output, None), 1 / x.repeat_interleave(len(output) // x.numel(), dim=0))
    else:
        key[1].add_(x.flatten().to(key[1]))


@torch.no_grad()
def normed(model, tokens: Tensor, roles: list[str]):
    """Make a copy of a trained Llama that divides keys, values or both (``roles``) by their head's root mean square, as
    Gemma 4 does values. A head's mean size over ``tokens`` moves to queries and output projections."""
    captured = dict(zip(("key", "value"), capture(model, tokens), strict=True))
    model = copy.deepcopy(model)
    for i, layer in enumerate(model.model.layers):
        own, sizes = layer.self_attn, {role: captured[role][i].square().mean(-1).sqrt().mean((0, 2)) for role in roles}
        if "key" in sizes:
            own.q_proj.weight.unflatten(0, (len(sizes["key"]), -1)).mul_(sizes["key"][:, None, None])
            own.k_proj = _with_norms(own.k_proj, own.head_dim)
        if "value" in sizes:
            own.o_proj.weight.unflatten(1, (len(sizes["value"]), -1)).mul_(sizes["value"][:, None])
            own.v_proj = _with_norms(own.v_proj, own.head_dim)
    model.vqkv_name = f"{getattr(model, 'vqkv_name', type(model).__name__)}, {' and '.join(roles)} normed"
    return model


def _with_norms(projection: nn.Module, head_dim: int) -> nn.Sequential:
    norm = nn.RMSNorm(head_dim, eps=1e-6, elementwise_affine=False)
    return nn.Sequential(projection, nn.Unflatten(-1, (-1, head_dim)), norm, nn.Flatten(-2))


def _projections(attention: nn.Module, with_bias: bool) -> tuple[Rows, Rows, Rows, Any]:
    """Return queries, keys (with a bias, if wanted), values, and the output projection's rows by input channel."""
    parts = {name: part for name, part in attention.named_children() if [*part.parameters()]}
    linear = [parts[name] for name in PROJECTIONS if type(parts.get(name)) is nn.Linear]
    if len(linear) < len(PROJECTIONS) or len(parts) > len(linear) or getattr(attention.config, "clip_qkv", None):
        raise DataError(f"inject knows no {type(attention).__name__}, with {', '.join(sorted(parts))}")
    query, key, value, output = linear
    if with_bias and key.bias is None:
        key.bias = nn.Parameter(torch.zeros_like(key.weight[:, 0]))
    return (query.weight, query.bias), (key.weight, key.bias), (value.weight, value.bias), output.weight.T


def _times(rows: Rows, factors: Tensor) -> None:
    weight, bias = rows
    weight.mul_(factors.flatten()[:, None].to(weight))
    if bias is not None:
        bias.mul_(factors.flatten().to(bias))
