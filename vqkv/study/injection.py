"""Injected phenomena: another model with the same outputs, whose cache has outlier channels, loud heads or biases; and
norms of keys and values put into a trained model.

Attention scores are products of queries and keys, so that what multiplies a key may divide its query (the identity that
SmoothQuant and QServe use to take outliers away, here to make them).
"""

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.layers import KVLayer, kv_layers
from vqkv.models.plain import plain
from vqkv.models.rope import rotations

SEPARATE, FUSED = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"c_attn", "c_proj"}
Rows = tuple[Tensor, Tensor | None]  # weight, a row for each output channel, and bias


@torch.no_grad()
def inject(model, keys=None, values=None, key_bias=None):
    """A deep copy of ``model`` with other keys and values, before RoPE: keys times ``keys`` plus ``key_bias``, values
    times ``values``; queries and the output projection are divided by the same.

    All three are broadcast to (num_layers, num_kv_heads, head_dim). Multipliers change no output. A bias changes none
    without RoPE, and is nearly invisible with it in channels that rotate slowly. The copy's configuration does not know
    of a new bias: save its weights, not the model. Takes attention with ``q_proj``, ``k_proj``, ``v_proj`` and
    ``o_proj`` (Llama, Mistral, Qwen2) or GPT-2's. Raises ``DataError`` for any other, for numbers that are not finite
    or do not fit, and for unequal multipliers of channels that RoPE rotates together.
    """
    model = plain(model)
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise DataError("some weights are not in memory: inject into a model that fits on its devices twice")
    layers, name = kv_layers(model), getattr(model, "vqkv_name", type(model).__name__)
    keys, values = _spread("keys", keys, layers, 1), _spread("values", values, layers, 2)
    biases = _spread("key_bias", key_bias, layers, 1)
    if keys is not None:
        _check_pairs(model, keys)
    model = copy.deepcopy(model)
    for i, layer in enumerate(kv_layers(model)):
        queries, key, value, output = _projections(layer.attention, with_bias=biases is not None)
        if keys is not None:
            _times(queries, 1 / keys[i].repeat_interleave(len(queries[0]) // keys[i].numel(), dim=0))
            _times(key, keys[i])
        if values is not None:
            _times(value, values[i])
            _times((output, None), 1 / values[i].repeat_interleave(len(output) // values[i].numel(), dim=0))
        if biases is not None:
            key[1].add_(biases[i].flatten().to(key[1]))
    made = [*(keys or []), *(values or []), *(biases or [])]
    model.vqkv_name = f"{name} injected {hashlib.sha256(str([x.tolist() for x in made]).encode()).hexdigest()[:8]}"
    return model


class HeadNorm(nn.Module):
    """Each head's vector over its root mean square, without a weight, as Gemma 4 does to its values."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        """(..., num_kv_heads * head_dim), the same shape."""
        return F.rms_norm(x.unflatten(-1, (-1, self.head_dim)), (self.head_dim,), eps=1e-6).flatten(-2)


@torch.no_grad()
def normed(model, tokens: Tensor, roles: list[str]):
    """A copy of a trained Llama with ``HeadNorm`` after its keys, its values or both (``roles``). The mean size of a
    head's vectors over ``tokens`` moves to queries and output projections; nothing is trained afterwards."""
    captured = dict(zip(("key", "value"), capture(model, tokens), strict=True))
    model = copy.deepcopy(model)
    for i, layer in enumerate(model.model.layers):
        own, sizes = layer.self_attn, {role: captured[role][i].square().mean(-1).sqrt().mean((0, 2)) for role in roles}
        if "key" in sizes:
            own.q_proj.weight.unflatten(0, (len(sizes["key"]), -1)).mul_(sizes["key"][:, None, None])
            own.k_proj = nn.Sequential(own.k_proj, HeadNorm(own.head_dim))
        if "value" in sizes:
            own.o_proj.weight.unflatten(1, (len(sizes["value"]), -1)).mul_(sizes["value"][:, None])
            own.v_proj = nn.Sequential(own.v_proj, HeadNorm(own.head_dim))
    model.vqkv_name = f"{getattr(model, 'vqkv_name', type(model).__name__)}, {' and '.join(roles)} normed"
    return model


def _spread(name: str, x, layers: list[KVLayer], part: int) -> list[Tensor] | None:
    """(num_kv_heads, head_dim) of each layer; ``part`` of its shape is the head_dim."""
    if x is None:
        return None
    x = torch.as_tensor(x, dtype=torch.float64)
    shapes = [(len(layers), layer.num_kv_heads, layer.shape[part]) for layer in layers]
    ends = [zip(reversed(x.shape), reversed(shape)) for shape in shapes]
    fits = x.ndim <= 3 and all(given in (1, wanted) for pairs in ends for given, wanted in pairs)
    if not fits or not x.isfinite().all() or (name != "key_bias" and not x.all()):
        raise DataError(
            f"{name} of shape {tuple(x.shape)}: give finite numbers (multipliers: none of them 0) that broadcast to "
            f"(num_layers, num_kv_heads, head_dim), here {shapes[0]}"
        )
    return [x.broadcast_to(shape)[i] for i, shape in enumerate(shapes)]


def _check_pairs(model, keys: list[Tensor]) -> None:
    for i, (turn, factors) in enumerate(zip(rotations(model), keys, strict=True)):
        if turn is None:
            continue
        uneven = (factors[:, turn.first] != factors[:, turn.second]).any(dim=0).nonzero()
        if len(uneven):
            a, b = (int(channels[uneven[0, 0]]) for channels in (turn.first, turn.second))
            raise DataError(
                f"RoPE rotates channels {a} and {b} of layer {i} together: give them the same key multiplier, or the "
                "outputs would change"
            )


def _projections(attention: nn.Module, with_bias: bool) -> tuple[Rows, Rows, Rows, Tensor]:
    """Queries, keys (with a bias, if one is wanted), values; of the output projection a row for each input channel."""
    parts: dict[str, Any] = {name: part for name, part in attention.named_children() if [*part.parameters()]}
    kinds = {type(part) for part in parts.values()}
    bare = not [*attention.parameters(recurse=False)] and not getattr(attention.config, "clip_qkv", None)
    if bare and parts.keys() == SEPARATE and kinds == {nn.Linear}:
        if with_bias and parts["k_proj"].bias is None:
            parts["k_proj"].bias = nn.Parameter(torch.zeros_like(parts["k_proj"].weight[:, 0]))
        q, k, v = ((parts[name].weight, parts[name].bias) for name in ("q_proj", "k_proj", "v_proj"))
        return q, k, v, parts["o_proj"].weight.T
    if bare and parts.keys() == FUSED and kinds == {Conv1D}:
        q, k, v = zip(parts["c_attn"].weight.T.chunk(3), parts["c_attn"].bias.chunk(3), strict=True)
        return q, k, v, parts["c_proj"].weight
    raise DataError(
        f"inject knows no {type(attention).__name__}, with {', '.join(sorted(parts))}: it takes attention that is four "
        "linear layers without norms (LlamaAttention, Qwen2Attention) and GPT2Attention"
    )


def _times(rows: Rows, factors: Tensor) -> None:
    weight, bias = rows
    weight.mul_(factors.flatten()[:, None].to(weight))
    if bias is not None:
        bias.mul_(factors.flatten().to(bias))
