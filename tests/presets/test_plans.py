"""Plans of presets: wrong arguments are named, as the command line gives them; a budget of bits is never exceeded, and
spent where it does most good. Every cross that exists calibrates and generates."""

import itertools
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import Compressor, DataError, UnknownNameError, calibrate, presets
from vqkv.evaluation.footprint import Shape
from vqkv.evaluation.recommend import capacity
from vqkv.presets.crosses import PAYS, best_for
from vqkv.presets.plans import FromPrevious, allocate
from vqkv.runtime.checks import parse_assignments
from vqkv.study.experiments.designs import BEST, every
from vqkv.study.experiments.rule import pays_from
from vqkv.study.tables import repository_root


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
        ("aqua", "predictor=liner", "unknown predictor 'liner'. Did you mean 'linear'? Known: gptq, linear, mlp"),
        ("aqua", "backbone={name: higgs, bit: 3}", "unknown argument of preset 'higgs' 'bit'. Did you mean 'bits'?"),
        ("aqua", "backbone=3", "must be Preset or str or dict, not 3"),
        ("aqua", "backbone=kvsharer", "'kvsharer' must be a preset without predictors of its own"),
        ("aqua", "first_layer_bits=4.0", "must be int, not 4.0"),
        ("aqua", "first_layer_bits=8", "higgs of 8 bits: 2, 3 and 4 have a grid"),
        ("aqua", "key_from=V", "of the same layer only a value can read the key"),
        *[("aqua", f"value_from={names}", f"sources '{names}' of a value: write e.g. 'K-1', 'V-1+K', 'mean' or 'none'")
          for names in ("V-0", "V-1+Q", "V-1+V-1")],
        ("higgs", "name=x", "unknown argument of preset 'higgs' 'name'"),
        ("kvsharer", "sink_tokens=-1", "sink_tokens -1 must be an integer from 0"),
        ("crossed", "quantizer=uniforms", "Did you mean 'uniform'?"),
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


TOKENS = torch.randint(1, 400, (6, 48), generator=torch.Generator().manual_seed(0))
LEARNED = {"codebook_size": 16, "group_size": 8, "kmeans_iterations": 2, "block_tokens": 4}
EXISTING = [
    {"quantizer": quantizer, "rotation": rotation, "entropy": entropy}
    for quantizer, entropy in (("uniform", False), ("rvq", False), ("rvq", True), ("grid", False), ("grid", True),
                               ("affine", False), ("affine", True))
    for rotation in ("none", "hadamard", "pca", "fisher_pca")
]  # fmt: skip


def made(model, **arguments):
    return calibrate(model, TOKENS, presets.crossed(**LEARNED | arguments), progress=False, batch_size=3)


def generated(model, cache, prompt=TOKENS[:2, :20]):
    return model.generate(prompt, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)


def described(preset) -> str:
    """What it stores how, whatever it is called."""
    parts = preset.settings, preset.plan, preset.key_codec(64).config(), preset.value_codec(64).config()
    return re.sub(r"Preset\(.*?\)(?=, kind)|0x\w+", "", repr(parts))


@pytest.mark.parametrize("arguments", EXISTING, ids=lambda a: "-".join(map(str, a.values())))
def test_every_cross_that_exists_generates(llama, arguments):
    cache = made(llama, **arguments).new_cache(llama)
    assert generated(llama, cache).shape[1] == 32
    assert cache.report().packed_bytes > 0 and cache.report().bits_per_value < 16


@pytest.mark.parametrize("quantizer", ["uniform", "trellis"])
def test_one_rotation_for_all_layers_keeps_its_bits_at_any_rank(llama, quantizer, tmp_path):
    shared = {"quantizer": quantizer, "rotation": "fisher_pca", "bits": 1.5, "joint": True}
    full, half = (made(llama, rank=rank, **shared) for rank in (0, 96))
    assert full.codecs[0][0].stages[2].matrix.shape == (1, 192, 192) and half.side_bytes < 0.7 * full.side_bytes
    taken = []
    for compressor in (full, half):
        cache = compressor.new_cache(llama)
        assert generated(llama, cache, TOKENS[:, :40]).shape[1] == 52
        taken.append(cache.report().bits_per_value)
    assert taken[1] == pytest.approx(taken[0], rel=0.2)  # of a value of the cache, whatever the rank
    half.save_pretrained(tmp_path)
    assert Compressor.from_pretrained(tmp_path).fingerprint == half.fingerprint


def test_predictors_of_fewer_bits_take_fewer_bytes(llama):
    sides = [made(llama, predicted=True, predictor_bits=bits).side_bytes for bits in (16, 8, 4)]
    assert sides[0] > 1.1 * sides[1] > 1.1 * sides[2]


@pytest.mark.parametrize("quantizer", ["uniform", "rvq"])
def test_plans_keep_to_the_budget_and_save_the_same_bits(llama, quantizer, tmp_path):
    for predicted in (False, True):
        plan = {"mixed": True, "predicted": predicted, "rotation": "fisher_pca"}
        compressor, folder = made(llama, quantizer=quantizer, bits=1.5, **plan), tmp_path / str(predicted)
        quantizers = [codec.quantizer for pair in compressor.codecs for codec in pair]
        bits = [q.bits if hasattr(q, "bits") else q.num_quantizers * q.code_bits / q.group_size for q in quantizers]
        assert sum(bits) / len(bits) <= 1.5 + 1e-9 and len(set(bits)) > 1
        compressor.save_pretrained(folder)
        again = Compressor.from_pretrained(folder)
        assert again.fingerprint == compressor.fingerprint
        caches = [one.new_cache(llama) for one in (compressor, again)]
        assert torch.equal(*(generated(llama, cache) for cache in caches))
        assert caches[0].report() == caches[1].report()


def test_capacity_of_residual_vq_depends_on_the_text_only_until_bits_are_split(llama):
    split = {"quantizer": "rvq", "mixed": True, "bits": 2.0}
    preset = presets.crossed("rvq", 2.0, rotation="fisher_pca", **LEARNED)
    assert capacity(llama, preset, 1).bits_per_value == 2.0 + 16 / 32  # which needs no model
    assert capacity(llama, made(llama, **split), 1).bits_per_value < 16
    for preset in (presets.crossed(**LEARNED | split), presets.crossed(**LEARNED)):
        with pytest.raises(DataError, match="expects as many as SmolLM2-135M needs"):
            capacity(llama, preset, 1)


UNFIT = [
    (presets.crossed("rvq", 0.1, mixed=True, **LEARNED), "0.1 bits a value, but 0.5 is the least"),
    (presets.crossed("grid", mixed=True), "Grid cannot trade bits for error"),
    (presets.aqua(predictor="mlp"), "264 samples for an MLP of 64 input features"),
    (presets.crossed(block_tokens=64, mixed=True), "shorter than the codec's block of 64"),
    (presets.crossed(mixed=True, sink_tokens=48), "none is packed"),
]


@pytest.mark.parametrize(("preset", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_bits_that_cannot_be_split_and_too_few_tokens_are_named(llama, preset, message):
    with pytest.raises(DataError, match=message):
        calibrate(llama, TOKENS, preset, progress=False)


@pytest.mark.parametrize("kv_width", [64, 1024])
@pytest.mark.parametrize("pays", [PAYS["best-mid"], PAYS["best-long"]])
@pytest.mark.parametrize("more", [-1, 0])
def test_the_best_is_what_page_11_measures_for_so_many_tokens(kv_width, pays, more):
    tokens = kv_width * pays + more
    design = BEST[best_for(tokens, kv_width)]
    expected = presets.crossed(**every()[design], bits=2.0)
    assert described(presets.best(2.0, tokens, kv_width, trellis=True)) == described(expected)
    assert BEST[best_for(tokens + 1, kv_width)] != design or more == 0


@pytest.mark.parametrize(("light", "heavy"), [("best-short", "best-mid"), ("best-mid", "best-long")])
def test_the_best_predicts_from_where_validation_text_says_that_it_pays(light, heavy):
    searched = pd.read_csv(repository_root() / "results/11_rule.csv")
    names = [BEST[name].replace("trellis", "uniform") for name in (light, heavy)]
    shape = Shape(num_layers=30, num_kv_heads=3, head_dim=64)  # SmolLM2-135M's
    thresholds = pays_from(searched, *names, shape.values) / shape.width
    assert len(thresholds) == 2 and thresholds.between(PAYS[heavy] / 1.15, PAYS[heavy] * 1.15).all()


def test_best_falls_back_where_predictions_do_not_pay(llama):
    """Few tokens: it says so, and stores what the design for short contexts stores."""
    with pytest.warns(UserWarning, match="does not pay after calibration on"):
        compressor = calibrate(llama, TOKENS[:, :20], presets.best(1.0, 1 << 20, block_tokens=4), progress=False)
    expected = calibrate(llama, TOKENS[:, :20], presets.best(1.0, 1, block_tokens=4), progress=False)
    assert not compressor.predictions and compressor.side_bytes == expected.side_bytes
