"""n-bit codes <-> bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.kernels import pack_codes, unpack_codes


@st.composite
def codes_and_bits(draw):
    bits = draw(st.integers(1, 16))
    shape = [*draw(st.lists(st.integers(1, 4), max_size=3)), draw(st.integers(1, 37))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    codes.view(-1)[-1] = (1 << bits) - 1  # the largest code at the ragged end
    return codes, bits


@settings(deadline=None, max_examples=200)
@given(codes_and_bits())
def test_packed_codes_are_the_little_endian_bit_string_and_come_back(case):
    codes, bits = case
    rows = codes.reshape(-1, codes.shape[-1]).numpy()
    strings = ((rows[..., None] >> np.arange(bits)) & 1).reshape(len(rows), codes.shape[-1] * bits)
    expected = np.packbits(strings.astype(np.uint8), axis=-1, bitorder="little")
    packed = pack_codes(codes, bits)
    assert np.array_equal(packed.numpy(), expected.reshape(*codes.shape[:-1], -1))
    assert torch.equal(unpack_codes(packed, bits, codes.shape[-1]).long(), codes)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_integer_types_do_not_matter(dtype):
    codes = torch.arange(0, 2048, 7)
    assert torch.equal(pack_codes(codes.to(dtype), 11), pack_codes(codes, 11))
