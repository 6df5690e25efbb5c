"""Other people's libraries, as they are, on the same codebooks and values. Each function adds their entries to a case,
or raises ``ImportError``; ``add`` then says by name what is skipped."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vqkv.kernels import naive as reference
from vqkv.study.bench.case import BenchCase, skip

PACKAGES = ("torch", "vector-quantize-pytorch", "faiss-cpu", "optimum-quanto", "hqq", "constriction", "triton", "vqkv")
VECTOR_QUANTIZE, FAISS, QUANTO, HQQ = "vector-quantize-pytorch", "faiss", "quanto", "hqq"


def add(name: str, peer: Callable, *arguments) -> None:
    """``peer(*arguments)``; without its package, or where it fails, everything else is timed all the same."""
    try:
        peer(*arguments)
    except Exception as error:  # of code that is not ours, on a device that it may not know
        skip(name, f"{type(error).__name__}: {error}")


def vector_quantize(x: Tensor, codebooks: Tensor):
    """Their ``ResidualVQ`` in evaluation mode, holding our codebooks."""
    from vector_quantize_pytorch import ResidualVQ

    num_quantizers, codebook_size, dim = codebooks.shape
    peer = ResidualVQ(dim=dim, num_quantizers=num_quantizers, codebook_size=codebook_size).eval().to(x.device)
    for layer, codebook in zip(peer.layers, codebooks, strict=True):
        layer._codebook.embed.data.copy_(codebook[None])
    return peer


def vector_quantize_encode(case: BenchCase, x: Tensor, codebooks: Tensor, expected: Tensor) -> None:
    """Codes of the rows of x."""
    peer = vector_quantize(x, codebooks)
    case.add(VECTOR_QUANTIZE, torch.no_grad()(lambda: peer(x[None])[1][0]), expected)


def vector_quantize_decode(case: BenchCase, codes: Tensor, codebooks: Tensor, expected: Tensor) -> None:
    """Sums of codes."""
    peer = vector_quantize(codes, codebooks)
    case.add(VECTOR_QUANTIZE, torch.no_grad()(lambda: peer.get_output_from_indices(codes[None])[0]), expected)


def faiss_residual(x: Tensor, codebooks: Tensor, beam: int = 1):
    """Their ``ResidualQuantizer``, holding our codebooks; its codes are packed, as it stores them."""
    import faiss

    if x.is_cuda:
        raise ImportError("faiss-cpu has no residual quantizer for a GPU")
    faiss.omp_set_num_threads(torch.get_num_threads())
    num_quantizers, codebook_size, dim = codebooks.shape
    peer = faiss.ResidualQuantizer(dim, num_quantizers, (codebook_size - 1).bit_length())
    peer.max_beam_size = beam
    faiss.copy_array_to_vector(codebooks.numpy().ravel(), peer.codebooks)
    peer.is_trained = True
    peer.compute_codebook_tables()
    return peer


def faiss_encode(case: BenchCase, x: Tensor, codebooks: Tensor, expected: Tensor, beam: int = 1) -> None:
    """Packed codes of the rows of x."""
    peer, rows = faiss_residual(x, codebooks, beam), x.numpy()
    read = partial(_unpacked, codebooks=codebooks)
    case.add(f"{FAISS} beam {beam}", partial(peer.compute_codes, rows), expected, read)


def faiss_decode(case: BenchCase, codes: Tensor, codebooks: Tensor, expected: Tensor) -> None:
    """Sums of packed codes."""
    bits = (codebooks.shape[1] - 1).bit_length()
    peer, packed = faiss_residual(codes, codebooks), reference.pack_codes(codes, bits).numpy()
    case.add(FAISS, partial(peer.decode, packed), expected, torch.from_numpy)


def _unpacked(packed, codebooks: Tensor) -> Tensor:
    return reference.unpack_codes(torch.from_numpy(packed), (codebooks.shape[1] - 1).bit_length(), codebooks.shape[0])


def faiss_product(x: Tensor, codebooks: Tensor):
    """Their ``ProductQuantizer``, holding our codebooks (pieces, codebook_size, dim)."""
    import faiss

    if x.is_cuda:
        raise ImportError("faiss-cpu has no product quantizer for a GPU")
    faiss.omp_set_num_threads(torch.get_num_threads())
    pieces, codebook_size, dim = codebooks.shape
    peer = faiss.ProductQuantizer(pieces * dim, pieces, (codebook_size - 1).bit_length())
    faiss.copy_array_to_vector(codebooks.numpy().ravel(), peer.centroids)
    return peer


def faiss_product_encode(case: BenchCase, x: Tensor, codebooks: Tensor, expected: Tensor) -> None:
    """x (rows, pieces * dim) -> a byte a piece."""
    peer, rows = faiss_product(x, codebooks), x.numpy()
    case.add(FAISS, partial(peer.compute_codes, rows), expected, torch.from_numpy)


def faiss_product_decode(case: BenchCase, codes: Tensor, codebooks: Tensor, expected: Tensor) -> None:
    """A byte a piece -> (rows, pieces * dim)."""
    peer, packed = faiss_product(codes, codebooks), codes.to(torch.uint8).numpy()
    case.add(FAISS, partial(peer.decode, packed), expected, torch.from_numpy)


def quanto(x: Tensor, bits: int, group_size: int):
    """Their quantized tensor: qint4 and qint2 by group as transformers' cache stores it; qint8, which has no groups, by
    token and symmetric."""
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint2, qint4, qint8, quantize_weight

    if bits == 8:
        rows = x.flatten(0, -2)
        return quantize_weight(rows, qint8, 0, AbsmaxOptimizer()(rows, qint8, 0))
    kind = {2: qint2, 4: qint4}[bits]
    scale, shift = MaxOptimizer()(x, kind, 0, group_size)
    return quantize_weight(x, kind, 0, scale, shift, group_size)


def quanto_encode(case: BenchCase, x: Tensor, bits: int, group_size: int) -> None:
    """x (batch, num_kv_heads, seq_len, head_dim) -> their tensor; the error is that of what it stores."""
    call = torch.no_grad()(partial(quanto, x, bits, group_size))
    case.add(QUANTO, call, x, lambda stored: stored.dequantize().view(x.shape))


def quanto_decode(case: BenchCase, x: Tensor, bits: int, group_size: int) -> None:
    """Their tensor -> values."""
    stored = quanto(x, bits, group_size)
    case.add(QUANTO, torch.no_grad()(stored.dequantize), x, lambda values: values.view(x.shape))


def hqq(x: Tensor, bits: int, group_size: int):
    """Their codes and what goes with them, groups of neighbouring channels, offsets found by their solver."""
    from hqq.core.quantize import Quantizer

    return Quantizer.quantize(x, bits, group_size=group_size, axis=1, device=x.device.type, compute_dtype=torch.float32)


def hqq_encode(case: BenchCase, x: Tensor, bits: int, group_size: int) -> None:
    """Encode like ``quanto_encode``."""
    case.add(HQQ, partial(hqq, x, bits, group_size), x, lambda stored: hqq_values(*stored, x))


def hqq_decode(case: BenchCase, x: Tensor, bits: int, group_size: int) -> None:
    """Decode like ``quanto_decode``."""
    codes, about = hqq(x, bits, group_size)
    case.add(HQQ, lambda: hqq_values(codes, about, x), x)


def hqq_values(codes: Tensor, about: dict, like: Tensor) -> Tensor:
    """Decoded in fp32, as everything is here."""
    from hqq.core.quantize import Quantizer

    return Quantizer.dequantize(codes, about | {"compute_dtype": torch.float32}).view(like.shape)
