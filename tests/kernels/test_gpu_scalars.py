"""Triton's packing and affine encoder against naive ones, in its interpreter without a GPU."""

import pytest
import torch
from views import DEVICE, amid, apart, gaussian

from vqkv.kernels import cpu, naive
from vqkv.kernels.formats.triton import affine_encode, can_affine_encode
from vqkv.kernels.packing.triton import pack_codes, unpack_codes


def codes_of(shape, bits: int, dtype=torch.int64) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits)).to(DEVICE, dtype)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16])
def test_packing(bits, request):
    """Spare bits of a row are zeros, and are not read."""
    if bits != 8:  # which needs no kernel
        request.getfixturevalue("guarded")
    for shape in ((3, 5), (2, 3, 40), (1, 1), (7, 33), (1500,), (2, 1025), (0, 5), (3, 0), (2, 0, 4)):
        codes = codes_of(shape, bits)
        wanted = naive.pack_codes(codes, bits)
        packed = pack_codes(amid(codes), bits)
        assert packed.dtype == torch.uint8 and torch.equal(packed, wanted)
        spare = -shape[-1] * bits % 8
        if spare and wanted.numel():
            wanted[..., -1] |= 0xFF << (8 - spare) & 0xFF
        unpacked = unpack_codes(amid(wanted), bits, shape[-1])
        assert torch.equal(unpacked.long(), codes)
        assert unpacked.dtype == cpu.unpack_codes(wanted, bits, shape[-1]).dtype


def same_affine(x: torch.Tensor, group_size: int) -> None:
    for bits in (2, 4, 8):
        assert can_affine_encode(x, bits, group_size)
        coded, wanted = affine_encode(x, bits, group_size), naive.affine_encode(x, bits, group_size)
        for name in ("codes", "low", "high"):
            assert torch.equal(getattr(coded, name), getattr(wanted, name))
        assert coded.shape == wanted.shape and coded.group_size == group_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, group_size",
    [((1, 2, 100, 128), 64), ((1, 2, 63, 80), 40), ((2, 1, 1, 96), 96), ((1, 2, 7, 12), 12), ((1, 2, 7, 8), 4)],
)
def test_affine_codes_and_ends(shape, group_size, dtype, guarded):
    same_affine(amid((gaussian(*shape) * 3).to(dtype)), group_size)


def test_affine_values_with_any_strides_and_none(guarded):
    x = gaussian(2, 3, 7, 32)
    for view in (apart(x), amid(x.transpose(1, 2).contiguous()).transpose(1, 2), amid(x.mT.contiguous()).mT):
        same_affine(view, 16)
    same_affine(x[:, :1].expand(-1, 3, -1, -1), 16)
    same_affine(x[:, :, :0], 16)
    assert not can_affine_encode(x, 4, 1) and not can_affine_encode(x, 3, 16)


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
    for levels in (3, 15, 255):  # values midway between levels go to the even one
        x = torch.zeros(levels + 5, device=DEVICE)
        x[0], x[1 : levels + 1] = levels, torch.arange(levels, device=DEVICE) + 0.5
        same_affine(x.view(1, 1, 1, -1), levels + 5)
