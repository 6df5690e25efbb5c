"""Which implementation of a kernel runs. The Triton twins will be chosen here, for tensors on a GPU."""

from torch import Tensor

from vqkv.kernels import cpu


def implementation(x: Tensor):
    """The module whose kernels serve tensors on ``x``'s device."""
    return cpu


def name(x: Tensor) -> str:
    """Its name, for reports: ``cpu`` (plain torch, any device)."""
    return implementation(x).__name__.rpartition(".")[2]


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """x (..., dim), codebooks (num_quantizers, codebook_size, dim) -> codes (..., num_quantizers), int64.

    ``beam``: how many partial sequences of codes are kept from stage to stage.
    """
    return implementation(x).rvq_encode(x, codebooks, beam)


def rvq_candidates(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    """All sequences that beam search ends with, best first: (..., candidates, num_quantizers). For learning."""
    return cpu.rvq_candidates(x, codebooks, beam)


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """codes (..., num_quantizers) -> sums of codes (..., dim), float32."""
    return implementation(codes).rvq_decode(codes, codebooks)
