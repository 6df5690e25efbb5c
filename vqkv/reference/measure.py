"""Abilities of a reference model: bits per byte, recall by pairs and distance, induction."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from vqkv.reference.data import token_bytes
from vqkv.reference.rows import IGNORE, TokenStream, Words, recall

PAIRS, GAPS = (2, 4, 8, 16, 32), (200, 500, 850)


def abilities(model, tokenizer, words: Words, text: TokenStream | None, windows: int, rows: int = 16) -> dict:
    """Recall by pairs and, with a text, behind that many of its tokens, induction and bits per byte, rounded."""
    found = {"recall": {str(n): round(recall_accuracy(model, words, n, rows=rows)[0], 3) for n in PAIRS}}
    found["induction"] = round(induction_score(model, words.all), 3)
    if text is not None:
        far = {str(gap): recall_accuracy(model, words, 8, rows=rows, text=text, gap=gap) for gap in GAPS}
        found["recall_by_gap"] = {gap: round(accuracy, 3) for gap, (accuracy, _, _) in far.items()}
        found["bits_per_byte"] = round(bits_per_byte(model, text, token_bytes(tokenizer), windows=windows), 4)
    return found


@torch.no_grad()
def bits_per_byte(model, text: TokenStream, sizes: np.ndarray, seq_len: int = 1024, windows: int = 64) -> float:
    """Mean over ``windows`` evenly spaced windows of a token file, each read from its own BOS."""
    starts = np.linspace(0, len(text.ids) - seq_len, windows).astype(int)
    nats = size = 0
    for start in starts:
        ids = text.ids[start : start + seq_len - 1].astype(np.int64)
        row = torch.from_numpy(np.append(text.bos, ids))[None].to(model.device)
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        nats += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        size += sizes[ids].sum()
    return nats / size / math.log(2)


@torch.no_grad()
def recall_accuracy(
    model, words: Words, num_pairs: int, seed: int = 0, rows: int = 16, text: TokenStream | None = None, gap: int = 0
):
    """(accuracy, queries, mean distance): greedy values of keys listed before, ``gap`` tokens of text in between."""
    rng = np.random.default_rng([seed, num_pairs, gap])
    seq_len = 1 + 2 * 3 * num_pairs + (gap + 1 if gap else 0)
    found = [recall(rng, seq_len, words, num_pairs, text.span(rng, gap) if gap else None) for _ in range(rows)]
    tokens, labels, distance = (torch.from_numpy(np.stack(column)) for column in zip(*found))
    guesses = torch.cat([_greedy(model, part) for part in tokens.split(8)])
    asked = labels[:, 1:] != IGNORE
    right = (guesses[:, :-1] == labels[:, 1:])[asked].float()
    return right.mean().item(), int(asked.sum()), distance[:, 1:][asked].float().mean().item()


def _greedy(model, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens.to(model.device), use_cache=False).logits.argmax(-1).cpu()


@torch.no_grad()
def induction_score(model, tokens: np.ndarray, seed: int = 0, length: int = 64, rows: int = 4) -> float:
    """Attention of the best head, mean over a repeated segment of random ``tokens``, on the token after the previous
    occurrence."""
    rng = np.random.default_rng(seed)
    segment = torch.from_numpy(rng.choice(tokens, (rows, length)).astype(np.int64))
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    attentions = model(
        input_ids=torch.cat([segment, segment], 1).to(model.device), use_cache=False, output_attentions=True
    ).attentions
    model.set_attn_implementation(implementation)
    scores = [
        a[:, :, length:].diagonal(offset=1, dim1=2, dim2=3)[..., : length - 1].mean((0, 2)).max() for a in attentions
    ]
    return max(scores).item()
