"""Cases of residual VQ: vectors to codes, codes to vectors, and what learning counts."""

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from vqkv import kernels
from vqkv.kernels import cpu
from vqkv.kernels import naive as reference
from vqkv.study.bench import peers, roofline
from vqkv.study.bench.case import BenchCase, Sizes, ours

CHECKED = 512  # rows whose codes are compared with brute force's
BEAM = 4
PART = 2048  # rows multiplied at a time


def problem(sizes: Sizes, rows: int, num_quantizers: int, codebook_size: int) -> tuple[Tensor, Tensor]:
    """Gaussian vectors (rows, dim), and codebooks (num_quantizers, codebook_size, dim) drawn from the residuals."""
    generator = torch.Generator().manual_seed(sizes.seed)
    x = torch.randn(rows, sizes.group, generator=generator)
    residual = torch.randn(4 * codebook_size, sizes.group, generator=generator)
    codebooks = []
    for _ in range(num_quantizers):
        sample = residual[torch.randperm(len(residual), generator=generator)[:codebook_size]]
        codebook = sample * 0.7  # shrunk towards the mean, as k-means would
        residual = residual - codebook[cpu.rvq_encode(residual, codebook[None]).squeeze(-1)]
        codebooks.append(codebook)
    return x.to(sizes.device), torch.stack(codebooks).to(sizes.device)


def name(x: Tensor, codebooks: Tensor) -> tuple[str, str]:
    """Names of the format and of the shape."""
    num_quantizers, codebook_size, dim = codebooks.shape
    return (
        f"residual {num_quantizers}x{codebook_size} d={dim}",
        f"N={len(x)} d={dim} K={num_quantizers} C={codebook_size}",
    )


def _deepest(sizes: Sizes, rows: int) -> tuple[Tensor, Tensor]:
    return problem(sizes, rows, max(sizes.depths), max(sizes.codebook_sizes))


def encode(sizes: Sizes) -> Iterator[BenchCase]:
    """The deepest, and fewer rows by size and number of codebooks."""
    x, codebooks = _deepest(sizes, sizes.rows)
    case = _encode(x, codebooks)
    case.add("matrix products alone", partial(products, x, codebooks.mT.contiguous()))
    yield case
    whole = (max(sizes.depths), max(sizes.codebook_sizes), sizes.rows)
    pairs = [(max(sizes.depths), size) for size in sizes.codebook_sizes]
    pairs += [(depth, max(sizes.codebook_sizes)) for depth in sizes.depths]
    for pair in dict.fromkeys(pairs):
        if (*pair, sizes.sweep_rows) != whole:
            yield _encode(*problem(sizes, sizes.sweep_rows, *pair))


def _encode(x: Tensor, codebooks: Tensor) -> BenchCase:
    case = BenchCase("rvq_encode", *name(x, codebooks), roofline.encode(x, codebooks))
    expected = reference.rvq_encode(x[:CHECKED], codebooks)
    case.add_both("rvq_encode", x, x, codebooks, expected=expected)
    peers.add(peers.VECTOR_QUANTIZE, peers.vector_quantize_encode, case, x, codebooks, expected)
    peers.add(peers.FAISS, peers.faiss_encode, case, x, codebooks, expected)
    return case


def products(x: Tensor, weights: Tensor) -> None:
    """The matrix products of the search and nothing else: x (rows, dim), weights (num_quantizers, dim, codes)."""
    buffer = x.new_empty(min(PART, len(x)), weights.shape[2])
    for part in x.split(PART):
        for weight in weights:
            torch.mm(part, weight, out=buffer[: len(part)])


def encode_packed(sizes: Sizes) -> Iterator[BenchCase]:
    """Codes that leave the kernel as the bits that are stored."""
    x, codebooks = _deepest(sizes, sizes.rows)
    bits, groups = (codebooks.shape[1] - 1).bit_length(), max(1, sizes.head_dim // sizes.group)
    tokens = x[: len(x) // groups * groups].unflatten(0, (-1, groups))
    work = roofline.encode(x, codebooks, code_bytes=bits / 8)
    case = BenchCase("rvq_encode_packed", *name(x, codebooks), work)
    encode = kernels.rvq_encode_packed
    expected = reference.rvq_encode_packed(tokens[: CHECKED // groups], codebooks, bits)
    case.add(ours("rvq_encode_packed", x), partial(encode, tokens, codebooks, bits), expected)
    whole = reference.rvq_encode(x[:CHECKED], codebooks)
    peers.add(peers.FAISS, peers.faiss_encode, case, x, codebooks, whole)
    yield case


def encode_beam(sizes: Sizes) -> Iterator[BenchCase]:
    """Beam search, which keeps four candidates."""
    x, codebooks = _deepest(sizes, max(1, sizes.sweep_rows // BEAM))
    case = BenchCase("rvq_encode_beam4", *name(x, codebooks), roofline.encode(x, codebooks, BEAM))
    expected = reference.rvq_encode(x[:64], codebooks, BEAM)
    case.add(ours("rvq_encode", x, codebooks, BEAM), partial(kernels.rvq_encode, x, codebooks, BEAM), expected)
    peers.add(peers.FAISS, peers.faiss_encode, case, x, codebooks, expected, BEAM)
    yield case


def decode(sizes: Sizes) -> Iterator[BenchCase]:
    """Sums of codes."""
    x, codebooks = _deepest(sizes, sizes.rows)
    codes = kernels.rvq_encode(x, codebooks)
    expected = reference.rvq_decode(codes, codebooks)
    case = BenchCase("rvq_decode", *name(x, codebooks), roofline.sum_of_codes(codes, codebooks))
    case.add_both("rvq_decode", x, codes, codebooks, expected=expected)
    peers.add(peers.VECTOR_QUANTIZE, peers.vector_quantize_decode, case, codes, codebooks, expected)
    peers.add(peers.FAISS, peers.faiss_decode, case, codes, codebooks, expected)
    yield case


def statistics(sizes: Sizes) -> Iterator[BenchCase]:
    """Counts and sums of a step of learning codebooks by moving averages."""
    x, codebooks = _deepest(sizes, sizes.rows)
    codes = kernels.rvq_encode(x, codebooks)
    case = BenchCase("rvq_statistics", *name(x, codebooks), roofline.statistics(x, codes, codebooks))
    expected = reference.rvq_statistics(x, codes, codebooks)[1]
    case.add_both("rvq_statistics", x, x, codes, codebooks, expected=expected, read=itemgetter(1))
    case.add("one-hot products", partial(one_hot_statistics, x, codes, codebooks))
    yield case


def one_hot_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> list[Tensor]:
    """As vector-quantize-pytorch sums: a matrix product of each stage's residuals with ones and zeros."""
    residual, sums = x, []
    for codebook, chosen in zip(codebooks, codes.unbind(-1), strict=True):
        onehot = torch.nn.functional.one_hot(chosen, len(codebook)).to(x.dtype)
        sums.append(onehot.mT @ residual)
        residual = residual - codebook[chosen]
    return sums


OPERATIONS = {
    "rvq_encode": encode,
    "rvq_encode_packed": encode_packed,
    "rvq_encode_beam4": encode_beam,
    "rvq_decode": decode,
    "rvq_statistics": statistics,
}
