"""A budget of bits among places: never exceeded, and spent where it does most good."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.errors import DataError
from vqkv.presets.plans import allocate


@st.composite
def curves(draw, convex=True):
    """By place, points of bits and cost: more bits cost less, and the more there are, the less another one does."""
    found = {}
    for layer in range(draw(st.integers(1, 4))):
        bits = torch.tensor(draw(st.lists(st.integers(1, 24), min_size=1, max_size=5, unique=True))).sort()[0] / 4
        slopes = draw(st.lists(st.floats(1e-3, 10.0), min_size=len(bits), max_size=len(bits)))
        slopes = sorted(slopes, reverse=True) if convex else slopes
        steps = torch.tensor(slopes).double() * torch.cat([bits[:1], bits.diff()])
        found["key", layer] = torch.stack([bits.double(), 100 - steps.cumsum(0)], dim=1)
    return found


def total(found, chosen):
    """Bits and cost of all places."""
    rows = [curve[(curve[:, 0] == chosen[place]).nonzero()[0, 0]] for place, curve in found.items()]
    return torch.stack(rows).sum(0).tolist()


def every_split(found):
    """(bits, cost) of all ways to choose a point for each place."""
    return [torch.stack(rows).sum(0).tolist() for rows in itertools.product(*(c.unbind(0) for c in found.values()))]


def least(found):
    return sum(curve[:, 0].min().item() for curve in found.values()) / len(found)


@pytest.mark.parametrize("convex", [True, False])
@settings(deadline=None, max_examples=50)
@given(data=st.data(), more=st.floats(0, 6))
def test_no_split_of_as_many_bits_costs_less(convex, data, more):
    found = data.draw(curves(convex))
    budget = least(found) + more
    chosen = allocate(found, budget)
    bits, cost = total(found, chosen)
    assert chosen.keys() == found.keys() and bits <= budget * len(found) + 1e-9
    assert all(other_cost >= cost - 1e-9 for other, other_cost in every_split(found) if other <= bits + 1e-9)


@pytest.mark.parametrize(("cost", "message"), [(0.5, "0.7 bits a value, but 0.75 is the least .* allow more"),
                                               (float("nan"), r"keys of layer 0 .*NaN")])  # fmt: skip
def test_a_budget_that_is_too_small_and_costs_that_are_no_numbers(cost, message):
    curves = {("key", 0): torch.tensor([[0.5, 1.0], [1.0, cost]]), ("value", 0): torch.tensor([[1.0, 1.0]])}
    with pytest.raises(DataError, match=message):
        allocate(curves, 0.7)
