"""Statistics of encoded vectors: how often every code was chosen, and the sum of the residuals for which it
was, without atomic additions, so that equal inputs give equal bits.

The rows of every stage are sorted by code. Each code's rows are cut into pieces of at most ``piece`` rows, so that a
popular code does not keep one program busy while the others wait; a program sums a piece in fp32, in a fixed order, and
a second kernel adds a code's pieces in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.tiles import STATISTICS


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """``naive.rvq_statistics`` for any strides. Memory: about 16 bytes a code, and 4 * dim a piece."""
    num_quantizers, size, dim = codebooks.shape
    sums = torch.zeros(codebooks.shape, dtype=torch.float64, device=x.device)
    if x.numel() == 0 or codes.numel() == 0:
        return sums.new_zeros(num_quantizers, size), sums
    tile, join = STATISTICS["sum"], STATISTICS["join"]
    order, starts = _sort(codes, size)
    ends = (starts.diff(dim=-1) + tile["piece"] - 1).div(tile["piece"], rounding_mode="floor").cumsum(dim=-1)
    most = size + len(x) // tile["piece"]  # of pieces; how many there are, only the GPU knows
    pieces = torch.arange(most, device=x.device).repeat(num_quantizers, 1)
    owners = torch.searchsorted(ends, pieces, right=True)
    partial = torch.empty(num_quantizers, most, dim, dtype=torch.float32, device=x.device)
    codebooks, shape = codebooks.contiguous(), {"DIM": dim, "DIM_PADDED": triton.next_power_of_2(dim)}
    with torch.cuda.device_of(x):
        _sum_pieces[(most, num_quantizers)](
            x, codes, codebooks, order, starts, ends, owners, partial,
            len(x), size, most, *x.stride(), *codes.stride(),
            PIECE=tile["piece"], BLOCK=tile["block_rows"], **shape, num_warps=tile["num_warps"],
        )  # fmt: skip
        _join_pieces[(size, num_quantizers)](
            partial, ends, sums, size, most, BLOCK=join["block_pieces"], **shape, num_warps=join["num_warps"]
        )
    return starts.diff(dim=-1).double(), sums


def _sort(codes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For every stage, row numbers in the order of their codes (K, rows), and where each code's begin (K, size + 1)."""
    narrow = codes.T.to(torch.int16 if size <= 1 << 15 else torch.int32)  # radix sort: the time goes with the width
    ordered, order = narrow.contiguous().sort(dim=-1, stable=True)
    bounds = torch.arange(size + 1, dtype=torch.int32, device=codes.device).repeat(len(narrow), 1)
    return order, torch.searchsorted(ordered.to(torch.int32), bounds)


@triton.jit
def _sum_pieces(
    x, codes, codebooks, order, starts, ends, owners, partial,
    rows, size, most, stride_x, stride_d, stride_row, stride_k,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Program (piece, stage): the sum of the residuals before that stage of the piece's rows, computed anew from x and
    the codes before: writing them all would take more memory traffic."""
    piece, k = tl.program_id(0), tl.program_id(1)
    code = tl.load(owners + k.to(tl.int64) * most + piece)
    if code < size:  # else there are fewer pieces than could have been
        end_of_before = tl.load(ends + k * size + code - 1, mask=code > 0, other=0)
        begin = tl.load(starts + k * (size + 1) + code) + (piece - end_of_before) * PIECE
        end = tl.minimum(begin + PIECE, tl.load(starts + k * (size + 1) + code + 1))
        d = tl.arange(0, DIM_PADDED)
        total = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
        for start in tl.range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            valid = place < end
            row = tl.load(order + k.to(tl.int64) * rows + place, mask=valid, other=0)
            mask = valid[:, None] & (d < DIM)[None, :]
            values = x + (row * stride_x)[:, None] + d.to(tl.int64)[None, :] * stride_d
            residual = tl.load(values, mask=mask, other=0.0).to(tl.float32)
            for before in tl.range(0, k):
                chosen = tl.load(codes + row * stride_row + before * stride_k, mask=valid, other=0).to(tl.int32)
                vectors = codebooks + ((before * size + chosen) * DIM)[:, None] + d[None, :]
                residual -= tl.load(vectors, mask=mask, other=0.0).to(tl.float32)
            total += residual
        pointers = partial + (k.to(tl.int64) * most + piece) * DIM + d
        tl.store(pointers, tl.sum(total, axis=0), mask=d < DIM)


@triton.jit
def _join_pieces(
    partial, ends, sums, size, most, BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):  # fmt: skip
    """Program (code, stage): its pieces' sums added in float64, BLOCK at a time."""
    code, k = tl.program_id(0), tl.program_id(1)
    begin = tl.load(ends + k * size + code - 1, mask=code > 0, other=0)
    end = tl.load(ends + k * size + code)
    d = tl.arange(0, DIM_PADDED)
    total = tl.zeros([BLOCK, DIM_PADDED], tl.float64)
    for start in tl.range(begin, end, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        mask = (piece < end)[:, None] & (d < DIM)[None, :]
        pointers = partial + ((k.to(tl.int64) * most + piece) * DIM)[:, None] + d[None, :]
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float64)
    tl.store(sums + (k * size + code) * DIM + d, tl.sum(total, axis=0), mask=d < DIM)
