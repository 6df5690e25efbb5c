"""Shares of the tokens (split-KV): how many fill a GPU, and one output of all of them (Flash-Decoding)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 32  # query heads of a KV head times new tokens: sums for 64 leave the tile no registers
PROGRAMS_EACH = 4  # programs for each multiprocessor, if there are tokens enough
LEAST_TILES = 2  # tiles of a share, at least
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def shares(device: torch.device, heads: int, seq_len: int, tile: int) -> tuple[int, int]:
    """Into how many shares tokens are parted, so that programs fill the GPU, and the tokens of each."""
    tiles = -(-seq_len // tile)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wanted = max(1, processors * PROGRAMS_EACH // heads)
    per_split = max(LEAST_TILES, -(-tiles // wanted))
    return -(-tiles // per_split), per_split * tile


def empty(query: Tensor, splits: int, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """fp32 for shares of attention (splits, rows, head_dim) and for their log-sum-exps (splits, rows)."""
    out = torch.empty(splits, rows, head_dim, dtype=torch.float32, device=query.device)
    return out, out.new_empty(splits, rows)


def join(parts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of shares (splits, rows, width) and their log-sum-exps (splits, rows) one, (1, rows, width) and (1, rows)."""
    splits, rows, width = parts.shape
    if splits == 1:
        return parts, sums
    out, lse = empty(parts, 1, rows, width)
    with torch.cuda.device_of(parts):
        _combine[(rows,)](
            parts, sums, out, lse, splits, HEAD_DIM=width, BLOCK_D=triton.next_power_of_2(width),
            BLOCK_S=triton.next_power_of_2(splits),
        )  # fmt: skip
    return out, lse


@triton.jit
def _combine(parts, sums, out, lse, splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    """Join the shares of one query row: their outputs, weighted by their part in the sum of all exponentials."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    split, channel = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part = tl.load(sums + split * rows + row, split < splits, float("-inf"))
    best = tl.max(part, 0)
    weight = tl.exp2((part - best) * LOG2E)
    total = tl.sum(weight, 0)
    there = (split < splits)[:, None] & (channel < HEAD_DIM)[None, :]
    values = tl.load(parts + (split * rows + row)[:, None] * HEAD_DIM + channel[None, :], there, 0)
    tl.store(out + row * HEAD_DIM + channel, tl.sum(values * weight[:, None], 0) / total, channel < HEAD_DIM)
    tl.store(lse + row, best + tl.log2(total) * LN2)
