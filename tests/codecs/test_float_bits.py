"""Caches in 16 bits, bit for bit, in fewer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.codecs.float_bits import FloatBits
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.pipeline import Chain

TYPES = (torch.bfloat16, torch.float16)
WIDTHS = 2.0 ** torch.linspace(-12, 6, 16)


def bits_of(x):
    return x.view(torch.int16)


def chain(dtype):
    return Chain([TokenBlock(8)], FloatBits()).fit((gaussian(2, 3, 256, 16) * WIDTHS).to(dtype))


@pytest.fixture(scope="module")
def codecs():
    return {dtype: chain(dtype) for dtype in TYPES}


@pytest.mark.parametrize("dtype", TYPES)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), any_bits=st.booleans())
def test_every_bit_comes_back(codecs, dtype, seed, any_bits):
    """Also of numbers that calibration was not like: any finite ones, subnormal, -0."""
    x = (gaussian(2, 3, 16, 16, seed=seed) * WIDTHS).to(dtype)
    if any_bits:
        drawn = torch.randint(-(2**15), 2**15, x.shape, generator=torch.Generator().manual_seed(seed))
        drawn = drawn.to(torch.int16).view(dtype)
        x = torch.where(drawn.float().abs() <= 65504, drawn, x)
    back = codecs[dtype].decode(codecs[dtype].encode(x), dtype)
    assert back.dtype == dtype and torch.equal(bits_of(back), bits_of(x))


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 1.4), (torch.float16, 1.1)])
def test_gaussian_channels_of_any_width_shrink(codecs, dtype, least):
    """An exponent of a Gaussian has 2.1 bits of entropy, a sign 1."""
    x = (gaussian(1, 3, 512, 16, seed=1) * WIDTHS.clamp(2.0**-8)).to(dtype)
    codec = Chain([TokenBlock(64)], FloatBits()).fit(x)
    assert least < 2 * x.numel() / codec.encode(x).nbytes < least + 0.2


def test_signs_that_hardly_vary_take_hardly_a_bit():
    x = gaussian(1, 3, 1024, 16).bfloat16()
    x[..., :8] = -x[..., :8].abs()
    sizes = [
        Chain([TokenBlock(64)], FloatBits()).fit(each).encode(each).nbytes
        for each in (x, gaussian(1, 3, 1024, 16).bfloat16())
    ]
    assert 0.9 < (sizes[1] - sizes[0]) * 8 / (x.numel() / 2) < 1.05


def test_values_of_32_bits_are_rounded_to_fp16():
    x = gaussian(1, 3, 64, 16)
    codec = Chain([TokenBlock(8)], FloatBits()).fit(x)
    assert torch.equal(codec.decode(codec.encode(x)), x.half().float())
