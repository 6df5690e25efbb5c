"""Attention of a few new tokens to packed keys and values, which are decoded in registers and nowhere else.

A program takes all query heads of one KV head and a share of the tokens (split-KV); ``join`` joins the shares. A
head is decoded as two half tiles: so a channel and its RoPE partner meet in one thread, and so the ends or the scale of
a token multiply a score rather than every channel. Keys at position n = n0 + j, n0 the first of a tile, are turned by j
only, with a table that stays in registers; the query is rotated back by n0, once a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.attention import triton_grouped
from vqkv.kernels.attention.triton_halves import Format, channels_of, columns, half_tile
from vqkv.kernels.attention.triton_shares import LN2, LOG2E, MOST_ROWS, empty, join, shares
from vqkv.kernels.view import Affine, Coded, KernelView, Mapped, Rope

LONG_HEAD = 128  # channels: of longer heads, half as many tokens a tile


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """``naive.decode_attention`` for what ``serves`` accepts; products in fp16, sums in fp32."""
    if isinstance(keys, Mapped) and isinstance(values, Mapped):
        return triton_grouped.decode_attention(query, keys, values, scaling, rope)
    batch, num_heads, new_tokens, head_dim = query.shape
    num_kv_heads, seq_len = keys.shape[1:3]
    rows = num_heads // num_kv_heads * new_tokens
    k, v = _format(keys), _format(values)
    block_m = max(8, triton.next_power_of_2(rows))
    # As many tokens as four warps' registers hold: both affine, or both product codes, without RoPE take the fewest.
    block_n = 128 if k.LIGHT and v.LIGHT and k.KIND == v.KIND and rope is None and block_m < 32 else 64
    block_n = block_n // 2 if head_dim > LONG_HEAD else block_n
    splits, per_split = shares(query.device, batch * num_kv_heads, seq_len, block_n)
    out, lse = empty(query, splits, batch * num_kv_heads * rows, head_dim)
    turns = _turns(rope, seq_len, keys, block_n)
    with torch.cuda.device_of(query):
        _attend[(batch * num_kv_heads, splits)](
            query.contiguous(), out, lse, *_tensors(keys), *_tensors(values), *turns, seq_len, per_split,
            scaling * LOG2E.value, rows, K=k, V=v, HEAD_DIM=head_dim, ROPE=rope is not None, BLOCK_M=block_m,
            BLOCK_N=block_n, num_stages=2,
        )  # fmt: skip
    out, lse = join(out, lse)
    return out.view(query.shape), lse.view(query.shape[:3])


def serves(query: Tensor, keys: KernelView, values: KernelView, rope: Rope | None = None) -> bool:
    """Tell whether the kernel can read these: not heads that cannot be halved, partial rotary, many query rows."""
    rows = query.shape[1] // keys.shape[1] * query.shape[2]
    if rows > MOST_ROWS or not keys.shape[2] or keys.shape[3] != values.shape[3]:
        return False
    if rope is not None and 2 * len(rope.inv_freq) != keys.shape[3]:
        return False
    if isinstance(keys, Mapped) and isinstance(values, Mapped):
        return rope is None or rope.block == triton_grouped.BLOCK
    return (rope is None or rope.block == 1) and _has_halves(keys) and _has_halves(values)


def _has_halves(packed: KernelView) -> bool:
    half = packed.shape[3] // 2
    if isinstance(packed, Affine):
        each = 32 // packed.bits  # codes of a word
        folds = packed.group_size % half == 0
        return packed.bits in (2, 4, 8) and half % each == 0 and (folds or packed.group_size % each == 0)
    if not isinstance(packed, Coded) or (packed.scale is not None and packed.scale.shape[3] > 1):
        return False
    strided, dim = packed.strided or packed.groups == 1, packed.codebooks.shape[3]
    inner = dim // 2 if strided else dim  # channels of a group that a half has
    return (dim if strided else packed.groups) % 2 == 0 and inner & (inner - 1) == 0


def _format(packed: KernelView) -> Format:
    if isinstance(packed, Affine):
        return Format("affine", True, packed.bits, packed.codes.shape[3], packed.low.shape[3])
    assert isinstance(packed, Coded)
    tables, quantizers, size, dim = packed.codebooks.shape
    each = 0 if packed.scale is None else packed.tokens_per_scale
    strided = packed.strided or packed.groups == 1  # of one group, half the channels are half the code
    light = quantizers == 1 and dim > 2
    shape = packed.groups, dim, quantizers, size, tables, each, strided
    return Format("coded", light, packed.bits, packed.codes.shape[3], *shape)


def _turns(rope: Rope | None, seq_len: int, keys: KernelView, tile: int) -> tuple[Tensor, ...]:
    """cos and sin (tiles, rotary_dim / 2) of every tile's first position, and of a tile's positions from there."""
    if rope is None:
        return keys.codes, keys.codes, keys.codes, keys.codes  # not read
    frequencies = rope.inv_freq.double()
    first = torch.arange(rope.start, rope.start + seq_len, tile, device=frequencies.device).double()
    inside = torch.arange(tile, device=frequencies.device).double()
    angles = [positions.unsqueeze(-1) * frequencies for positions in (first, inside)]
    return tuple(f(angle).float() for angle in angles for f in (torch.cos, torch.sin))


def _tensors(packed: KernelView) -> tuple[Tensor, ...]:
    """codes, low or scale, high, codebooks; something that is not read where there is none."""
    codes = packed.codes.contiguous()
    codes = codes if codes.data_ptr() % 4 == 0 else codes.clone()  # they are read as 32-bit words
    if isinstance(packed, Affine):
        return codes, packed.low.contiguous(), packed.high.contiguous(), codes
    assert isinstance(packed, Coded)
    scale = codes if packed.scale is None else packed.scale.contiguous()
    return codes, scale, codes, packed.codebooks.contiguous()


@triton.jit
def _attend(
    query, out, lse, k_codes, k_a, k_b, k_table, v_codes, v_a, v_b, v_table,
    first_cos, first_sin, inside_cos, inside_sin, seq_len, per_split, scaling, rows,
    K: tl.constexpr, V: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = columns(HEAD_DIM // 2)
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k0, there = channels_of(0, WIDTH, HEAD_DIM, K)
    k1, _ = channels_of(1, WIDTH, HEAD_DIM, K)
    asked = (m < rows)[None, :] & there[:, None]
    begin = query + (head * rows + m)[None, :] * HEAD_DIM
    q0 = tl.load(begin + k0[:, None], asked, 0).to(tl.float16).to(tl.float32)  # rounded in the sums as in products
    q1 = tl.load(begin + k1[:, None], asked, 0).to(tl.float16).to(tl.float32)
    sum0, sum1 = tl.sum(q0, 0), tl.sum(q1, 0)
    inside = tl.arange(0, BLOCK_N)
    if ROPE:
        local = inside[:, None] * (HEAD_DIM // 2) + k0[None, :]
        cos = tl.load(inside_cos + local, there[None, :], 0)
        sin = tl.load(inside_sin + local, there[None, :], 0)
    best = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a share of no tokens must not make NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((WIDTH, BLOCK_M), tl.float32)
    acc1 = tl.zeros((WIDTH, BLOCK_M), tl.float32)
    add0 = tl.zeros((BLOCK_M,), tl.float32)
    add1 = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(split * per_split, min((split + 1) * per_split, seq_len), BLOCK_N):
        token = start + inside
        valid = token < seq_len
        x0, a0, b0 = half_tile(k_codes, k_a, k_b, k_table, head, token, seq_len, 0, WIDTH, HEAD_DIM, ROPE, K)
        x1, a1, b1 = half_tile(k_codes, k_a, k_b, k_table, head, token, seq_len, 1, WIDTH, HEAD_DIM, ROPE, K)
        if ROPE:
            first = (start // BLOCK_N) * (HEAD_DIM // 2) + k0
            c = tl.load(first_cos + first, there, 0)[:, None]
            s = tl.load(first_sin + first, there, 0)[:, None]
            p0, p1 = (q0 * c + q1 * s).to(tl.float16), (q1 * c - q0 * s).to(tl.float16)
            y0 = (x0 * cos - x1 * sin).to(tl.float16)
            y1 = (x1 * cos + x0 * sin).to(tl.float16)
        else:
            p0, p1, y0, y1 = q0.to(tl.float16), q1.to(tl.float16), x0, x1
        scores = tl.dot(y0, p0) * a0[:, None] + tl.dot(y1, p1) * a1[:, None]
        scores += sum0[None, :] * b0[:, None] + sum1[None, :] * b1[:, None]
        scores = tl.where(valid[:, None], scores * scaling, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[None, :])
        best, total = higher, total * shrink + tl.sum(weights, 0)
        x0, a0, b0 = half_tile(v_codes, v_a, v_b, v_table, head, token, seq_len, 0, WIDTH, HEAD_DIM, False, V)
        x1, a1, b1 = half_tile(v_codes, v_a, v_b, v_table, head, token, seq_len, 1, WIDTH, HEAD_DIM, False, V)
        acc0, add0 = _gather(acc0, add0, shrink, weights, x0, a0, b0)
        acc1, add1 = _gather(acc1, add1, shrink, weights, x1, a1, b1)
    v0, there = channels_of(0, WIDTH, HEAD_DIM, V)
    v1, _ = channels_of(1, WIDTH, HEAD_DIM, V)
    row = (split * tl.num_programs(0) + head) * rows + m
    stored = (m < rows)[None, :] & there[:, None]
    tl.store(out + row[None, :] * HEAD_DIM + v0[:, None], (acc0 + add0[None, :]) / total[None, :], stored)
    tl.store(out + row[None, :] * HEAD_DIM + v1[:, None], (acc1 + add1[None, :]) / total[None, :], stored)
    tl.store(lse + row, (best + tl.log2(total)) * LN2, m < rows)


@triton.jit
def _gather(acc, add, shrink, weights, tile, factor, offset):
    """One more tile of weighted values, factors over their largest: fp16 products shall not underflow."""
    largest = tl.max(tl.abs(factor), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    product = tl.dot(tl.trans(tile), (weights * (factor / largest)[:, None]).to(tl.float16))
    acc = acc * shrink[None, :] + product * largest
    return acc, add * shrink + tl.sum(weights * offset[:, None], 0)
