"""The attention that each token receives, as the model itself computes it, and the tokens worth keeping for it."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from vqkv.errors import DataError
from vqkv.models.layers import KVLayer, kv_layers
from vqkv.models.plain import evaluating


@contextmanager
def attending(model, implementation: str):
    """Within the context, ``model`` attends by ``implementation``; on leaving, as before."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    before = {name: part._attn_implementation for name, part in {"": config, **parts}.items()}
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def watching_attention(model, see: Callable[[int, Tensor], None], last: int = 0):
    """Within the context, ``model`` attends eagerly and tells ``see(layer_idx, scores)`` of every attention block as it
    ends; on leaving, it attends as before. ``scores`` (batch, num_kv_heads, kv_len), fp32, is the attention that each
    key got, summed over this pass's ``last`` queries (0: all) and over the query heads of its KV head: the model's own
    probabilities."""
    handles = []
    try:
        for layer in kv_layers(model):
            handles.append(layer.attention.register_forward_hook(partial(_tell, layer, see, last)))
        with attending(model, "eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _tell(layer: KVLayer, see, last: int, module, args, output) -> None:
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        raise DataError(f"{type(module).__name__} returns no attention probabilities, so nothing can be read off them")
    sums = weights.detach()[:, :, -last:].sum(dim=2, dtype=torch.float32)
    see(layer.layer_idx, sums.unflatten(1, (layer.num_kv_heads, -1)).sum(dim=2))


@torch.no_grad()
def attention_scores(model, tokens: Tensor, batch_size: int = 8) -> list[Tensor]:
    """Per layer, the attention that each of ``tokens`` (num_seqs, seq_len) received in one causal pass: fp32
    (num_seqs, num_kv_heads, seq_len)."""
    model = evaluating(model)
    found: dict[int, list[Tensor]] = {layer.layer_idx: [] for layer in kv_layers(model)}
    with watching_attention(model, lambda layer, scores: found[layer].append(scores)):
        for batch in tokens.to(model.device).split(batch_size):
            model(batch, use_cache=False)
    return [torch.cat(found[layer]) for layer in sorted(found)]


def heavy_hitters(
    scores: Tensor,
    retain: float = 0.75,
    recent: float = 0.1,
    seen: int | None = None,
    sink_tokens: int = 0,
    recent_window: int = 0,
) -> Tensor:
    """Choose the tokens to keep: int64 (batch, num_kv_heads, kept), ascending, each head its own.

    ``scores`` (batch, num_kv_heads, stored) is the attention that each stored token has received. ``retain`` and
    ``recent`` are shares of the ``seen`` tokens (by default the stored ones), rounded to the nearest token: so many are
    kept in all, and so many of them are the newest, whatever their score; the others are those with the highest scores,
    the newer one on a tie. The first ``sink_tokens`` and the last ``recent_window`` are kept even beyond these shares.
    """
    stored = scores.shape[-1]
    seen = stored if seen is None else seen
    newest = min(stored, max(recent_window, round(recent * seen)))
    kept = min(stored, max(round(retain * seen), sink_tokens + newest, 1))
    ranked = scores.clone()
    ranked[..., :sink_tokens] = ranked[..., stored - newest :] = torch.inf
    order = ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)  # flipped: the newer token wins a tie
    return (stored - 1 - order[..., :kept]).sort(dim=-1).values


def token_mask(index: Tensor, length: int) -> Tensor:
    """Indices (..., kept) -> bool (..., length)."""
    return index.new_zeros((*index.shape[:-1], length), dtype=torch.bool).scatter_(-1, index, True)
