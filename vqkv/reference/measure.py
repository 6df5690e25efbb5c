"""Abilities of a reference model: bits per byte, recall by pairs and distance, induction."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from vqkv.reference.rows import IGNORE, TokenStream, Words, recall

PAIRS, GAPS = (2, 4, 8, 16, 32), (200, 500, 850)


def abilities(model, tokenizer, text: TokenStream, windows: int, rows: int = 16) -> dict:
    """Measure recall by pairs and behind tokens of ``text``, induction, and bits per byte; rounded."""
    words = Words.of(tokenizer)
    near = {str(pairs): recall_accuracy(model, words, pairs, rows=rows) for pairs in PAIRS}
    far = {str(gap): recall_accuracy(model, words, 8, rows=rows, text=text, gap=gap) for gap in GAPS}
    return {
        "recall": {pairs: round(accuracy, 3) for pairs, accuracy in near.items()},
        "recall_by_gap": {gap: round(accuracy, 3) for gap, accuracy in far.items()},
        "induction": round(induction_score(model, words.all), 3),
        "bits_per_byte": round(bits_per_byte(model, text, token_bytes(tokenizer), windows=windows), 4),
    }


def token_bytes(tokenizer) -> np.ndarray:
    """Return (vocab_size,) UTF-8 bytes that each token stands for: what bits per byte divides by."""
    sizes = np.zeros(len(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if index in tokenizer.all_special_ids else len(token)  # byte-level: one character a byte
    return sizes


@torch.no_grad()
def bits_per_byte(model, text: TokenStream, sizes: np.ndarray, seq_len: int = 1024, windows: int = 64) -> float:
    """Measure the mean over ``windows`` evenly spaced windows of a token file, each read from its own BOS."""
    nats = size = 0.0
    for start in np.linspace(0, len(text.ids) - seq_len, windows).astype(int):
        ids = text.ids[start : start + seq_len - 1].astype(np.int64)
        row = torch.from_numpy(np.append(text.bos, ids))[None].to(model.device)
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        nats += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        size += sizes[ids].sum().item()
    return nats / size / math.log(2)


@torch.no_grad()
def recall_accuracy(
    model, words: Words, num_pairs: int, seed: int = 0, rows: int = 16, text: TokenStream | None = None, gap: int = 0
) -> float:
    """Measure how often a key's value is the likeliest token, ``gap`` tokens of text behind the list of pairs."""
    rng = np.random.default_rng([seed, num_pairs, gap])
    seq_len = 1 + 2 * 3 * num_pairs + (gap + 1 if gap else 0)
    drawn = [recall(rng, seq_len, words, num_pairs, text.span(rng, gap) if text else None) for _ in range(rows)]
    tokens, labels = (torch.from_numpy(np.stack(column)).to(model.device) for column in zip(*drawn))
    likeliest = torch.cat([model(input_ids=part, use_cache=False).logits.argmax(-1) for part in tokens.split(8)])
    asked = labels[:, 1:] != IGNORE
    return (likeliest[:, :-1] == labels[:, 1:])[asked].float().mean().item()


@torch.no_grad()
def induction_score(model, tokens: np.ndarray, seed: int = 0, length: int = 64, rows: int = 4) -> float:
    """Measure the best head's mean attention to the token after a random segment's previous occurrence."""
    rng = np.random.default_rng(seed)
    segment = torch.from_numpy(rng.choice(tokens, (rows, length)).astype(np.int64)).to(model.device)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    layers = model(input_ids=segment.repeat(1, 2), use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    after = [layer[:, :, length:].diagonal(offset=1, dim1=2, dim2=3)[..., : length - 1] for layer in layers]
    return max(attention.mean((0, 2)).max().item() for attention in after)
