"""Attention to components in groups of a byte, with queries mapped to components and nothing decoded to channels.

A program takes all query heads of one KV head and a share of the tokens, one block of one rotation at a time, for which
its queries were rotated back and mapped before. Sums over values are mapped to channels at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.attention.mapping import mapped_queries
from vqkv.kernels.attention.triton_shares import LN2, LOG2E, empty, join, shares
from vqkv.kernels.derived import remembered
from vqkv.kernels.view import Mapped, Rope

BLOCK = 16  # tokens that are rotated as one, as ``presets.live`` asks for and ``tl.dot`` wants at least


def decode_attention(
    query: Tensor, keys: Mapped, values: Mapped, scaling: float, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """``naive.decode_attention`` for what ``triton.serves`` accepts; products in fp16, sums in fp32."""
    batch, kv_heads, seq_len, head_dim = keys.shape
    rows = query.float().reshape(batch, kv_heads, -1, head_dim) * (scaling * LOG2E.value)
    mapped, count, width = mapped_queries(rows, keys, rope), rows.shape[2], values.inner.shape[3]
    shift = 0 if rope is None else rope.start % BLOCK
    splits, per_split = shares(query.device, batch * kv_heads, seq_len + shift, BLOCK)
    out, lse = empty(query, splits, batch * kv_heads * count, width)
    packed = [(x.codes.contiguous(), *_rows(x.inner.table, x.inner.places, x.inner.shape[3])) for x in (keys, values)]
    with torch.cuda.device_of(query):
        _attend_grouped[(batch * kv_heads, splits)](
            mapped.contiguous(), out, lse, *packed[0], *packed[1], seq_len, per_split, shift, mapped.shape[2], kv_heads,
            count, K_GROUPS=keys.codes.shape[3], K_WIDTH=keys.inner.shape[3], V_GROUPS=values.codes.shape[3],
            V_WIDTH=width, BLOCK_K=max(16, triton.next_power_of_2(keys.inner.shape[3])),
            BLOCK_V=max(16, triton.next_power_of_2(width)), BLOCK=BLOCK, BLOCK_M=max(8, triton.next_power_of_2(count)),
            num_stages=2,
        )  # fmt: skip
    out, lse = join(out, lse)
    out = out.view(batch, kv_heads, count, width) @ values.scaled[:, :-1] + values.scaled[:, -1:]
    return out.view(query.shape), lse.view(query.shape[:3])


@remembered
def _rows(table: Tensor, places: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The table in fp16, and of each component (num_kv_heads, components) the row of the table and the byte of the
    token that it is read from; -1 where a head has none."""
    sizes, starts, firsts = places.cpu()
    rows = torch.full((2, len(sizes), width), -1, dtype=torch.int32)
    for head, of_head in enumerate(zip(sizes.tolist(), starts.tolist(), firsts.tolist(), strict=True)):
        for byte, (size, start, first) in enumerate(zip(*of_head, strict=True)):
            rows[0, head, first : first + size] = start + 256 * torch.arange(size, dtype=torch.int32)
            rows[1, head, first : first + size] = byte
    rows = rows.to(table.device)
    return table.half(), rows[0], rows[1]


@triton.jit
def _attend_grouped(
    mapped, out, lse, k_codes, k_table, k_rows, k_bytes, v_codes, v_table, v_rows, v_bytes,
    seq_len, per_split, shift, blocks, kv_heads, rows,
    K_GROUPS: tl.constexpr, K_WIDTH: tl.constexpr, V_GROUPS: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head, m = head % kv_heads, tl.arange(0, BLOCK_M)
    k, v, inside = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    best = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a share of no tokens must not make NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    for start in range(split * per_split, min((split + 1) * per_split, seq_len + shift), BLOCK):
        token = start - shift + inside
        valid = (token >= 0) & (token < seq_len)
        begin = mapped + ((head * blocks + tl.minimum(start // BLOCK, blocks - 1)) * rows + m) * (K_WIDTH + 1)
        queries = tl.load(begin[None, :] + k[:, None], (m < rows)[None, :] & (k < K_WIDTH)[:, None], 0)
        keys = _components(
            k_codes, k_table, k_rows, k_bytes, head, kv_head, token, valid, seq_len, K_GROUPS, K_WIDTH, BLOCK_K
        )
        scores = tl.dot(keys, queries.to(tl.float16)) + tl.load(begin + K_WIDTH, m < rows, 0)[None, :]
        scores = tl.where(valid[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[None, :])
        best, total = higher, total * shrink + tl.sum(weights, 0)
        values = _components(
            v_codes, v_table, v_rows, v_bytes, head, kv_head, token, valid, seq_len, V_GROUPS, V_WIDTH, BLOCK_V
        )
        acc = acc * shrink[None, :] + tl.dot(tl.trans(values), weights.to(tl.float16))
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
