"""Arguments of presets, as the command line gives them: what is wrong is named."""

from types import SimpleNamespace

import pytest

from vqkv import DataError, UnknownNameError, presets
from vqkv.presets.plans import FromPrevious
from vqkv.runtime.registry import parse_assignments


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
