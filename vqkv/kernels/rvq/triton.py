"""Residual VQ encoding (Algorithm 1 of the residual VQ paper), all stages in one launch.

A stage's nearest code is found in two steps. Tensor cores score fp16 copies of all codes (half the squared norm minus
the dot product), and of every ``FOLD`` neighbouring codes only the smallest score is kept: one minimum a score; an
index kept with it costs two instructions more. Then the codes of the best such group are compared in fp32.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.derived import remembered

BLOCK_C, FOLD = tl.constexpr(64), tl.constexpr(8)  # codes of a tile, and codes that fold into one score
COLUMNS = tl.constexpr(BLOCK_C.value // FOLD.value)
MANY = 256 * 132  # vectors from which on each multiprocessor of an H100 has a program of the largest size
LONGEST = 256  # channels that registers hold
EXPONENT = 4  # of a stage's largest code in fp16: residuals 4,096 times as large fit, and codes of 2^-18
HALF_MAX = tl.constexpr(65504.0)
NO_CODE = tl.constexpr(1 << 30)  # beyond all of them


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Compute ``naive.rvq_encode`` by fp16 operands and fp32 sums, so that nearly equal codes may change places;
    equal ones go to the lowest index. A row with NaN or infinity gets some codes."""
    num_quantizers, size, dim = codebooks.shape
    codes = torch.empty(*x.shape[:-1], num_quantizers, dtype=torch.int64, device=x.device)
    if codes.numel():
        rows, tables = x.reshape(-1, dim).contiguous(), prepare(codebooks)
        tiles, dim_padded = tables.scaled.shape[1], tables.scaled.shape[3]
        tile = _tile(len(rows), dim)
        with torch.cuda.device_of(x):
            _encode[(triton.cdiv(len(rows), tile["M"]),)](
                rows, tables.scaled, tables.norms, tables.scales, tables.codebooks, codes, len(rows), num_quantizers,
                size, tiles, DIM=dim, DIM_PADDED=dim_padded, **tile | {"UNROLL": math.gcd(tile["UNROLL"], tiles)},
                num_stages=1,
            )  # fmt: skip
    return codes


def can_rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> bool:
    """Tell whether registers hold vectors of these codebooks. Wider beams than one are for plain torch."""
    return beam == 1 and codebooks.shape[-1] <= LONGEST


def _tile(rows: int, dim: int) -> dict[str, int]:
    """Choose vectors of a program, tiles of codes between two barriers, and tiles that are loaded ahead."""
    if dim > 64:
        return {"M": 32, "UNROLL": 1, "STAGES": 2, "num_warps": 4}
    if 8 <= dim <= 32 and rows >= MANY:
        return {"M": 256, "UNROLL": 4, "STAGES": 3, "num_warps": 16}
    return {"M": 64, "UNROLL": 2, "STAGES": 3, "num_warps": 4}


@dataclass(frozen=True)
class ScoringTables:
    """Codebooks rearranged for scoring: code (tile * COLUMNS + column) * FOLD + i lies in its tile at
    i * COLUMNS + column, so that neighbouring codes fold into one column."""

    codebooks: Tensor  # (K, C, dim), contiguous
    scaled: Tensor  # fp16 (K, tiles, BLOCK_C, dim padded): codes times their stage's scale
    norms: Tensor  # fp32 (K, tiles, BLOCK_C): half the squared norms of ``scaled``; infinite where there is no code
    scales: Tensor  # fp32 (K,): powers of two


@remembered
def prepare(codebooks: Tensor) -> ScoringTables:
    """Rearrange codebooks (num_quantizers, codebook_size, dim)."""
    num_quantizers, size, dim = codebooks.shape
    block_c, tiles = BLOCK_C.value, triton.cdiv(size, BLOCK_C.value)
    dim_padded, missing = max(16, triton.next_power_of_2(dim)), tiles * block_c - size
    exponents = torch.frexp(codebooks.float().abs().amax(dim=(1, 2))).exponent
    scales = torch.ldexp(torch.ones(num_quantizers, device=codebooks.device), (EXPONENT - exponents).clamp(-60, 60))
    scaled = (codebooks.float() * scales[:, None, None]).clamp(-65504, 65504).half()
    norms = scaled.float().square().sum(dim=-1) / 2  # of the rounded codes: their errors then mostly cancel

    def rearrange(codes: Tensor) -> Tensor:
        parts = codes.reshape(num_quantizers, tiles, COLUMNS.value, FOLD.value, codes.shape[-1])
        return parts.transpose(2, 3).reshape(num_quantizers, tiles, block_c, codes.shape[-1]).contiguous()

    return ScoringTables(
        codebooks=codebooks.contiguous(),
        scaled=rearrange(F.pad(scaled, (0, dim_padded - dim, 0, missing))),
        norms=rearrange(F.pad(norms, (0, missing), value=torch.inf).unsqueeze(-1)).squeeze(-1),
        scales=scales,
    )


@triton.jit
def _encode(
    x, scaled, norms, scales, codebooks, out, rows, num_quantizers, size, tiles, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, M: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Encode M rows of x (rows, DIM); the residual stays in registers from stage to stage."""
    row, d = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, DIM_PADDED)
    mask = (row < rows)[:, None] & (d < DIM)[None, :]
    residual = tl.load(x + row[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    for k in tl.range(0, num_quantizers, num_stages=1):
        # fp16 for the tensor cores; numbers that are none become 0, so that every comparison has an answer
        operand = tl.where(residual == residual, residual, 0.0) * tl.load(scales + k)
        operand = tl.minimum(tl.maximum(operand, -HALF_MAX), HALF_MAX).to(tl.float16)
        group = _nearest_group(operand, scaled, norms, k * tiles, tiles, DIM_PADDED, UNROLL, STAGES)
        code = _nearest_of_group(residual, codebooks, k, size, group, DIM, DIM_PADDED)
        residual -= _vectors(codebooks, k, code, size, DIM, DIM_PADDED)
        tl.store(out + row * num_quantizers + k, code.to(tl.int64), mask=row < rows)


@triton.jit
def _nearest_group(
    operand, scaled, norms, first_tile, tiles, DIM_PADDED: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr
):
    """Find the group of FOLD codes that has the smallest score, the first of equals: int32 [M]."""
    M: tl.constexpr = operand.shape[0]
    c = tl.arange(0, BLOCK_C)
    best = tl.full([M, COLUMNS], float("inf"), tl.float32)
    best_tile = tl.zeros([M, COLUMNS], tl.int32)
    for step in tl.range(0, tiles // UNROLL, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            tile = step * UNROLL + i
            row = (first_tile + tile) * BLOCK_C + c
            codes = tl.load(scaled + row[:, None] * DIM_PADDED + tl.arange(0, DIM_PADDED)[None, :])
            scores = tl.load(norms + row)[None, :] - tl.dot(operand, tl.trans(codes))
            scores = tl.min(tl.reshape(scores, [M, FOLD, COLUMNS]), axis=1)
            best_tile = tl.where(scores < best, tile, best_tile)
            best = tl.minimum(best, scores)
    group = best_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.min(tl.where(best == tl.min(best, axis=1)[:, None], group, NO_CODE), axis=1)


@triton.jit
def _nearest_of_group(residual, codebooks, k, size, group, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Find the nearest of a group's codes in fp32, the first of equals: int32 [M], always a code."""
    member = tl.zeros_like(group)
    nearest = tl.full(group.shape, float("inf"), tl.float32)
    for i in tl.static_range(FOLD):
        difference = residual - _vectors(codebooks, k, tl.minimum(group * FOLD + i, size - 1), size, DIM, DIM_PADDED)
        distance = tl.sum(difference * difference, axis=1)
        member = tl.where(distance < nearest, i, member)
        nearest = tl.minimum(nearest, distance)
    return tl.minimum(group * FOLD + member, size - 1)


@triton.jit
def _vectors(codebooks, k, code, size, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Load the codes' vectors, fp32 [M, DIM_PADDED]."""
    d = tl.arange(0, DIM_PADDED)[None, :]
    return tl.load(codebooks + ((k * size + code) * DIM)[:, None] + d, mask=d < DIM, other=0.0).to(tl.float32)
