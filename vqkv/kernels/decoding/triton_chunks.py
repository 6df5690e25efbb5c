"""Rows of channels cut for decoding: in two halves of chunks, so that RoPE's partners meet in one lane.

A chunk is neighbouring channels of one group: a power of two of them, so that any group size, head_dim and rotary_dim
is made of whole ones.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vqkv.kernels.tiles import DECODE
from vqkv.kernels.view import Affine, Coded, KernelView


@dataclass(frozen=True)
class Halves:
    """A row cut in two. It is ``runs`` runs (of a strided group, or one for all channels), of ``chunks`` chunks
    of ``vector`` channels each; chunk c and chunk c + ``turned`` are partners, for c < ``turned``. Chunks that RoPE
    leaves alone are halved by their order."""

    runs: int
    chunks: int
    vector: int
    turned: int

    @property
    def pairs(self) -> int:
        """Chunks of the first half, per run."""
        return self.turned + (self.chunks - 2 * self.turned + 1) // 2


def halve(packed: KernelView, rotary_dim: int, most: int) -> Halves:
    """Chunks of at most ``most`` channels, a power of two that divides a group and a turned half."""
    head_dim, half = packed.shape[-1], rotary_dim // 2
    if isinstance(packed, Coded) and packed.strided and half % packed.groups == 0:
        runs, run = packed.groups, head_dim // packed.groups
        vector = _power(run // 2 if run % 2 == 0 else 1, half // runs, most)
    else:
        runs, run = 1, head_dim
        group = packed.group_size if isinstance(packed, Affine) else packed.codebooks.shape[-1]
        by_channel = isinstance(packed, Coded) and packed.strided
        vector = 1 if by_channel else _power(group, half, most)
    return Halves(runs, run // vector, vector, half // runs // vector)


def _power(*numbers: int) -> int:
    """The largest power of two that divides all of them; zeros do not count."""
    union = 0
    for number in numbers:
        union |= number
    return union & -union


def tile_of(shape: torch.Size, halves: Halves, turned: bool, values: int) -> tuple[tuple[int], tuple[int, ...]]:
    """The grid for an output of ``shape``, about ``values`` values a program, and the kernels' last arguments: HEADS
    and TOKENS of a program, RUNS, CHUNKS, V, TURNED, PAIRS, and RUNS and PAIRS padded."""
    batch, heads, tokens, _ = shape
    padded = triton.next_power_of_2(halves.runs), triton.next_power_of_2(halves.pairs)
    width = 2 * padded[0] * padded[1] * halves.vector
    rows = max(1, values * min(halves.vector, 4) // 4 // width)  # small chunks take more registers a value
    together = min(rows, DECODE["heads"], heads & -heads) if turned else 1
    rows = max(1, min(rows // together, triton.next_power_of_2(tokens)))
    grid = (batch * (heads // together) * triton.cdiv(tokens, rows),)
    return grid, (together, rows, halves.runs, halves.chunks, halves.vector, halves.turned, halves.pairs, *padded)


@triton.jit
def rows_of(heads, tokens, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Batch entry (scalar), heads and tokens of this program's rows, 64 bits; a row without a token repeats the last
    one, and ``there`` says so."""
    blocks = tl.cdiv(tokens, TOKENS)
    rest = tl.program_id(0) // blocks
    row = tl.arange(0, HEADS * TOKENS)
    batch = (rest // (heads // HEADS)).to(tl.int64)
    head = (rest % (heads // HEADS)).to(tl.int64) * HEADS + row % HEADS
    token = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS + row // HEADS
    return batch, head, tl.minimum(token, tokens - 1), token < tokens


@triton.jit
def chunks_of(pair, CHUNKS: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr):
    """The chunks of a pair; beyond the last chunk where there is none."""
    if TURNED == 0 or TURNED == PAIRS:
        first, second = pair, pair + PAIRS
    else:
        first = tl.where(pair < TURNED, pair, pair + TURNED)
        second = first + tl.where(pair < TURNED, TURNED, PAIRS - TURNED)
    return tl.where(pair < PAIRS, first, CHUNKS), tl.where(pair < PAIRS, second, CHUNKS)
