"""Attention to components in groups of a byte on a GPU, by queries mapped to components: nothing becomes channels."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_grouped(
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
    """Read components, fp16 (tokens, components), over their scale; 0 where a head has no byte for one."""
    component = tl.arange(0, BLOCK)
    row = tl.load(rows + kv_head * WIDTH + component, component < WIDTH, -1)
    byte = tl.load(bytes + kv_head * WIDTH + component, component < WIDTH, -1)
    there = valid[:, None] & (row >= 0)[None, :]
    begin = codes + head * seq_len * GROUPS
    code = tl.load(begin + (token[:, None] * GROUPS + byte[None, :]), there, 0)
    return tl.load(table + (row[None, :] + code.to(tl.int32)), there, 0)
