"""Triton's affine encoder has the reference's codes and ends exactly."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_guard import DEVICE, amid, apart, guarded  # noqa: F401, the fixture

from vqkv.kernels import reference
from vqkv.kernels.gpu.affine import affine_encode

BITS = (2, 4, 8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def values(*shape, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE, dtype)


def same(x: torch.Tensor, bits: int, group_size: int) -> None:
    found, wanted = affine_encode(x, bits, group_size), reference.affine_encode(x, bits, group_size)
    assert torch.equal(found.low, wanted.low) and torch.equal(found.high, wanted.high)
    assert torch.equal(found.codes, wanted.codes)
    assert found.shape == wanted.shape and found.group_size == group_size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "shape, group_size",
    [((1, 2, 100, 128), 64), ((1, 2, 63, 80), 40), ((2, 1, 1, 96), 96), ((2, 3, 5, 16), 8), ((1, 1, 3, 4), 4)],
)
def test_codes_and_ends_equal_the_reference(shape, group_size, bits, dtype, guarded):  # noqa: F811
    same(amid(values(*shape, dtype=dtype)), bits, group_size)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim, group_size", [(12, 3), (20, 5), (8, 2), (8, 1)])
def test_groups_that_end_within_a_byte(head_dim, group_size, bits, guarded):  # noqa: F811
    same(amid(values(1, 2, 7, head_dim)), bits, group_size)


@pytest.mark.parametrize("bits", BITS)
def test_values_with_any_strides(bits, guarded):  # noqa: F811
    x = values(2, 3, 7, 32)
    same(apart(x), bits, 16)
    same(amid(x.transpose(1, 2).contiguous()).transpose(1, 2), bits, 16)
    same(amid(x.mT.contiguous()).mT, bits, 16)
    same(x[:, :1].expand(-1, 3, -1, -1), bits, 16)


@pytest.mark.parametrize("bits", BITS)
def test_extremes(bits):
    x = torch.zeros(1, 1, 8, 16, device=DEVICE)
    x[0, 0, 1] = 3.7  # a constant group
    x[0, 0, 2] = values(16) * 1e-9  # fp16 has one number for all
    x[0, 0, 3, :8], x[0, 0, 3, 8:] = 65504, -65504
    x[0, 0, 4] = values(16) * 1e6  # ends beyond fp16
    x[0, 0, 5] = 1000 + values(16) * 1e-2  # ends that fp16 moves inwards
    x[0, 0, 6] = 1e6
    x[0, 0, 7] = values(16) * 1e-7
    same(x, bits, 16)


@pytest.mark.parametrize("bits", BITS)
def test_values_midway_between_levels_go_to_the_even_one(bits):
    levels = 2**bits - 1
    x = torch.zeros(levels + 5, device=DEVICE)
    x[0], x[1 : levels + 1] = levels, torch.arange(levels, device=DEVICE) + 0.5
    x = x.view(1, 1, 1, -1)
    same(x, bits, levels + 5)
    codes = reference.unpack_codes(affine_encode(x, bits, levels + 5).codes, bits, levels + 1)[0, 0, 0, 1:4]
    assert codes.tolist() == [0, 2, 2]


@pytest.mark.parametrize("shape", [(1, 2, 0, 16), (0, 2, 3, 16)])
def test_no_tokens(shape):
    found = affine_encode(torch.zeros(shape, device=DEVICE), 4, 8)
    assert found.codes.shape == (*shape[:3], 8) and found.low.shape == found.high.shape == (*shape[:3], 2)
