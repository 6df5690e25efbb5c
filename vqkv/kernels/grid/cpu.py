"""A grid's points by residual VQ's compiled search of short vectors."""

from torch import Tensor

from vqkv.kernels.rvq.cpu import rvq_encode_packed


def grid_encode_packed(x: Tensor, codebooks: Tensor, bits: int) -> Tensor:
    """``naive.grid_encode_packed``."""
    return rvq_encode_packed(x, codebooks, bits)
