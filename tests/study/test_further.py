"""What techniques save at equal error, on codes whose statistics are known."""

import pytest
import torch

from vqkv.study.experiments import further


def test_tables_by_context_save_what_the_context_says():
    """Codes whose size is that of the component above: nothing but a sign is left to tell."""
    generator = torch.Generator().manual_seed(0)
    size = torch.randint(0, 2, (64, 32, 1), generator=generator) * 3.0
    signs = torch.randint(0, 2, (64, 32, 16), generator=generator) * 2.0 - 1
    fit, test = (signs * size).chunk(2)
    plain = further._bits(fit, test)
    told = further._bits(fit, test, *(further._neighbours(x, -1) for x in (fit, test)))
    assert plain == pytest.approx(1.5, abs=0.05)  # size 1 bit, and a sign of every other one
    assert told == pytest.approx(0.5, abs=0.2)
    assert (further._neighbours(test, -1)[..., 0] == 0).all()


def test_prediction_along_tokens_saves_where_they_are_alike():
    """A random walk along tokens, from zero in every block, whose steps are as wide as a quantizer's."""
    noise = torch.randn(2, 200, 32, 8, generator=torch.Generator().manual_seed(1))
    fit, test = noise.cumsum(2)
    bits, error = further._along_tokens(fit, test)
    plain, plain_error = further._coded(*(further._rounded(x) for x in (fit, test)), test)
    assert error == pytest.approx(plain_error, rel=0.2)
    assert bits < plain - 0.8
