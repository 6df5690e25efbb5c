"""Components in groups of one byte: which groups, and that what is stored is what is read."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import DataError
from vqkv.codecs.byte_groups import SIZES, ByteGroups, _least_errors, _sizes, gaussian_error
from vqkv.kernels import using

WIDTH, HEADS = 12, 2


def fitted(bits: float, seed: int = 0) -> tuple[ByteGroups, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** -torch.arange(WIDTH).div(3) * torch.tensor([1.0, 5.0])[:, None, None]
    y = torch.randn(2, HEADS, 300, WIDTH, generator=generator) * spread
    quantizer = ByteGroups(bits)
    quantizer.build((HEADS, WIDTH))
    quantizer.partial_fit(y)
    return quantizer, y


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, WIDTH), seed=st.integers(0, 99))
def test_what_is_stored_takes_its_bytes_and_is_what_is_read(count, seed):
    quantizer, y = fitted(8 * count / WIDTH, seed)
    payload = quantizer.store(y)
    assert payload.fields["codes"].shape == (2, HEADS, 300, count)
    assert torch.equal(quantizer.load(payload), quantizer.quantize_dequantize(y))
    assert (quantizer.sizes.sum(1) <= WIDTH).all()


def test_compiled_and_naive_search_find_the_nearest_vectors():
    quantizer, y = fitted(3.0)
    with using("naive"):
        expected, back = quantizer.encode(y)[0], quantizer.quantize_dequantize(y)
    found = quantizer.encode(y)[0]
    assert (found != expected).float().mean() < 1e-3  # ties, but for rounding
    assert torch.allclose(quantizer.quantize_dequantize(y), back, atol=0.1 * y.std())
    assert torch.equal(quantizer.decode(found, {}), quantizer.quantize_dequantize(y))


def test_groups_are_those_of_least_error():
    variance = np.array([9.0, 2.0, 1.0, 0.5, 0.1, 0.1])

    def error(sizes) -> float:
        ends = np.cumsum(sizes)
        parts = [variance[end - size : end].sum() * gaussian_error(size) for size, end in zip(sizes, ends, strict=True)]
        return sum(parts) + variance[ends[-1] :].sum()

    for count in (1, 2, 3):
        tried = [sizes for sizes in itertools.product(SIZES[:5], repeat=count) if sum(sizes) <= len(variance)]
        best = min(map(error, tried))
        assert (
            _least_errors(variance)[0][-1, count]
            == pytest.approx(best)
            == pytest.approx(error(_sizes(variance, count)))
        )


def test_more_bytes_are_more_exact_and_less_than_one_is_refused():
    curve = fitted(2.0)[0].rates(fitted(2.0)[1])
    assert (curve[:, 1].diff() < 0).all() and curve[-1, 0] == 8
    with pytest.raises(DataError, match="0.5 bits of 12 components are no byte: use at least 0.666"):
        ByteGroups(0.5).build((HEADS, WIDTH))


@pytest.mark.parametrize("kind", ["few tokens", "few vectors", "a dead head", "all zeros"])
def test_text_that_says_little_still_makes_codes(kind):
    x = torch.randn(1, HEADS, {"few tokens": 20}.get(kind, 600), WIDTH, generator=torch.Generator().manual_seed(0))
    if kind == "few vectors":
        x = x[:, :, torch.arange(600) % 7]
    x[:, 0] *= kind != "a dead head"
    x *= kind != "all zeros"
    quantizer = ByteGroups(4.0)
    quantizer.build((HEADS, WIDTH))
    quantizer.partial_fit(x)
    restored = quantizer.decode(*quantizer.encode(x))
    assert (restored - x).square().mean() <= 0.05 * x.square().mean() + 1e-12
