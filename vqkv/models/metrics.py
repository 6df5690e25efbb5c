"""Distances of a model that read a compressed cache from one that read its own; what its attention makes of errors."""

import itertools
import threading

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vqkv.errors import DataError
from vqkv.models.layers import copied, kv_layers


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood in nats: logits (batch, seq_len, vocab), targets (batch, seq_len) -> (batch, seq_len)."""
    flat = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")  # four times as fast
    return flat.view(targets.shape)


def token_kl(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(reference || logits) in nats, next token: (batch, seq_len, vocab) twice -> (batch, seq_len)."""
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def top1_agreement(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return 1.0 where both pick the same next token: (batch, seq_len, vocab) twice -> (batch, seq_len)."""
    return (reference.argmax(-1) == logits.argmax(-1)).float()


def top2_agreement(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return 1.0 where the reference's next token is among the two likeliest here: (batch, seq_len, vocab) twice."""
    return (logits.topk(2).indices == reference.argmax(-1, keepdim=True)).any(-1).float()


@torch.no_grad()
def attention_metrics(model, tokens: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Compute what attention makes of errors, by role and layer: fp32 (num_kv_heads, head_dim, head_dim).

    Of a head's keys, after RoPE, the second moments M of the queries that read them; of its values theirs, each
    weighted by k' M k of its own key k, over the mean of that (OSCAR, arXiv 2605.17757). ``tokens``: (num_seqs,
    seq_len). Raises ``DataError`` for a model whose attention does not show them."""
    moments: dict[tuple[str, int], torch.Tensor] = {}

    def watched(module, query, key, value, *arguments, **more):
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        moment = torch.einsum("bhgtc,bhgtd->hcd", grouped, grouped) / grouped[:, 0, ..., 0].numel()
        scores = torch.einsum("bhtc,hcd,bhtd->bht", key.float(), moment, key.float())
        weights = (scores / scores.mean((0, 2)).view(1, -1, 1).clamp_min(1e-12)).sqrt().unsqueeze(-1) * value.float()
        moments["key", module.layer_idx] = moment
        moments["value", module.layer_idx] = torch.einsum("bhtc,bhtd->hcd", weights, weights) / scores[:, 0].numel()
        return sdpa_attention_forward(module, query, key, value, *arguments, **more)

    name, separate = f"vqkv_watched_{threading.get_ident()}", copied(model)  # other threads may run the model
    AttentionInterface.register(name, watched)
    AttentionMaskInterface.register(name, sdpa_mask)
    separate.set_attn_implementation(name)
    separate(tokens.to(model.device), use_cache=False)
    metrics: dict[tuple[str, int], torch.Tensor] = {}
    for (i, layer), role in itertools.product(enumerate(kv_layers(model)), ("key", "value")):
        moment = moments.get((role, layer.layer_idx))
        if moment is None or moment.shape[:2] != (layer.shape[0], layer.shape[1 + (role == "value")]):
            why = f"{type(model).__name__} does not show what reads the {role}s of layer {i} as they are cached"
            raise DataError(f"{why}: use turboquant or live")
        metrics[role, i] = moment
    return metrics
