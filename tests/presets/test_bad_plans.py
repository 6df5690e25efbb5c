"""Presets with predictors and shared layers, and their arguments on the command line: what is wrong is named."""

import pytest
import torch
from typer.testing import CliRunner

from vqkv import Compressor, DataError, UnknownNameError, presets
from vqkv.cli import app
from vqkv.codecs.predictor_kinds import make_predictor
from vqkv.presets.plans import FromPrevious, Shared


def calibrated(tmp_path, *parameters, code=0):
    """Preset aqua by the command, with ``-p`` before each of ``parameters``."""
    small = ["--preset", "aqua", "--num-seqs", "2", "--seq-len", "64"]
    chosen = [word for parameter in parameters for word in ("-p", parameter)]
    result = CliRunner().invoke(app, ["calibrate", "vqkv/llama-mini", str(tmp_path / "out"), *small, *chosen])
    assert result.exit_code == code, result.output
    return result.output


# Arguments by name


def test_the_command_passes_settings_on_to_predictor_and_backbone(tmp_path):
    calibrated(tmp_path, "predictor=reduced_rank", "rank=8", "backbone={name: higgs, bits: 3}")
    made = Compressor.from_pretrained(tmp_path / "out")
    assert made.predictions["key", 1].predictor.rank == 8
    assert made.codecs[1][0].quantizer.size == 64
    assert made.notes["arguments"]["backbone"]["bits"] == 3 and made.name == "aqua-higgs"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (["rank=8"], "unknown argument of predictor 'linear' 'rank'. Known: strength."),
        (["settings=5"], "unknown argument of predictor 'linear' 'settings'"),
        (["kind=mlp"], "unknown argument of predictor 'linear' 'kind'"),
        (["name=x"], "unknown argument of predictor 'linear' 'name'"),
        (["in_features=5"], "in_features"),
        (["backbone={bits: 3}"], "unknown preset None"),
        (["backbone={name: higgs, bit: 3}"], "unknown argument of preset 'higgs' 'bit'. Did you mean 'bits'?"),
        (["backbone={name: higgs, 3: 3}"], "unknown argument of preset 'higgs' '3'"),
        (["backbone=3"], "must be Preset or str or dict, not 3"),
        (["first_layer_bits=4.0"], "must be int, not 4.0"),
        (["predictor=[linear]"], "must be str"),
    ],
)
def test_what_the_command_cannot_pass_on_is_named(tmp_path, parameters, message):
    out = calibrated(tmp_path, *parameters, code=2)
    assert message in out and "Traceback" not in out


def test_presets_by_name_take_what_the_functions_take():
    made = presets.make("aqua", backbone=presets.higgs(3), predictor="reduced_rank", rank=8)
    assert made.arguments == presets.aqua(presets.higgs(3), "reduced_rank", rank=8).arguments
    assert made.arguments["backbone"] == {"name": "higgs", **presets.higgs(3).arguments}
    assert presets.aqua(made.arguments["backbone"]).arguments["backbone"] == made.arguments["backbone"]
    with pytest.raises(UnknownNameError, match="unknown argument of preset 'higgs' 'name'"):
        presets.make("higgs", name="x")
    with pytest.raises(UnknownNameError) as error:
        presets.make("vqllm", settings=3)
    assert "kmeans_iterations" in str(error.value)


# AQUA-KV's arguments


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_bits_of_the_first_layer(bits):
    with pytest.raises(DataError, match=r"first layer in higgs of .* bits: .* 16, 4, 3 or 2"):
        presets.aqua(first_layer_bits=bits)


def test_bits_of_higgs():
    with pytest.raises(DataError, match=r"higgs of .* bits: 2, 3 and 4 have a grid"):
        presets.higgs(5)


@pytest.mark.parametrize("kind", [["linear"], {"linear": 1}, None, 3, "liner"])
def test_kinds_of_predictor(kind):
    with pytest.raises(UnknownNameError, match="unknown predictor .*gptq, linear, mlp, reduced_rank"):
        make_predictor(kind)


@pytest.mark.parametrize("width", ["in_features", "out_features"])
def test_widths_are_the_models(width):
    with pytest.raises(UnknownNameError, match=f"argument of predictor 'mlp' '{width}'") as error:
        presets.aqua(predictor="mlp", **{width: 5})
    known = str(error.value).split("Known: ")[1]
    assert "features" not in known and "learning_rate" in known


@pytest.mark.parametrize("backbone", ["kvsharer", "aqua", presets.kvsharer(), presets.aqua()])
def test_backbones_with_predictors_of_their_own(backbone):
    with pytest.raises(DataError, match="without predictors of its own") as error:
        presets.aqua(backbone)
    name = "aqua-higgs" if backbone == "aqua" else getattr(backbone, "name", backbone)
    assert repr(name) in str(error.value)
    assert len(str(error.value)) < 160


# Sources of a prediction


class Trial:
    """Stands where a model would: every pair of layers is as good as any other."""

    def __init__(self, num_layers):
        self.num_layers = num_layers

    def distances(self):
        return torch.ones(self.num_layers, self.num_layers)

    def similarity(self, plan):
        return 0.9


def test_sources_that_no_layer_has():
    for settings, message in (
        ({"key_from": "K-99"}, "'K-99' of a key: a model of 3 layers has none .* 2 layers back"),
        ({"key_from": "K-3+V-4"}, "'K-3[+]V-4' of a key"),
        ({"value_from": "V-3"}, "'V-3' of a value"),
    ):
        with pytest.raises(DataError, match=message):
            FromPrevious(presets.fp16(), **settings).arrange(presets.higgs(), Trial(3))
    plan = FromPrevious(presets.fp16(), key_from="K-2+K-9", value_from="K").arrange(presets.higgs(), Trial(3))
    assert [roles["key"].sources for roles in plan] == [(), (), (("key", 0),)]
    for sources in ("mean", "none"):
        FromPrevious(presets.fp16(), key_from=sources, value_from=sources).arrange(presets.higgs(), Trial(3))


def test_one_layer_is_the_first_and_predicted_from_nothing():
    (only,) = presets.aqua().plan.arrange(presets.higgs(), Trial(1))
    assert only["key"].predictor is None and only["value"].predictor is None


# Shared layers


@pytest.mark.parametrize("threshold", [-1.1, 1])
def test_thresholds(threshold):
    with pytest.raises(DataError, match="threshold .* is no cosine similarity from -1 to below 1"):
        presets.kvsharer(threshold=threshold)


def test_a_whole_number_is_a_threshold():
    assert presets.kvsharer(threshold=0).plan == Shared(1, 0)


@pytest.mark.parametrize(("num_layers", "pairs"), [(1, 1), (3, 3), (4, 100)])
def test_more_pairs_than_layers_to_share(num_layers, pairs):
    with pytest.raises(DataError, match=f"{pairs} pairs .* of {num_layers} layers has at most {num_layers - 1}"):
        Shared(pairs).arrange(presets.fp16(), Trial(num_layers))


def test_as_many_pairs_as_can_exist():
    plan = Shared(3).arrange(presets.fp16(), Trial(4))
    assert [bool(roles["key"].sources) for roles in plan] == [False, True, True, True]
