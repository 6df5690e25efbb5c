"""n-bit codes <-> bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.codecs.packing import pack, packed_size, unpack
from vqkv.errors import DataError, FormatError


@st.composite
def codes_and_bits(draw, smallest=0):
    bits = draw(st.integers(1, 16))
    shape = [*draw(st.lists(st.integers(smallest, 4), max_size=3)), draw(st.integers(1, 37))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    if codes.numel():
        codes.view(-1)[-1] = (1 << bits) - 1  # the largest code at the ragged end
    return codes, bits


@settings(deadline=None, max_examples=200)
@given(codes_and_bits())
def test_round_trip_in_exactly_ceil_bits(case):
    codes, bits = case
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*codes.shape[:-1], -(-codes.shape[-1] * bits // 8))
    assert torch.equal(unpack(packed, bits, codes.shape[-1]), codes)


@settings(deadline=None, max_examples=50)
@given(codes_and_bits(smallest=1))
def test_layout_is_the_little_endian_bit_string(case):
    codes, bits = case
    rows = codes.reshape(-1, codes.shape[-1]).numpy()
    strings = ((rows[..., None] >> np.arange(bits)) & 1).reshape(len(rows), codes.shape[-1] * bits)
    expected = np.packbits(strings.astype(np.uint8), axis=-1, bitorder="little")
    assert np.array_equal(pack(codes, bits).numpy(), expected.reshape(*codes.shape[:-1], -1))


def test_unused_bits_are_zero_so_equal_codes_give_equal_bytes():
    assert pack(torch.tensor([[7, 7, 7]]), 3).tolist() == [[0b11111111, 0b1]]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_integer_types_do_not_matter(dtype):
    codes = torch.arange(0, 2048, 7)
    assert torch.equal(pack(codes.to(dtype), 11), pack(codes, 11))


@pytest.mark.parametrize("bad", [[-1, 0], [0, 2048]])
def test_codes_out_of_range_are_refused(bad):
    with pytest.raises(DataError, match="do not fit 11 bits"):
        pack(torch.tensor([bad]), 11)


@pytest.mark.parametrize("bits", [0, 17])
def test_impossible_widths_are_refused(bits):
    with pytest.raises(DataError, match="1 to 16"):
        pack(torch.zeros(1, 1, dtype=torch.long), bits)


def test_rows_of_another_length_are_refused():
    packed = pack(torch.zeros(2, 32, dtype=torch.long), 11)
    with pytest.raises(FormatError, match="33 codes of 11 bits take 46 bytes"):
        unpack(packed, 11, 33)
    with pytest.raises(FormatError, match="int16"):
        unpack(packed.to(torch.int16), 11, 32)


def test_default_setting_takes_11_words_a_head_vector():
    assert packed_size(4 * 8, 11) == 44
