"""Presets with predictors and shared layers, and their arguments on the command line: what is wrong is named."""

import pytest
import torch
from typer.testing import CliRunner

from vqkv import Compressor, DataError, UnknownNameError, presets
from vqkv.cli import app
from vqkv.presets.plans import FromPrevious
from vqkv.runtime.registry import parse_assignments


def test_the_command_passes_settings_on_to_predictor_and_backbone(tmp_path):
    given = ["predictor=reduced_rank", "rank=8", "backbone={name: higgs, bits: 3}"]
    arguments = ["calibrate", "vqkv/llama-mini", str(tmp_path), "--preset", "aqua", "--num-seqs", "2"]
    arguments += ["--seq-len", "64", *(word for each in given for word in ("-p", each))]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = Compressor.from_pretrained(tmp_path)
    assert made.predictions["key", 1].predictor.rank == 8 and made.codecs[1][0].quantizer.size == 64
    assert made.notes["arguments"]["backbone"]["bits"] == 3 and made.name == "aqua-higgs"


def test_presets_by_name_take_what_the_functions_take():
    made = presets.make("aqua", backbone=presets.higgs(3), predictor="reduced_rank", rank=8)
    assert made.arguments == presets.aqua(presets.higgs(3), "reduced_rank", rank=8).arguments
    assert made.arguments["backbone"] == {"name": "higgs", **presets.higgs(3).arguments}
    assert presets.aqua(made.arguments["backbone"]).arguments["backbone"] == made.arguments["backbone"]


@pytest.mark.parametrize(
    ("name", "assignment", "message"),
    [
        ("aqua", "rank=8", "unknown argument of predictor 'linear' 'rank'. Known: strength."),
        ("aqua", "settings=5", "unknown argument of predictor 'linear' 'settings'"),
        ("aqua", "kind=mlp", "unknown argument of predictor 'linear' 'kind'"),
        ("aqua", "name=x", "unknown argument of predictor 'linear' 'name'"),
        ("aqua", "in_features=5", "in_features"),
        ("aqua", "predictor=liner", "unknown predictor 'liner'. Did you mean 'linear'? Known: gptq, linear, mlp"),
        ("aqua", "predictor=[linear]", "must be str"),
        ("aqua", "backbone={bits: 3}", "unknown preset ''"),
        ("aqua", "backbone={name: higgs, bit: 3}", "unknown argument of preset 'higgs' 'bit'. Did you mean 'bits'?"),
        ("aqua", "backbone={name: higgs, 3: 3}", "unknown argument of preset 'higgs' '3'"),
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
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(name, assignment, message):
    with pytest.raises((DataError, UnknownNameError)) as error:
        presets.make(name, **parse_assignments([assignment]))
    assert message in str(error.value)


class Trial:
    """Stands where a model would: every pair of layers is as good as any other."""

    def __init__(self, num_layers):
        self.num_layers = num_layers

    def distances(self):
        return torch.ones(self.num_layers, self.num_layers)

    def similarity(self, plan):
        return 0.9


def test_sources_before_the_first_layer_are_left_out():
    plan = FromPrevious(presets.fp16(), key_from="K-2+K-9", value_from="K").arrange(presets.higgs(), Trial(3))
    assert [roles["key"].sources for roles in plan] == [(), (), (("key", 0),)]
    for sources in ("mean", "none"):
        plan = FromPrevious(presets.fp16(), key_from=sources, value_from=sources).arrange(presets.higgs(), Trial(3))
        assert [roles["key"].predictor is None for roles in plan] == [True, *[sources == "none"] * 2]
    (only,) = presets.aqua().plan.arrange(presets.higgs(), Trial(1))
    assert only["key"].predictor is None and only["value"].predictor is None


def test_as_many_pairs_as_can_exist():
    plan = presets.kvsharer(pairs=3, threshold=0).plan.arrange(presets.fp16(), Trial(4))
    assert [bool(roles["key"].sources) for roles in plan] == [False, True, True, True]
