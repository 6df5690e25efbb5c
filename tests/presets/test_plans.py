"""Plans of presets: wrong arguments are named, as the command line gives them; a budget of bits is never exceeded, and
spent where it does most good."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import DataError, UnknownNameError, presets
from vqkv.presets.plans import FromPrevious, allocate
from vqkv.runtime.checks import parse_assignments


def test_settings_by_name_go_to_predictor_and_backbone():
    given = ["predictor=reduced_rank", "rank=8", "backbone={name: higgs, bits: 3, sink_tokens: 2}", "recent_window=7"]
    made = presets.make("aqua", **parse_assignments(given))
    backbone = presets.higgs(3, sink_tokens=2)
    assert made.arguments == presets.aqua(backbone, "reduced_rank", rank=8, recent_window=7).arguments
    assert made.arguments["backbone"] == {"name": "higgs", **backbone.arguments} and made.name == "aqua-higgs"
    assert made.plan.arguments == {"rank": 8} and (made.sink_tokens, made.recent_window) == (4, 7)
    assert presets.aqua(made.arguments["backbone"]).arguments["backbone"] == made.arguments["backbone"]


@pytest.mark.parametrize(
    ("name", "assignment", "message"),
    [
        ("aqua", "rank=8", "unknown argument of predictor 'linear' 'rank'. Known: strength."),
        ("aqua", "settings=5", "unknown argument of predictor 'linear' 'settings'"),
        ("aqua", "in_features=5", "in_features"),
        ("aqua", "predictor=liner", "unknown predictor 'liner'. Did you mean 'linear'? Known: gptq, linear, mlp"),
        ("aqua", "predictor=[linear]", "must be str"),
        ("aqua", "backbone={bits: 3}", "unknown preset ''"),
        ("aqua", "backbone={name: higgs, bit: 3}", "unknown argument of preset 'higgs' 'bit'. Did you mean 'bits'?"),
        ("aqua", "backbone=3", "must be Preset or str or dict, not 3"),
        ("aqua", "backbone=kvsharer", "'kvsharer' must be a preset without predictors of its own"),
        ("aqua", "backbone=aqua", "'aqua-higgs' must be a preset without predictors of its own"),
        ("aqua", "first_layer_bits=4.0", "must be int, not 4.0"),
        ("aqua", "first_layer_bits=8", "higgs of 8 bits: 2, 3 and 4 have a grid"),
        ("aqua", "key_from=V", "of the same layer only a value can read the key"),
        *[("aqua", f"value_from={names}", f"sources '{names}' of a value: write e.g. 'K-1', 'V-1+K', 'mean' or 'none'")
          for names in ("V-0", "V-1+Q", "V-1+V-1")],
        ("higgs", "name=x", "unknown argument of preset 'higgs' 'name'"),
        ("higgs", "bits=5", "higgs of 5 bits: 2, 3 and 4 have a grid"),
        ("vqllm", "settings=3", "kmeans_iterations"),
        ("kvsharer", "sink_tokens=-1", "sink_tokens -1 must be an integer from 0"),
        ("crossed", "quantizer=uniforms", "Did you mean 'uniform'?"),
        ("crossed", "rotation=hadamar", "Did you mean 'hadamard'?"),
        ("crossed", "entropy=true", "leaves storing its codes to others"),
        ("crossed", "joint=true -p mixed=true", "not predicted or mixed"),
        ("crossed", "quantizer=grid -p bits=2.5", "grid of 2.5 bits a value: use (2, 3, 4)"),
        ("crossed", "quantizer=affine -p bits=2.5", "use (1, 2, 3"),
        ("crossed", "bits=11", "from 0.01 to 10"),
        ("crossed", "block_tokens=0", "tokens 0 must be an integer"),
        *[("crossed", f"quantizer={quantizer} -p bits={bits}", "a number up to 16")
          for quantizer in ("uniform", "rvq") for bits in (0, -1)],
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(name, assignment, message):
    with pytest.raises((DataError, UnknownNameError)) as error:
        presets.make(name, **parse_assignments(assignment.split(" -p ")))
    assert message in str(error.value)


def test_sources_before_the_first_layer_are_left_out():
    three, one = (SimpleNamespace(num_layers=count) for count in (3, 1))
    plan = FromPrevious(presets.fp16(), key_from="K-2+K-9", value_from="K").arrange(presets.higgs(), three)
    assert [roles["key"].sources for roles in plan] == [(), (), (("key", 0),)]
    for sources in ("mean", "none"):
        plan = FromPrevious(presets.fp16(), key_from=sources, value_from=sources).arrange(presets.higgs(), three)
        assert [roles["key"].predictor is None for roles in plan] == [True, *[sources == "none"] * 2]
    (only,) = presets.aqua().plan.arrange(presets.higgs(), one)
    assert only["key"].predictor is None and only["value"].predictor is None


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


@pytest.mark.parametrize("convex", [True, False])
@settings(deadline=None, max_examples=50)
@given(data=st.data(), more=st.floats(0, 6))
def test_no_split_of_as_many_bits_costs_less(convex, data, more):
    points = data.draw(curves(convex))
    budget = sum(curve[:, 0].min().item() for curve in points.values()) / len(points) + more
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
