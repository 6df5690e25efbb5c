"""A grid's points by brute force in float64."""

from torch import Tensor

from vqkv.kernels.rvq.naive import rvq_encode_packed


def grid_encode_packed(x: Tensor, codebooks: Tensor, bits: int) -> Tensor:
    """Pairs x (..., groups, 2), points (1, points, 2) -> uint8 (..., ceil(groups * bits / 8)); equals to the first."""
    return rvq_encode_packed(x, codebooks, bits)
