"""Cases of residual VQ: vectors to codes, codes to vectors, and what learning counts."""

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from vqkv import kernels
from vqkv.kernels import naive as reference
from vqkv.study.bench import peers, roofline
from vqkv.study.bench.case import Operation, Problem, Sizes, gaussian, ours
from vqkv.study.bench.roofline import Demand

CHECKED = 512  # rows whose codes are compared with brute force's
BEAM = 4
PART = 2048  # rows multiplied at a time


def problem(sizes: Sizes, rows: int, num_quantizers: int = 0, codebook_size: int = 0) -> tuple[Tensor, Tensor]:
    """Draw Gaussian vectors (rows, dim) and codebooks (num_quantizers, codebook_size, dim), by default the largest."""
    num_quantizers, codebook_size = num_quantizers or max(sizes.depths), codebook_size or max(sizes.codebook_sizes)
    codebooks = gaussian(num_quantizers, codebook_size, sizes.group, seed=sizes.seed + 1)
    codebooks *= 0.7 * 0.8 ** torch.arange(num_quantizers)[:, None, None]
    return gaussian(rows, sizes.group, seed=sizes.seed, device=sizes.device), codebooks.to(sizes.device)


def named(operation: str, x: Tensor, codebooks: Tensor, work: Demand) -> Problem:
    """Make a problem with the names of its format and shape."""
    depth, size, dim = codebooks.shape
    return Problem(operation, f"residual {depth}x{size} d={dim}", f"N={len(x)} d={dim} K={depth} C={size}", work)


def encode(sizes: Sizes) -> Iterator[Problem]:
    """Time search of the deepest, and fewer rows by size and number of codebooks."""
    deepest, largest = max(sizes.depths), max(sizes.codebook_sizes)
    shapes = [(sizes.rows, deepest, largest)]
    shapes += [(sizes.sweep_rows, deepest, size) for size in sizes.codebook_sizes]
    shapes += [(sizes.sweep_rows, depth, largest) for depth in sizes.depths]
    for shape in dict.fromkeys(shapes):
        x, codebooks = problem(sizes, *shape)
        case = named("rvq_encode", x, codebooks, roofline.encode(x, codebooks))
        expected = reference.rvq_encode(x[:CHECKED], codebooks)
        case.add_ours("rvq_encode", x, x, codebooks, expected=expected)
        case.add_peer("vector-quantize-pytorch", partial(peers.vector_quantize, codebooks, x=x), expected)
        case.add_peer("faiss beam 1", partial(peers.faiss_encode, codebooks, x), expected)
        if shape == shapes[0]:
            case.add("matrix products alone", partial(products, x, codebooks.mT.contiguous()))
        yield case


def products(x: Tensor, weights: Tensor) -> None:
    """Time the matrix products of the search and nothing else: x (rows, dim), weights (num_quantizers, dim, codes)."""
    buffer = x.new_empty(min(PART, len(x)), weights.shape[2])
    for part in x.split(PART):
        for weight in weights:
            torch.mm(part, weight, out=buffer[: len(part)])


def encode_beam(sizes: Sizes) -> Iterator[Problem]:
    """Time beam search, which keeps four candidates."""
    x, codebooks = problem(sizes, max(1, sizes.sweep_rows // BEAM))
    case = named(f"rvq_encode_beam{BEAM}", x, codebooks, roofline.encode(x, codebooks, BEAM))
    expected = reference.rvq_encode(x[:64], codebooks, BEAM)
    case.add(ours("rvq_encode", x, x, codebooks, BEAM), partial(kernels.rvq_encode, x, codebooks, BEAM), expected)
    case.add_peer(f"faiss beam {BEAM}", partial(peers.faiss_encode, codebooks, x, beam=BEAM), expected)
    yield case


def decode(sizes: Sizes) -> Iterator[Problem]:
    """Time sums of codes."""
    x, codebooks = problem(sizes, sizes.rows)
    codes, values = kernels.rvq_encode(x, codebooks), x.numel()
    work = Demand(values * len(codebooks), codes.nbytes + codebooks.nbytes + 4 * values, values)  # an addition a stage
    case, expected = named("rvq_decode", x, codebooks, work), reference.rvq_decode(codes, codebooks)
    case.add_ours("rvq_decode", x, codes, codebooks, expected=expected)
    case.add_peer("vector-quantize-pytorch", partial(peers.vector_quantize, codebooks, codes=codes), expected)
    case.add_peer("faiss", partial(peers.faiss_decode, codebooks, codes), expected)
    yield case


def statistics(sizes: Sizes) -> Iterator[Problem]:
    """Time counts and sums of a step of learning codebooks by moving averages."""
    x, codebooks = problem(sizes, sizes.rows)
    codes = kernels.rvq_encode(x, codebooks)
    expected = reference.rvq_statistics(x, codes, codebooks)
    moved = x.nbytes + codes.nbytes + codebooks.nbytes + sum(each.nbytes for each in expected) // 2  # fp32 would do
    work = Demand(2 * x.numel() * len(codebooks), moved, x.numel())  # a subtraction and an addition a stage
    case = named("rvq_statistics", x, codebooks, work)
    case.add_ours("rvq_statistics", x, x, codes, codebooks, expected=expected[1], read=itemgetter(1))
    yield case


OPERATIONS: dict[str, Operation] = {
    "rvq_encode": encode,
    "rvq_encode_beam4": encode_beam,
    "rvq_decode": decode,
    "rvq_statistics": statistics,
}
