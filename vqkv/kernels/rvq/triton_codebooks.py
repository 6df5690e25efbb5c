"""Operands of the search: codebooks rearranged for scoring, and sub-vectors, as the kernels read them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.derived import remembered

LARGEST = 4  # binary exponent of a stage's largest code in fp16: residuals 4,096 times as large fit, and codes 2^-18
HALF_MAX = tl.constexpr(65504.0)
NO_CODE = tl.constexpr(1 << 30)  # beyond all of them


@dataclass(frozen=True)
class ScoringTables:
    """Codebooks rearranged for scoring: code (tile * block_c / fold + column) * fold + i lies in its tile at
    i * block_c / fold + column, so that neighbouring codes fold into one column."""

    codebooks: Tensor  # (K, C, dim), contiguous
    scaled: Tensor  # fp16 (K, tiles, block_c, dim padded): codes times their stage's scale
    norms: Tensor  # fp32 (K, tiles, block_c): half the squared norms of ``scaled``; infinite where there is no code
    scales: Tensor  # fp32 (K,): powers of two


@remembered
def prepare(codebooks: Tensor, block_c: int, fold: int) -> ScoringTables:
    """The tables of ``codebooks`` for a tile's settings."""
    num_quantizers, size, dim = codebooks.shape
    tiles = triton.next_power_of_2(-(-size // block_c))
    dim_padded, missing = max(16, triton.next_power_of_2(dim)), -size % (block_c * min(4, tiles))
    exponents = torch.frexp(codebooks.float().abs().amax(dim=(1, 2))).exponent
    scales = torch.ldexp(torch.ones(num_quantizers, device=codebooks.device), (LARGEST - exponents).clamp(-60, 60))
    scaled = (codebooks.float() * scales[:, None, None]).clamp(-65504, 65504).half()
    norms = scaled.float().square().sum(dim=-1) / 2  # of the rounded codes: their errors then mostly cancel

    def rearrange(codes: Tensor) -> Tensor:
        parts = codes.reshape(num_quantizers, -1, block_c // fold, fold, codes.shape[-1])
        return parts.transpose(2, 3).reshape(num_quantizers, -1, block_c, codes.shape[-1]).contiguous()

    return ScoringTables(
        codebooks=codebooks.contiguous(),
        scaled=rearrange(F.pad(scaled, (0, dim_padded - dim, 0, missing))),
        norms=rearrange(F.pad(norms, (0, missing), value=torch.inf).unsqueeze(-1)).squeeze(-1),
        scales=scales,
    )


@triton.jit
def load_vectors(
    x, row, group, rows, groups, size1, size2, stride0, stride1, stride2, stride_g, stride_d, DIM, DIM_PADDED
):
    """Sub-vectors, fp32 [M, DIM_PADDED]: ``row`` counts through sizes (.., size1, size2), ``group`` is in the row."""
    d = tl.arange(0, DIM_PADDED)
    offset = (row // (size1 * size2)).to(tl.int64) * stride0 + group.to(tl.int64) * stride_g
    offset += (row // size2 % size1).to(tl.int64) * stride1 + (row % size2).to(tl.int64) * stride2
    mask = ((row < rows) & (group < groups))[:, None] & (d < DIM)[None, :]
    return tl.load(x + offset[:, None] + d.to(tl.int64)[None, :] * stride_d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def code_vectors(codebooks, k, code, size, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """The codes themselves, fp32 [M, DIM_PADDED]."""
    d = tl.arange(0, DIM_PADDED)
    offset = (k * size + code) * DIM
    return tl.load(codebooks + offset[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def as_operand(residual, scale):
    """fp16 for the tensor cores; numbers that are none become 0, so that every comparison has an answer."""
    scaled = tl.minimum(tl.maximum(tl.where(residual == residual, residual, 0.0) * scale, -HALF_MAX), HALF_MAX)
    return scaled.to(tl.float16)


@triton.jit
def score_tile(operand, scaled, norms, tile, BLOCK_C: tl.constexpr, DIM_PADDED: tl.constexpr, FOLD: tl.constexpr):
    """Half squared distances but for the residual's energy, least of each FOLD codes: [M, BLOCK_C / FOLD]."""
    c = tl.arange(0, BLOCK_C)
    codes = tl.load(scaled + (tile * BLOCK_C + c)[:, None] * DIM_PADDED + tl.arange(0, DIM_PADDED)[None, :])
    norm = tl.load(norms + tile * BLOCK_C + c)
    scores = norm[None, :] - tl.dot(operand, tl.trans(codes))
    if FOLD > 1:
        scores = tl.min(tl.reshape(scores, [operand.shape[0], FOLD, BLOCK_C // FOLD]), axis=1)
    return scores
