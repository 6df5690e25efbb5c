"""Triton's packing against the reference, by Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_guard import DEVICE, amid, apart, guarded  # noqa: F401, the fixture

from vqkv.kernels import bits as plain
from vqkv.kernels import reference
from vqkv.kernels.gpu.bits import pack_codes, unpack_codes


def codes_of(shape, bits: int, dtype=torch.int64) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits)).to(DEVICE, dtype)


SHAPES = [(3, 5), (2, 3, 40), (1, 1), (7, 33), (1500,), (2, 1025)]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15])
def test_packs_and_unpacks_like_the_reference(bits, guarded):  # noqa: F811
    for shape in SHAPES:
        codes = codes_of(shape, bits)
        wanted = reference.pack_codes(codes, bits)
        packed = pack_codes(amid(codes), bits)
        assert packed.dtype == torch.uint8 and torch.equal(packed, wanted)
        found = unpack_codes(amid(wanted), bits, shape[-1])
        assert torch.equal(found.long(), codes)
        assert found.dtype == plain.unpack_codes(wanted, bits, shape[-1]).dtype


@pytest.mark.parametrize("bits", [8, 16])
def test_whole_bytes_need_no_kernel(bits):
    codes = codes_of((3, 5), bits)
    packed = pack_codes(codes, bits)
    assert torch.equal(packed, reference.pack_codes(codes, bits))
    found = unpack_codes(packed, bits, 5)
    assert torch.equal(found.long(), codes) and found.dtype == plain.unpack_codes(packed, bits, 5).dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("bits", [2, 5])
def test_codes_of_any_integer_type_and_stride(dtype, bits, guarded):  # noqa: F811
    codes = codes_of((2, 3, 9), bits, dtype)
    wanted = reference.pack_codes(codes, bits)
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


@pytest.mark.parametrize("bits", [1, 4, 11])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_nothing_is_packed_to_nothing(bits, shape):
    codes = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    packed = pack_codes(codes, bits)
    assert packed.shape == (*shape[:-1], (shape[-1] * bits + 7) // 8)
    assert unpack_codes(packed, bits, shape[-1]).shape == shape
