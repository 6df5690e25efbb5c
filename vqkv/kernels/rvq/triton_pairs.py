"""Pairs of values to the nearest of a grid's points on a GPU (HIGGS, section 4): search and packing in one pass."""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.packing.triton import join
from vqkv.kernels.tiles import GRID


def encode_pairs(x: Tensor, codebooks: Tensor, bits: int) -> Tensor:
    """``naive.rvq_encode_packed`` for one codebook of pairs and bits up to 8, in fp32; ties go to the lower index."""
    groups = x.shape[-2]
    packed = torch.empty(*x.shape[:-2], (groups * bits + 7) // 8, dtype=torch.uint8, device=x.device)
    if not x.numel():
        return packed
    each = 8 // gcd(8, bits)  # codes that fill whole bytes
    rows = x.numel() // (2 * groups)
    if groups % each == 0:
        rows, groups = 1, rows * groups
    units = triton.cdiv(groups, each)
    width = min(triton.next_power_of_2(units), GRID["pairs"] // each)
    height = min(triton.next_power_of_2(rows), GRID["pairs"] // each // width)
    grid = (triton.cdiv(rows, height) * triton.cdiv(units, width),)
    size = packed.numel() // rows
    with torch.cuda.device_of(x):
        _encode[grid](
            x.contiguous(), codebooks.contiguous(), packed, rows, groups, size,
            codebooks.shape[-2], bits, each, height, width, num_warps=GRID["num_warps"],
        )  # fmt: skip
    return packed


def are_pairs(codebooks: Tensor, bits: int) -> bool:
    """Tell whether ``encode_pairs`` can search these codebooks: one of pairs, and codes that fit in a byte."""
    return len(codebooks) == 1 and codebooks.shape[-1] == 2 and bits <= 8


@triton.jit
def _encode(
    x, points, packed, rows, groups, size,
    SIZE: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """W units of EACH pairs, of R rows; a unit's codes fill whole bytes."""
    blocks = tl.cdiv(groups, W * EACH)
    row = (tl.program_id(0) // blocks).to(tl.int64) * R + tl.arange(0, R)[:, None]
    unit = (tl.program_id(0) % blocks).to(tl.int64) * W
    value = unit * EACH * 2 + tl.arange(0, W * EACH * 2)[None, :]
    values = tl.load(x + row * groups * 2 + value, mask=(row < rows) & (value < groups * 2), other=0).to(tl.float32)
    first, second = tl.split(values.reshape(R, W * EACH, 2))
    codes = nearest_point(first, second, points, SIZE)
    pair = unit * EACH + tl.arange(0, W * EACH)[None, :]
    codes = tl.where(pair < groups, codes, 0)
    words = join(codes.to(tl.int64) if EACH * BITS > 32 else codes, BITS, EACH)
    BYTES: tl.constexpr = EACH * BITS // 8
    byte = (unit + tl.arange(0, W)[None, :]) * BYTES
    for n in tl.static_range(BYTES):
        octet = (words >> 8 * n).to(tl.uint8)
        tl.store(packed + row * size + byte + n, octet, mask=(row < rows) & (byte + n < size))


@triton.jit
def nearest_point(first, second, points, SIZE: tl.constexpr):
    """Index of the nearest of SIZE points to every pair, by |p|^2 / 2 - p.x."""
    best = tl.full(first.shape, float("inf"), tl.float32)
    winner = tl.zeros(first.shape, tl.int32)
    for index in range(SIZE):
        p = tl.load(points + 2 * index).to(tl.float32)
        q = tl.load(points + 2 * index + 1).to(tl.float32)
        score = (p * p + q * q) * 0.5 - p * first - q * second
        nearer = score < best
        best = tl.where(nearer, score, best)
        winner = tl.where(nearer, index, winner)
    return winner
