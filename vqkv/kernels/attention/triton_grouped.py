"""Attention to components in groups of a byte, with queries mapped to components and nothing decoded to channels.

A program takes all query heads of one KV head and a share of the tokens, ``BLOCKS`` blocks of one rotation at a time:
its queries are rotated back once for each block, all blocks' queries meet all tokens, and those of other blocks are
left out. Sums over values are mapped to channels at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.attention.triton_shares import LN2, LOG2E, MOST_ROWS, empty, join, shares
from vqkv.kernels.derived import remembered
from vqkv.kernels.view import Mapped, Rope

BLOCK = 16  # tokens that are rotated as one, as ``presets.live`` asks for and ``tl.dot`` wants at least
BLOCKS = 2  # read at a time: with 4 of them registers do not last for 128 channels


def serves(query: Tensor, keys: Mapped, values: Mapped, rope: Rope | None) -> bool:
    """Tell whether the kernel can read these: not heads of odd halves, other blocks, many query rows, no tokens."""
    rows = query.shape[1] // keys.shape[1] * query.shape[2]
    half = keys.shape[3] // 2
    whole = rope is None or (rope.block == BLOCK and len(rope.inv_freq) == half)
    fits = rows <= MOST_ROWS and keys.shape[2] and half >= BLOCK and half & (half - 1) == 0
    return bool(whole and fits and keys.shape[3] == values.shape[3])


def decode_attention(
    query: Tensor, keys: Mapped, values: Mapped, scaling: float, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """``naive.decode_attention`` for what ``serves`` accepts; products in fp16, sums in fp32."""
    batch, kv_heads, seq_len, head_dim = keys.shape
    rows, width = query.shape[1] // kv_heads * query.shape[2], values.inner.shape[3]
    shift = 0 if rope is None else rope.start % BLOCK
    cos, sin = _angles(rope, seq_len, head_dim, query.device)
    splits, per_split = shares(query.device, batch * kv_heads, seq_len + shift, BLOCKS * BLOCK)
    out, lse = empty(query, splits, batch * kv_heads * rows, width)
    wide = [max(BLOCK, triton.next_power_of_2(x.inner.shape[3])) for x in (keys, values)]
    packed = [(x.codes.contiguous(), *_rows(x.inner.table, x.inner.places, x.inner.shape[3])) for x in (keys, values)]
    with torch.cuda.device_of(query):
        _attend_grouped[(batch * kv_heads, splits)](
            query.contiguous(), out, lse, *packed[0], keys.scaled, *packed[1],
            cos, sin, seq_len, per_split, shift, len(cos) - 1, kv_heads, scaling * LOG2E.value, rows,
            K_GROUPS=keys.codes.shape[3], K_WIDTH=keys.inner.shape[3], V_GROUPS=values.codes.shape[3], V_WIDTH=width,
            BLOCK_K=wide[0], BLOCK_V=wide[1], HEAD_DIM=head_dim, BLOCK=BLOCK,
            BLOCKS=BLOCKS, BLOCK_M=max(8, triton.next_power_of_2(rows)), num_stages=2,
        )  # fmt: skip
    out, lse = join(out, lse)
    out = out.view(batch, kv_heads, rows, width) @ values.scaled[:, :-1] + values.scaled[:, -1:]
    return out.view(query.shape), lse.view(query.shape[:3])


def _angles(rope: Rope | None, seq_len: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (blocks, head_dim / 2); of no rotation, those of one block, which stand for all."""
    if rope is None:
        return torch.ones(1, head_dim // 2, device=device), torch.zeros(1, head_dim // 2, device=device)
    return tuple(table[:, : head_dim // 2].contiguous() for table in rope.by_block(seq_len))


@remembered
def _rows(table: Tensor, places: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codebooks in fp16; of each head's component its row of these and its byte, -1 where it has none."""
    sizes, starts, firsts = places.cpu()
    rows = torch.full((2, len(sizes), width), -1, dtype=torch.int32)
    for head, of_head in enumerate(zip(sizes.tolist(), starts.tolist(), firsts.tolist(), strict=True)):
        for byte, (size, start, first) in enumerate(zip(*of_head, strict=True)):
            rows[0, head, first : first + size] = start + 256 * torch.arange(size, dtype=torch.int32)
            rows[1, head, first : first + size] = byte
    return table.half(), *rows.to(table.device)


@triton.jit
def _attend_grouped(
    query, out, lse, k_codes, k_table, k_rows, k_bytes, matrix, v_codes, v_table, v_rows, v_bytes, cos, sin,
    seq_len, per_split, shift, last, kv_heads, scaling, rows,
    K_GROUPS: tl.constexpr, K_WIDTH: tl.constexpr, V_GROUPS: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    TILE: tl.constexpr = BLOCK * BLOCKS
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head = head % kv_heads
    each = tl.arange(0, BLOCKS * BLOCK_M)  # queries of every block
    turn, m = each // BLOCK_M, each % BLOCK_M
    channel, k, inside = tl.arange(0, HALF), tl.arange(0, BLOCK_K), tl.arange(0, TILE)
    begin = query + (head * rows + m)[None, :] * HEAD_DIM + channel[:, None]
    q0 = tl.load(begin, (m < rows)[None, :], 0).to(tl.float32)
    q1 = tl.load(begin + HALF, (m < rows)[None, :], 0).to(tl.float32)
    matrix += kv_head * (K_WIDTH + 1) * HEAD_DIM
    begin = matrix + k[:, None] * HEAD_DIM + channel[None, :]
    m0 = tl.load(begin, (k < K_WIDTH)[:, None], 0).to(tl.float16)
    m1 = tl.load(begin + HALF, (k < K_WIDTH)[:, None], 0).to(tl.float16)
    offset = matrix + K_WIDTH * HEAD_DIM + channel
    o0, o1 = tl.load(offset), tl.load(offset + HALF)
    own = (inside // BLOCK)[:, None] == turn[None, :]
    best = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    for start in range(split * per_split, min((split + 1) * per_split, seq_len + shift), TILE):
        token = start - shift + inside
        valid = (token >= 0) & (token < seq_len)
        angle = tl.minimum(start // BLOCK + turn, last)[None, :] * HALF + channel[:, None]
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        p0, p1 = q0 * c + q1 * s, q1 * c - q0 * s
        mapped = tl.dot(m0, p0.to(tl.float16)) + tl.dot(m1, p1.to(tl.float16))
        keys = _components(
            k_codes, k_table, k_rows, k_bytes, head, kv_head, token, valid, seq_len, K_GROUPS, K_WIDTH, BLOCK_K
        )
        scores = tl.dot(keys, mapped.to(tl.float16))
        scores += (tl.sum(p0 * o0[:, None], 0) + tl.sum(p1 * o1[:, None], 0))[None, :]
        scores = tl.sum(tl.reshape(tl.where(own, scores, 0.0), (TILE, BLOCKS, BLOCK_M)), 1)
        scores = tl.where(valid[:, None], scores * scaling, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[None, :])
        best, total = higher, total * shrink + tl.sum(weights, 0)
        values = _components(
            v_codes, v_table, v_rows, v_bytes, head, kv_head, token, valid, seq_len, V_GROUPS, V_WIDTH, BLOCK_V
        )
        acc = acc * shrink[None, :] + tl.dot(tl.trans(values), weights.to(tl.float16))
    v, m = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_M)
    row = (split * tl.num_programs(0) + head) * rows + m
    stored = (m < rows)[None, :] & (v < V_WIDTH)[:, None]
    tl.store(out + row[None, :] * V_WIDTH + v[:, None], acc / total[None, :], stored)
    tl.store(lse + row, (best + tl.log2(total)) * LN2, m < rows)


@triton.jit
def _components(
    codes, table, rows, bytes, head, kv_head, token, valid, seq_len,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """fp16 (tokens, components), over their scale; 0 where a head has no byte for one."""
    component = tl.arange(0, BLOCK)
    row = tl.load(rows + kv_head * WIDTH + component, component < WIDTH, -1)
    byte = tl.load(bytes + kv_head * WIDTH + component, component < WIDTH, -1)
    there = valid[:, None] & (row >= 0)[None, :]
    begin = codes + head * seq_len * GROUPS
    code = tl.load(begin + (token[:, None] * GROUPS + byte[None, :]), there, 0)
    return tl.load(table + (row[None, :] + code.to(tl.int32)), there, 0)
