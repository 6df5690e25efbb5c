"""Triton's search of a grid for pairs against the float64 reference."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_guard import DEVICE, amid, apart, guarded  # noqa: F401, the fixture

from vqkv.codec.grid import gaussian_grids
from vqkv.kernels import reference
from vqkv.kernels.gpu.grid import grid_encode_packed

SIZES = {16: 4, 64: 6, 256: 8}


def values(*shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def grid(size: int) -> torch.Tensor:
    points = gaussian_grids()[size][0].to(DEVICE) if size in gaussian_grids() else values(size, 2)
    return points.half().unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(1, 2, 13, 64, 2), (1, 1, 3, 5, 2), (1, 2), (2, 1, 1, 40, 2)])
def test_codes_equal_the_reference(shape, size, dtype, guarded):  # noqa: F811
    x, points = values(*shape).to(dtype), amid(grid(size))
    wanted = reference.rvq_encode_packed(x, points, SIZES[size])
    assert torch.equal(grid_encode_packed(amid(x), points, SIZES[size]), wanted)


@pytest.mark.parametrize("size, bits", [(5, 3), (2, 1), (30, 5), (100, 7), (16, 8), (1, 2)])
def test_any_number_of_points_and_bits_up_to_eight(size, bits, guarded):  # noqa: F811
    x, points = values(2, 3, 11, 2), amid(grid(size).float())
    assert torch.equal(grid_encode_packed(apart(x), points, bits), reference.rvq_encode_packed(x, points, bits))


def test_of_equally_near_points_the_first_wins():
    points = torch.tensor([[[3.0, 3], [1, 0], [-1, 0], [1, 0]]], device=DEVICE)
    x = torch.tensor([[[1.0, 0], [0, 0], [0, 5], [2, 0]]], device=DEVICE)
    wanted = reference.rvq_encode_packed(x, points, 2)
    assert torch.equal(grid_encode_packed(x, points, 2), wanted)


def test_extremes():
    points = grid(16)
    x = torch.tensor([[65504.0, -65504], [0, 0], [1e-30, -1e-30], [6e4, 1]], device=DEVICE)
    assert torch.equal(grid_encode_packed(x, points, 4), reference.rvq_encode_packed(x, points, 4))


@pytest.mark.parametrize("shape", [(2, 0, 4, 2), (0, 4, 2)])
def test_no_tokens(shape):
    assert grid_encode_packed(torch.zeros(shape, device=DEVICE), grid(16), 4).shape == (*shape[:-2], 2)
