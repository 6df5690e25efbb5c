"""Altered compressors, their checksums made right again: nothing is lost unnoticed, and every one gets an error."""

import shutil

import pytest
import small_models
import torch
from forged import signed
from safetensors.torch import load_file, save_file

from vqkv import Compressor, DataError, FormatError, calibrate, load_model, presets
from vqkv.cache.compressor_folder import sha256
from vqkv.codecs import Nothing, codec_from_config
from vqkv.models.load import describe, difference
from vqkv.runtime.checks import check_head_dim, check_num_kv_heads

TOKENS = torch.randint(1, 4096, (4, 48), generator=torch.Generator().manual_seed(0))
HUGE = 10**11


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(small_models.make("llama", tmp_path_factory.mktemp("llama"))))[0]


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """Folders by preset: with predictors, with layers that are shared, and with neither."""
    chosen = {"aqua": presets.aqua(), "shared": presets.kvsharer(pairs=1, threshold=-1), "plain": presets.fp16()}
    chosen["quanto"] = presets.quanto()
    folder = tmp_path_factory.mktemp("saved")
    for name, preset in chosen.items():
        calibrate(model, TOKENS, preset, progress=False).save_pretrained(folder / name)
    return folder


@pytest.fixture
def altered(saved, tmp_path):
    """A function: which folder, and a change of its header -> the folder of an altered copy."""

    def alter(name, change):
        shutil.copytree(saved / name, tmp_path / name)
        signed(tmp_path / name, change)
        return tmp_path / name

    return alter


def header(**values):
    return lambda config: config.update(values)


def of_model(**values):
    return lambda config: config["model"].update(values)


def without(key, version=2):
    return lambda config: (config.pop(key), config.update(version=version))


def prediction(index, **values):
    return lambda config: config["predictions"][index].update(values)


def stored_as_nothing(config):
    config["codecs"][-1][0] = {"part": "Nothing", "head_dim": 32}


def zeros_without_end(config):
    (pair,) = [pair for pair in config["codecs"] if pair[0]["part"] == "Nothing"]
    pair[0]["head_dim"] = None


def fitted_elsewhere(**values):
    return lambda config: config["codecs"][1][0].update(values)


def once_more(config):
    config["predictions"].append(config["predictions"][0])


def test_the_unaltered_are_loaded(saved, model):
    for folder in saved.iterdir():
        Compressor.from_pretrained(folder).new_cache(model)


def test_version_1_is_read_without_predictions_and_only_so(altered):
    folder = altered("plain", without("predictions", version=1))
    assert not Compressor.from_pretrained(folder).predictions
    signed(folder, header(predictions=[]))
    with pytest.raises(FormatError, match="predictions"):
        Compressor.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("aqua", without("predictions"), "lacks predictions"),
        ("plain", without("predictions"), "lacks predictions"),
        ("aqua", without("predictions", version=1), "predictor"),
        ("aqua", header(version=1), "version 1"),
        ("aqua", header(version=2.0), "version 2.0"),
        ("plain", header(version=True), "version True"),
        ("aqua", header(predictions=[]), "predictor"),
        ("aqua", header(predictions={}), "predictions is of type dict"),
        ("aqua", lambda config: config["predictions"].pop(), "predictor"),
        ("aqua", once_more, "twice"),
        ("shared", once_more, "twice"),
        ("aqua", prediction(1, sources=[["key", 0], ["key", 0]]), "same source twice"),
        ("aqua", prediction(0, sources=[["key", 0.0]]), "'key' 0.0"),
        ("aqua", prediction(0, sources=[["key", False]]), "'key' False"),
        ("aqua", prediction(0, place=["key", True]), "'key' True"),
        ("shared", header(predictions=[]), "not predicted"),
        ("shared", lambda config: config["predictions"].pop(), "not predicted"),
        ("plain", stored_as_nothing, "not predicted"),
        ("shared", zeros_without_end, "no head_dim"),
    ],
)
def test_no_prediction_is_lost_unnoticed(altered, name, change, message):
    with pytest.raises(FormatError, match=message):
        Compressor.from_pretrained(altered(name, change))


def test_a_loaded_compressor_does_not_change_with_its_file(saved, tmp_path):
    shutil.copytree(saved / "aqua", tmp_path / "c")
    compressor, path = Compressor.from_pretrained(tmp_path / "c"), next((tmp_path / "c").glob("codecs-*"))
    before = compressor.fingerprint
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert compressor.fingerprint == before


@pytest.mark.parametrize("values", [{"head_dim": 64}, {"num_kv_heads": 4}])
def test_every_codec_is_of_the_model(altered, model, values):
    with pytest.raises(FormatError, match="a codec of .* KV heads and head_dim .* for a model of 2 and 32"):
        Compressor.from_pretrained(altered("quanto", fitted_elsewhere(**values)))


@pytest.mark.parametrize("orphan", ["9.key.x", "1.key.predictor.x", "0.key.predictor.weight", "-1.key.x", "x"])
def test_every_tensor_belongs_to_something(altered, orphan):
    folder = altered("plain", header())
    path = next(folder.glob("codecs-*"))
    save_file(load_file(path) | {orphan: torch.zeros(1)}, path)
    signed(folder, header(codecs_sha256=sha256(path.read_bytes())))
    with pytest.raises(FormatError, match="unexpected tensors|belong to no codec"):
        Compressor.from_pretrained(folder)


NUMBERS = [
    {"num_kv_heads": "a", "head_dim": HUGE},
    {"num_kv_heads": [0], "head_dim": HUGE},
    {"num_kv_heads": HUGE, "head_dim": "a"},
    {"num_kv_heads": 10**30, "head_dim": 10**30},
    *({"num_kv_heads": value} for value in (None, True, 0, -2, 2.0, "2", [2], 4097)),
    *({"head_dim": value} for value in (None, True, 0, -32, 32.0, "32", {}, 32769)),
    *({"num_layers": value} for value in (None, True, 2, 3.0, "3", HUGE)),
    *({name: value} for name in ("name", "model_type") for value in (None, 5, {})),
]


@pytest.mark.parametrize("name", ["aqua", "plain"])
@pytest.mark.parametrize("values", NUMBERS, ids=str)
def test_numbers_of_the_model_are_checked_before_they_are_used(altered, name, values):
    with pytest.raises(FormatError, match="|".join(values) + "|layers"):
        Compressor.from_pretrained(altered(name, of_model(**values)))


NAN, INF = float("nan"), float("inf")
WEIGHTS = [None, 5, "abc", [], {}, {"a": 1}, [[]], [5], ["abc"], [{}], [None], [[1.0], []], [[None]], [["a"]],
           [[[1.0]]], [[True]], [[NAN]], [[INF]], [[1.0, -INF]], [[1e300]], [[10**400]]]  # fmt: skip


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: str(weights)[:20])
def test_weights_are_lists_of_finite_numbers(altered, weights):
    with pytest.raises(FormatError, match="weights"):
        Compressor.from_pretrained(altered("plain", of_model(weights=weights)))


@pytest.mark.parametrize("other", [NAN, INF, -INF, 3e38, -3e38])
def test_no_weights_match_every_model(model, other):
    about = describe(model)
    filled = [[other for _ in row] for row in about["weights"]]
    assert difference(about, model) is None
    for weights in (filled, filled[:1], [*about["weights"], [1.0]], [row[:-1] for row in about["weights"]]):
        assert difference(about | {"weights": weights}, model) == "other key or value weights"


@pytest.mark.parametrize(
    "change",
    [
        *(header(codecs_file=name) for name in ("x" * 1000, "x" * 100_000, "", "..", "/", "a\0b", "\ud800")),
        *(header(name=name) for name in (None, 5, ["x"])),
        *(header(notes=notes) for notes in (None, 5, [])),
        *(header(model=about) for about in (None, [], "model", {})),
    ],
)
def test_other_altered_headers_are_refused(altered, change):
    with pytest.raises(FormatError):
        Compressor.from_pretrained(altered("plain", change))


def test_a_folder_that_cannot_be_asked_for_is_refused(tmp_path):
    with pytest.raises(FormatError, match="holds no compressor"):
        Compressor.from_pretrained(tmp_path / ("x" * 1000))


def test_nothing_needs_to_know_how_many_zeros_to_give():
    again = codec_from_config(Nothing(32).config(), {})
    assert again.decode(again.encode(torch.ones(1, 2, 3, 32))).shape == (1, 2, 3, 32)
    with pytest.raises(FormatError, match="head_dim"):
        codec_from_config(Nothing().config(), {})
    with pytest.raises(FormatError, match="unexpected tensors"):
        codec_from_config(Nothing(32).config(), {"x": torch.zeros(1)})


@pytest.mark.parametrize("number", [True, 2.0, "2", 0, -1, 10**11])
def test_sizes_are_whole_numbers(number):
    for check in (check_head_dim, check_num_kv_heads):
        with pytest.raises(DataError, match="is not an integer from 1"):
            check(number)
    assert check_num_kv_heads(None) == 1 and check_num_kv_heads(8) == 8
