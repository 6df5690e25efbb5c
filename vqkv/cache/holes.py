"""Tokens that were taken back from whole blocks of quantized tokens.

A codec that packs blocks of tokens could forget a part of a block only by packing the rest anew, at the price of a
second quantization error. So the block stays as it is and its end becomes a hole, which is never read: ``holes`` are
spans (start, stop) of quantized tokens, ascending.
"""

import torch
from torch import Tensor

Holes = tuple[tuple[int, int], ...]


def tokens_read(holes: Holes, stop: int) -> int:
    """Tokens that are read among the first ``stop`` quantized ones."""
    return stop - sum(min(b, stop) - a for a, b in holes if a < stop)


def without_holes(holes: Holes, x: Tensor, start: int) -> Tensor:
    """x (batch, num_kv_heads, tokens, head_dim), the quantized tokens from the ``start``-th on, without holes."""
    stop = start + x.shape[2]
    holes = [(max(a, start), min(b, stop)) for a, b in holes if a < stop and b > start]
    if not holes:
        return x
    edges = [start, *(edge for hole in holes for edge in hole), stop]
    return torch.cat([x[:, :, a - start : b - start] for a, b in zip(edges[::2], edges[1::2], strict=True)], dim=2)


def truncated_holes(holes: Holes, seq_len: int, tokens_per_row: int) -> tuple[Holes, int]:
    """The holes once only ``seq_len`` tokens are read, and how many quantized tokens then stay, in whole blocks."""
    end, kept = seq_len, []
    for start, stop in holes:
        if start >= end:
            break
        kept.append((start, stop))
        end += stop - start
    if not seq_len:
        return (), 0
    stop = -(-end // tokens_per_row) * tokens_per_row
    return (*kept, *([(end, stop)] if stop > end else [])), stop
