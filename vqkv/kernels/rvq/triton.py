"""Residual VQ encoding (Algorithm 1 of the residual VQ paper), all stages in one launch, packed in registers.

A stage's nearest code is found in two steps. Tensor cores score fp16 copies of all codes (half the squared norm minus
the dot product), and of every ``fold`` neighbouring codes only the smallest score is kept: one minimum a score; an
index kept beside it costs two instructions more. Then the codes of the best such group are compared in fp32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.packing.triton import as_string, pack_codes, store_rows
from vqkv.kernels.rvq.triton_codebooks import NO_CODE, as_operand, code_vectors, load_vectors, prepare, score_tile

ENCODE = {  # sub-vectors of a program, codes of a tile, codes that fold into one score, tiles between two barriers
    "many": {"block_m": 256, "block_c": 64, "fold": 8, "unroll": 4, "num_warps": 16, "num_stages": 3},
    "few": {"block_m": 64, "block_c": 64, "fold": 8, "unroll": 2, "num_warps": 4, "num_stages": 3},
    "long": {"block_m": 32, "block_c": 64, "fold": 8, "unroll": 1, "num_warps": 4, "num_stages": 2},
}
FEW = 256 * 132  # sub-vectors: fewer than one program of "many" for each multiprocessor of an H100
LEAST, SHORT, MEDIUM, LONGEST = 8, 32, 64, 256  # channels: "many" from, to; the most of "few", and of registers
MAX_WORDS = 32  # 32-bit words of a row's string that fit in registers; longer ones are packed by a second kernel


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """``naive.rvq_encode``, any strides, by fp16 operands and fp32 sums, so that nearly equal codes may change places;
    equal ones go to the lowest index. A row with NaN or infinity gets some codes."""
    out = torch.empty(*x.shape[:-1], len(codebooks), dtype=torch.int64, device=x.device)
    x = x.unsqueeze(-2)
    _launch(x, codebooks, out, _tile(x), bits=1, words=0)
    return out


def rvq_encode_packed(x: Tensor, codebooks: Tensor, bits: int, beam: int = 1) -> Tensor:
    """``naive.rvq_encode_packed``: x (..., groups, dim), any strides -> uint8."""
    string = x.shape[-2] * len(codebooks) * bits
    words, tile = _words(string), _tile(x)
    if words > MAX_WORDS or triton.next_power_of_2(x.shape[-2]) > tile["block_m"]:
        return pack_codes(rvq_encode(x, codebooks).flatten(-2), bits)
    out = torch.empty(*x.shape[:-2], -(-string // 8), dtype=torch.uint8, device=x.device)
    _launch(x, codebooks, out, tile, bits, words)
    return out


def serves(codebooks: Tensor, beam: int = 1) -> bool:
    """Tell whether registers hold vectors of these codebooks. Wider beams than one are for plain torch."""
    return beam == 1 and codebooks.shape[-1] <= LONGEST


def _tile(x: Tensor) -> dict[str, int]:
    """The settings for x (..., groups, dim)."""
    groups, dim = triton.next_power_of_2(x.shape[-2]), x.shape[-1]
    if dim > SHORT:
        return ENCODE["long" if dim > MEDIUM else "few"]
    small = x.shape[:-2].numel() * groups < FEW or dim < LEAST  # strings of short vectors take registers
    few = small and groups <= ENCODE["few"]["block_m"]
    return ENCODE["few" if few else "many"]


def _launch(x: Tensor, codebooks: Tensor, out: Tensor, tile: dict, bits: int, words: int) -> None:
    """Fill ``out`` for x (..., groups, dim): with packed codes if ``words``, else with plain ones."""
    groups, dim = x.shape[-2:]
    sizes, strides = _collapse(x)
    if len(sizes) > 3:
        x = x.contiguous()
        sizes, strides = _collapse(x)
    sizes, strides = [1] * (3 - len(sizes)) + sizes, [0] * (3 - len(strides)) + strides
    rows, padded = sizes[0] * sizes[1] * sizes[2], triton.next_power_of_2(groups)
    if rows * groups == 0 or out.shape[-1] == 0:
        return
    tables = prepare(codebooks, tile["block_c"], tile["fold"])
    num_quantizers, tiles, block_c, dim_padded = tables.scaled.shape
    per_program = tile["block_m"] // padded
    with torch.cuda.device_of(x):
        _encode[(triton.cdiv(rows, per_program),)](
            x, tables.scaled, tables.norms, tables.scales, tables.codebooks, out,
            rows, sizes[1], sizes[2], *strides, *x.stride()[-2:],
            groups, num_quantizers, codebooks.shape[1], tiles, bits, out.shape[-1],
            ROWS=per_program, GROUPS_PADDED=padded, DIM=dim, DIM_PADDED=dim_padded, BLOCK_C=block_c,
            FOLD=tile["fold"], UNROLL=math.gcd(tile["unroll"], tiles),
            STAGES=tile["num_stages"], PACKED=words > 0, GROUP_WORDS=_words(num_quantizers * bits), WORDS=words,
            num_warps=tile["num_warps"], num_stages=1,
        )  # fmt: skip


def _words(bits: int) -> int:
    """Number of 32-bit words of a string of so many bits in a kernel, where sizes are powers of two."""
    return triton.next_power_of_2(-(-bits // 32))


def _collapse(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of all but the last two dimensions, those that can be walked as one merged."""
    sizes, strides = [], []
    for size, stride in zip(x.shape[:-2], x.stride()[:-2]):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes, strides = [*sizes, size], [*strides, stride]
    return sizes, strides


@triton.jit
def _nearest_group(operand, scaled, norms, first_tile, tiles, BLOCK_C: tl.constexpr, DIM_PADDED: tl.constexpr,
                   FOLD: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The group of FOLD codes that has the smallest score, the first of equals: int32 [M]."""
    M: tl.constexpr = operand.shape[0]
    COLUMNS: tl.constexpr = BLOCK_C // FOLD
    best = tl.full([M, COLUMNS], float("inf"), tl.float32)
    best_tile = tl.zeros([M, COLUMNS], tl.int32)
    for turn in tl.range(0, tiles // UNROLL, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            tile = turn * UNROLL + i
            scores = score_tile(operand, scaled, norms, first_tile + tile, BLOCK_C, DIM_PADDED, FOLD)
            best_tile = tl.where(scores < best, tile, best_tile)
            best = tl.minimum(best, scores)
    group = best_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.min(tl.where(best == tl.min(best, axis=1)[:, None], group, NO_CODE), axis=1)


@triton.jit
def _nearest_of_group(residual, codebooks, k, size, group, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
                      GROUP_SIZE: tl.constexpr):  # fmt: skip
    """The nearest of a group's codes in fp32, the first of equals: int32 [M], always a code."""
    first = group * GROUP_SIZE
    member = tl.zeros_like(group)
    if GROUP_SIZE > 1:
        nearest = tl.full(group.shape, float("inf"), tl.float32)
        for t in tl.static_range(GROUP_SIZE):
            code = tl.minimum(first + t, size - 1)
            difference = residual - code_vectors(codebooks, k, code, size, DIM, DIM_PADDED)
            distance = tl.sum(difference * difference, axis=1)
            member = tl.where(distance < nearest, t, member)
            nearest = tl.minimum(nearest, distance)
    return tl.minimum(first + member, size - 1)


@triton.jit
def _encode(
    x, scaled, norms, scales, codebooks, out,
    rows, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
    groups, num_quantizers, size, tiles, bits, row_bytes,
    ROWS: tl.constexpr, GROUPS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr, FOLD: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, GROUP_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Whole rows of sub-vectors; the residual, and the packed string, stay in registers from stage to stage."""
    M: tl.constexpr = ROWS * GROUPS_PADDED
    start = tl.program_id(0) * ROWS
    row, group = start + tl.arange(0, M) // GROUPS_PADDED, tl.arange(0, M) % GROUPS_PADDED
    valid = (row < rows) & (group < groups)
    residual = load_vectors(x, row, group, rows, groups, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
                     DIM, DIM_PADDED)  # fmt: skip
    words = tl.zeros([M, GROUP_WORDS], tl.uint32)
    for k in tl.range(0, num_quantizers, num_stages=1):
        operand = as_operand(residual, tl.load(scales + k))
        near = _nearest_group(operand, scaled, norms, k * tiles, tiles, BLOCK_C, DIM_PADDED, FOLD, UNROLL, STAGES)
        code = _nearest_of_group(residual, codebooks, k, size, near, DIM, DIM_PADDED, FOLD)
        residual -= code_vectors(codebooks, k, code, size, DIM, DIM_PADDED)
        if PACKED:
            words |= as_string(code, k * bits + tl.zeros_like(code), GROUP_WORDS)
        else:
            pointers = out + (row.to(tl.int64) * groups + group) * num_quantizers + k
            tl.store(pointers, code.to(out.dtype.element_ty), mask=valid)
    if PACKED:
        words = tl.where((group < groups)[:, None], words, 0)
        row = start + tl.arange(0, ROWS)
        store_rows(words, out, group, num_quantizers * bits, row, rows, row_bytes, ROWS, WORDS)
