"""A budget of bits among layers and roles: never exceeded, and spent where it does most good."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.errors import DataError
from vqkv.presets.plans import allocate


@st.composite
def curves(draw, convex=True):
    """Points of bits and cost by layer and role: more bits cost less, and the more there are, the less another one."""
    points = {}
    for layer in range(draw(st.integers(1, 4))):
        bits = torch.tensor(draw(st.lists(st.integers(1, 24), min_size=1, max_size=5, unique=True))).sort()[0] / 4
        slopes = draw(st.lists(st.floats(1e-3, 10.0), min_size=len(bits), max_size=len(bits)))
        slopes = sorted(slopes, reverse=True) if convex else slopes
        steps = torch.tensor(slopes).double() * torch.cat([bits[:1], bits.diff()])
        points["key", layer] = torch.stack([bits.double(), 100 - steps.cumsum(0)], dim=1)
    return points


def total(curves, chosen):
    """Bits and cost of all layers and roles."""
    rows = [curve[(curve[:, 0] == chosen[layer_role]).nonzero()[0, 0]] for layer_role, curve in curves.items()]
    return torch.stack(rows).sum(0).tolist()


def every_split(curves):
    """(bits, cost) of all ways to choose a point for each layer and role."""
    return [torch.stack(rows).sum(0).tolist() for rows in itertools.product(*(c.unbind(0) for c in curves.values()))]


def least(curves):
    return sum(curve[:, 0].min().item() for curve in curves.values()) / len(curves)


@pytest.mark.parametrize("convex", [True, False])
@settings(deadline=None, max_examples=50)
@given(data=st.data(), more=st.floats(0, 6))
def test_no_split_of_as_many_bits_costs_less(convex, data, more):
    points = data.draw(curves(convex))
    budget = least(points) + more
    chosen = allocate(points, budget)
    bits, cost = total(points, chosen)
    assert chosen.keys() == points.keys() and bits <= budget * len(points) + 1e-9
    assert all(other_cost >= cost - 1e-9 for other, other_cost in every_split(points) if other <= bits + 1e-9)


@pytest.mark.parametrize(("cost", "message"), [(0.5, "0.7 bits a value, but 0.75 is the least .* allow more"),
                                               (float("nan"), r"keys of layer 0 .*NaN")])  # fmt: skip
def test_a_budget_that_is_too_small_and_costs_that_are_no_numbers(cost, message):
    curves = {("key", 0): torch.tensor([[0.5, 1.0], [1.0, cost]]), ("value", 0): torch.tensor([[1.0, 1.0]])}
    with pytest.raises(DataError, match=message):
        allocate(curves, 0.7)
