"""Triton's packing and affine encoder against naive ones, in its interpreter without a GPU."""

import pytest
import torch
from gpu_guard import DEVICE, amid, apart, gaussian

from vqkv.kernels import cpu, naive
from vqkv.kernels.affine.triton import affine_encode
from vqkv.kernels.packing.triton import pack_codes, unpack_codes

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def codes_of(shape, bits: int, dtype=torch.int64) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits)).to(DEVICE, dtype)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16])
def test_packing(bits, request):
    if bits != 8:  # which needs no kernel
        request.getfixturevalue("guarded")
    for shape in ((3, 5), (2, 3, 40), (1, 1), (7, 33), (1500,), (2, 1025), (0, 5), (3, 0), (2, 0, 4)):
        codes = codes_of(shape, bits)
        wanted = naive.pack_codes(codes, bits)
        packed = pack_codes(amid(codes), bits)
        assert packed.dtype == torch.uint8 and torch.equal(packed, wanted)
        found = unpack_codes(amid(wanted), bits, shape[-1])
        assert torch.equal(found.long(), codes)
        assert found.dtype == cpu.unpack_codes(wanted, bits, shape[-1]).dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("bits", [2, 5])
def test_codes_of_any_integer_type_and_stride(dtype, bits, guarded):
    codes = codes_of((2, 3, 9), bits, dtype)
    wanted = naive.pack_codes(codes, bits)
    assert torch.equal(pack_codes(apart(codes), bits), wanted)
    assert torch.equal(unpack_codes(apart(wanted), bits, 9).long(), codes.long())


@pytest.mark.parametrize("bits", [3, 4, 11])
def test_spare_bits_of_a_row_are_zeros_and_are_not_read(bits):
    codes = codes_of((4, 3), bits)
    packed = pack_codes(codes, bits)
    spare = packed.shape[-1] * 8 - 3 * bits
    assert spare and not (packed[:, -1] >> (8 - spare)).any()
    packed[:, -1] |= 0xFF << (8 - spare) & 0xFF
    assert torch.equal(unpack_codes(packed, bits, 3).long(), codes)


def same_affine(x: torch.Tensor, group_size: int) -> None:
    for bits in (2, 4, 8):
        found, wanted = affine_encode(x, bits, group_size), naive.affine_encode(x, bits, group_size)
        assert torch.equal(found.low, wanted.low) and torch.equal(found.high, wanted.high)
        assert torch.equal(found.codes, wanted.codes)
        assert found.shape == wanted.shape and found.group_size == group_size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape, group_size",
    [((1, 2, 100, 128), 64), ((1, 2, 63, 80), 40), ((2, 1, 1, 96), 96), ((1, 2, 7, 12), 3), ((1, 2, 7, 8), 1)],
)
def test_affine_codes_and_ends(shape, group_size, dtype, guarded):
    """Also of groups that end within a byte."""
    same_affine(amid((gaussian(*shape) * 3).to(dtype)), group_size)


def test_affine_values_with_any_strides(guarded):
    x = gaussian(2, 3, 7, 32)
    for view in (apart(x), amid(x.transpose(1, 2).contiguous()).transpose(1, 2), amid(x.mT.contiguous()).mT):
        same_affine(view, 16)
    same_affine(x[:, :1].expand(-1, 3, -1, -1), 16)


def test_affine_extremes():
    x = torch.zeros(1, 1, 8, 16, device=DEVICE)
    x[0, 0, 1] = 3.7  # a constant group
    x[0, 0, 2] = gaussian(16) * 1e-9  # fp16 has one number for all
    x[0, 0, 3, :8], x[0, 0, 3, 8:] = 65504, -65504
    x[0, 0, 4] = gaussian(16) * 1e6  # ends beyond fp16
    x[0, 0, 5] = 1000 + gaussian(16) * 1e-2  # ends that fp16 moves inwards
    x[0, 0, 6] = 1e6
    x[0, 0, 7] = gaussian(16) * 1e-7
    same_affine(x, 16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_midway_between_levels_go_to_the_even_one(bits):
    levels = 2**bits - 1
    x = torch.zeros(levels + 5, device=DEVICE)
    x[0], x[1 : levels + 1] = levels, torch.arange(levels, device=DEVICE) + 0.5
    found = affine_encode(x.view(1, 1, 1, -1), bits, levels + 5)
    assert naive.unpack_codes(found.codes, bits, levels + 1)[0, 0, 0, 1:4].tolist() == [0, 2, 2]


@pytest.mark.parametrize("shape", [(1, 2, 0, 16), (0, 2, 3, 16)])
def test_no_tokens(shape):
    found = affine_encode(torch.zeros(shape, device=DEVICE), 4, 8)
    assert found.codes.shape == (*shape[:3], 8) and found.low.shape == found.high.shape == (*shape[:3], 2)
