"""Attention of a few new tokens to packed keys and values on a GPU: what each kernel is launched with.

A program takes all query heads of one KV head and a share of the tokens (split-KV), and ``merge`` joins the shares.
"""

import torch
import triton
from torch import Tensor

from vqkv.kernels.attention.naive import mapped_queries, merge
from vqkv.kernels.attention.triton_grouped import attend_grouped
from vqkv.kernels.attention.triton_halves import Format, attend
from vqkv.kernels.derived import remembered
from vqkv.kernels.view import Affine, Coded, Grouped, KernelView, Rope

MAX_ROWS = 32  # query heads of a KV head times new tokens: sums for 64 leave the tile no registers
PROGRAMS_EACH = 4  # programs for each multiprocessor, if there are tokens enough
MIN_TILES = 2  # tiles of a share, at least
LONG_HEAD = 128  # channels: of longer heads, half as many tokens a tile
ROTATED = (
    16  # tokens of ``Grouped`` that are rotated as one, as ``presets.live`` asks for and ``tl.dot`` wants at least
)
LOG2E = 1.4426950408889634


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``naive.decode_attention`` of what ``can_decode_attention`` accepts; products in fp16, sums in fp32."""
    run = _to_groups if isinstance(keys, Grouped) else _to_halves
    with torch.cuda.device_of(query):
        out, lse = run(query, keys, values, scaling * LOG2E, rope)
    return out.view(query.shape), lse.view(query.shape[:3])


def can_decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> bool:
    """Tell whether a kernel can read these: not heads that cannot be halved, partial rotary, many query rows."""
    rows = query.shape[1] // keys.shape[1] * query.shape[2]
    if rows > MAX_ROWS or not keys.shape[2] or keys.shape[3] != values.shape[3]:
        return False
    if rope is not None and 2 * len(rope.inv_freq) != keys.shape[3]:
        return False
    if isinstance(keys, Grouped) and isinstance(values, Grouped):
        has_matrix = keys.matrix is not None and values.matrix is not None
        return has_matrix and (rope is None or rope.block == ROTATED)
    return (rope is None or rope.block == 1) and _has_halves(keys) and _has_halves(values)


def _shares(device: torch.device, heads: int, seq_len: int, tile: int) -> tuple[int, int]:
    """Return into how many shares to split tokens, so that programs fill the GPU, and the tokens of each."""
    tiles = -(-seq_len // tile)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wanted = max(1, processors * PROGRAMS_EACH // heads)
    per_split = max(MIN_TILES, -(-tiles // wanted))
    return -(-tiles // per_split), per_split * tile


def _to_halves(query: Tensor, keys, values, scaling: float, rope: Rope | None) -> tuple[Tensor, Tensor]:
    batch, num_heads, new_tokens, head_dim = query.shape
    num_kv_heads, seq_len = keys.shape[1:3]
    rows = num_heads // num_kv_heads * new_tokens
    k, v = _format(keys), _format(values)
    block_m = max(8, triton.next_power_of_2(rows))
    # As many tokens as four warps' registers hold: both affine, or both product codes, without RoPE take the fewest.
    block_n = 128 if k.LIGHT and v.LIGHT and k.KIND == v.KIND and rope is None and block_m < 32 else 64
    block_n = block_n // 2 if head_dim > LONG_HEAD else block_n
    splits, per_split = _shares(query.device, batch * num_kv_heads, seq_len, block_n)
    out = torch.empty(splits, batch * num_kv_heads * rows, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, batch * num_kv_heads * rows, dtype=torch.float32, device=query.device)
    attend[(batch * num_kv_heads, splits)](
        query.contiguous(), out, lse, *_tensors(keys), *_tensors(values), *_angles(rope, seq_len, keys, block_n),
        seq_len, per_split, scaling, rows, K=k, V=v, HEAD_DIM=head_dim, ROPE=rope is not None, BLOCK_M=block_m,
        BLOCK_N=block_n, num_stages=2,
    )  # fmt: skip
    return merge(out, lse)


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


def _angles(rope: Rope | None, seq_len: int, keys: KernelView, tile: int) -> tuple[Tensor, ...]:
    """Tabulate cos and sin (tiles, rotary_dim / 2) of tiles' first positions, and of positions from there."""
    if rope is None:
        return keys.codes, keys.codes, keys.codes, keys.codes  # not read
    frequencies = rope.inv_freq.double()
    first = torch.arange(rope.start, rope.start + seq_len, tile, device=frequencies.device).double()
    inside = torch.arange(tile, device=frequencies.device).double()
    angles = [positions.unsqueeze(-1) * frequencies for positions in (first, inside)]
    return tuple(f(angle).float() for angle in angles for f in (torch.cos, torch.sin))


def _tensors(packed: KernelView) -> tuple[Tensor, ...]:
    """Return codes, low or scale, high, codebooks; something that is not read where there is none."""
    codes = packed.codes.contiguous()
    codes = codes if codes.data_ptr() % 4 == 0 else codes.clone()  # they are read as 32-bit words
    if isinstance(packed, Affine):
        return codes, packed.low.contiguous(), packed.high.contiguous(), codes
    assert isinstance(packed, Coded)
    scale = codes if packed.scale is None else packed.scale.contiguous()
    return codes, scale, codes, packed.codebooks.contiguous()


def _to_groups(query: Tensor, keys, values, scaling: float, rope: Rope | None) -> tuple[Tensor, Tensor]:
    """Attend block by block of one rotation, with queries rotated back and mapped before. Sums of values are mapped to
    channels at the end."""
    batch, kv_heads, seq_len, head_dim = keys.shape
    rows = query.float().reshape(batch, kv_heads, -1, head_dim) * scaling
    mapped, count, width = mapped_queries(rows, keys, rope).contiguous(), rows.shape[2], values.scale.shape[1]
    shift = 0 if rope is None else rope.start % ROTATED
    splits, per_split = _shares(query.device, batch * kv_heads, seq_len + shift, ROTATED)
    out = torch.empty(splits, batch * kv_heads * count, width, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, batch * kv_heads * count, dtype=torch.float32, device=query.device)
    packed = [(x.codes.contiguous(), *_rows(x.table, x.layout, x.scale.shape[1])) for x in (keys, values)]
    attend_grouped[(batch * kv_heads, splits)](
        mapped, out, lse, *packed[0], *packed[1], seq_len, per_split, shift, mapped.shape[2], kv_heads, count,
        K_GROUPS=keys.codes.shape[3], K_WIDTH=keys.scale.shape[1], V_GROUPS=values.codes.shape[3], V_WIDTH=width,
        BLOCK_K=max(16, triton.next_power_of_2(keys.scale.shape[1])), BLOCK_V=max(16, triton.next_power_of_2(width)),
        BLOCK=ROTATED, BLOCK_M=max(8, triton.next_power_of_2(count)), num_stages=2,
    )  # fmt: skip
    out, lse = merge(out, lse)
    matrix = values.scaled_matrix
    return out.view(batch, kv_heads, count, width) @ matrix[:, :-1] + matrix[:, -1:], lse


@remembered
def _rows(table: Tensor, layout: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table in fp16, and for each component (num_kv_heads, components) the row of the table and the byte of
    the token that it is read from; -1 where a head has none."""
    sizes, starts, firsts = layout.cpu()
    rows = torch.full((2, len(sizes), width), -1, dtype=torch.int32)
    for head, of_head in enumerate(zip(sizes.tolist(), starts.tolist(), firsts.tolist(), strict=True)):
        for byte, (size, start, first) in enumerate(zip(*of_head, strict=True)):
            rows[0, head, first : first + size] = start + 256 * torch.arange(size, dtype=torch.int32)
            rows[1, head, first : first + size] = byte
    rows = rows.to(table.device)
    return table.half(), rows[0], rows[1]
