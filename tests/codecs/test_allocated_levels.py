"""Bits for each component: what is spent, where, and that what is stored is what is read."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import DataError
from vqkv.codecs.allocated_levels import TOGETHER, WIDEST, AllocatedLevels, _gains, allocated, widths_for


def fitted(bits: float, groups: int = 4, seed: int = 0) -> tuple[AllocatedLevels, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** -torch.arange(groups * TOGETHER).div(4)
    y = torch.randn(2, 1, 300, groups * TOGETHER, generator=generator) * spread
    quantizer = AllocatedLevels(bits)
    quantizer.build((1, groups * TOGETHER))
    quantizer.partial_fit(y)
    quantizer.finalize()
    return quantizer, y


@settings(max_examples=12, deadline=None)
@given(bits=st.floats(0.25, 5), groups=st.integers(2, 5), seed=st.integers(0, 99))
def test_what_is_stored_takes_its_bits_and_is_what_is_read(bits, groups, seed):
    quantizer, y = fitted(bits, groups, seed)
    payload = quantizer.store(y)
    assert payload.fields["codes"].shape == (2, 1, 300, int(bits * groups + 1e-6))  # bytes of a row
    assert torch.equal(quantizer.load(payload), quantizer.quantize_dequantize(y))
    assert (quantizer.widths.diff() <= 0).all()  # the strongest components have most bits


def test_each_component_comes_back_as_its_nearest_level():
    quantizer, y = fitted(2.0)
    back = quantizer.quantize_dequantize(y)
    for i in range(y.shape[-1]):
        width = int(quantizer.widths[i // TOGETHER])
        levels = quantizer.levels[width - 1].levels.float() * quantizer.scale[i].float() if width else torch.zeros(1)
        nearest = (y[..., i, None] - levels).abs().amin(-1)
        assert torch.allclose((y[..., i] - back[..., i]).abs(), nearest, atol=1e-6)


def test_greedy_allocation_is_the_best_of_all():
    variance = torch.tensor([5.0, 1.0, 0.2]).repeat_interleave(TOGETHER)
    gains, (_, left) = _gains(variance), allocated(variance)
    for spent in (2, 5, 9):
        tried = [w for w in itertools.product(range(WIDEST + 1), repeat=3) if sum(w) == spent]
        taken = max(sum(gains[g, :width].sum() for g, width in enumerate(w)) for w in tried)
        assert left[spent] == pytest.approx((variance.sum() - taken).item())
        widths = widths_for(variance, spent / 3)
        assert widths.sum() == spent
        assert sum(gains[g, :width].sum() for g, width in enumerate(widths.tolist())) == pytest.approx(taken.item())


def test_components_that_cannot_be_packed_are_refused():
    with pytest.raises(DataError, match="12 components do not divide into groups of 8"):
        AllocatedLevels(2.0).build((1, 12))
