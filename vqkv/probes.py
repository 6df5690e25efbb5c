"""What a model shows of the published phenomena: magnitudes, outlier channels, attention sinks, EVR, recall."""

from itertools import pairwise

import torch

from vqkv.capture import capture
from vqkv.learn.ridge import Ridge, predict
from vqkv.metrics import explained_variance_ratio
from vqkv.recall import RecallTask

RECALL_EDGES = (0, 64, 128, 256, 512, 1024)


def channel_outlier_ratio(x: torch.Tensor) -> torch.Tensor:
    """(batch, num_kv_heads, seq_len, head_dim) -> (num_kv_heads,): the largest channel's mean |x| over the median's."""
    size = x.float().abs().mean(dim=(0, 2))
    return size.amax(-1) / size.median(-1).values


@torch.inference_mode()
def sink_strength(model, tokens: torch.Tensor, skip: int = 16, batch_size: int = 2) -> torch.Tensor:
    """(num_layers, num_heads): the mean attention that queries after position ``skip`` pay to the first token.

    Without a sink it would be about the mean of 1 / position. Runs eager attention, which alone returns its weights.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        sums = None
        for batch in tokens.split(batch_size):
            maps = model(batch.to(model.device), output_attentions=True, use_cache=False).attentions
            first = torch.stack([m[:, :, skip:, 0].float().mean(dim=2).sum(dim=0) for m in maps])
            sums = first if sums is None else sums + first
    finally:
        model.set_attn_implementation(before)
    return sums.cpu() / len(tokens)


def interlayer_evr(model, train: torch.Tensor, test: torch.Tensor) -> dict[str, list[float]]:
    """Held-out EVR of each layer's K from the K before it, and V from [V before it; its own K], from layer 1 on
    (AQUA-KV's two predictors, on exact inputs)."""
    flat = [[[_flat(x) for x in role] for role in capture(model, tokens)] for tokens in (train, test)]
    (train_k, train_v), (test_k, test_v) = flat
    found = {"key": [], "value": []}
    for layer in range(1, len(train_k)):
        found["key"].append(_evr(train_k[layer - 1], train_k[layer], test_k[layer - 1], test_k[layer]))
        fit_x = torch.cat([train_v[layer - 1], train_k[layer]], dim=1)
        test_x = torch.cat([test_v[layer - 1], test_k[layer]], dim=1)
        found["value"].append(_evr(fit_x, train_v[layer], test_x, test_v[layer]))
    return found


@torch.inference_mode()
def recall_by_distance(
    model, tokenizer, seq_len: int, num_seqs: int, seed: int, batch_size: int = 4
) -> dict[str, float]:
    """Greedy accuracy of key-value recall, by how many tokens back the value stands; chance is 1 in 128."""
    batch = RecallTask(tokenizer).batch(seq_len, num_seqs, seed, num_pairs=None)
    hits = []
    for tokens in batch.tokens.split(batch_size):
        logits = model(tokens.to(model.device), use_cache=False).logits.cpu()
        hits.append(logits[:, :-1].argmax(-1) == tokens[:, 1:])
    hits, answers, distance = torch.cat(hits), batch.answers[:, 1:], batch.distance[:, 1:]
    found = {}
    for low, high in pairwise(RECALL_EDGES):
        chosen = answers & (distance > low) & (distance <= high)
        if chosen.any():
            found[f"{low + 1}-{high}"] = hits[chosen].float().mean().item()
    return found


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(batch, num_kv_heads, seq_len, head_dim) -> (tokens, width), all heads of a token side by side."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).float()


def _evr(fit_x, fit_y, test_x, test_y) -> float:
    ridge = Ridge()
    ridge.accumulate(fit_x, fit_y)
    return explained_variance_ratio(test_y, predict(ridge.solve(), test_x))
