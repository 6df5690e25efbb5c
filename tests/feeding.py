"""Ways to fill a cache: through a model, or with keys and values that are given."""

import torch

TOKENS = torch.randint(1, 4096, (6, 80), generator=torch.Generator().manual_seed(0))


def run(model, cache, tokens=TOKENS[:2, :48], pieces=(20, 1, 1, 26)):
    """The logits of a model that reads tokens in pieces."""
    with torch.inference_mode():
        logits = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split(list(pieces), 1)]
    return torch.cat(logits, dim=1)


def feed(cache, keys, values, pieces):
    """Let every layer of a cache read and write given keys (as stored) and values, piece by piece; what it returned."""
    read, start = [], 0
    for length in pieces:
        piece = slice(start, start + length)
        read.append([cache.update(k[:, :, piece], v[:, :, piece], i) for i, (k, v) in enumerate(zip(keys, values))])
        start += length
    return read
