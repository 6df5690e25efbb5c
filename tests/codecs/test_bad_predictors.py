"""Predictors as they are stored: bytes, round trips, and an error that says why for whatever is wrong."""

import copy
import math

import pytest
import torch
from predictor_zoo import SMALL, gaussian, small, stream

from vqkv.codecs.predictor_kinds import KINDS, Copy, make_predictor, predictor_from_config
from vqkv.errors import DataError, FormatError, UnknownNameError


def layout_bytes(predictor):
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in predictor.layout().values())


def test_bytes_are_as_derived_by_hand():
    expected = {
        "linear": 2 * (9 * 6 + 6),
        "reduced_rank": 2 * (9 * 3 + 3 * 6 + 6),
        "mlp": 2 * (9 * 12 + 3 * 12 + 12 * 6 + 6),
        "gptq": 6 * 5 + 2 * 2 * 3 * 6 + 2 * 6,  # 9 codes of 4 bits take 5 bytes; groups of 4, 4 and 1 inputs
    }
    for kind, size in expected.items():
        predictor = small(kind)[0]
        assert predictor.side_bytes == layout_bytes(predictor) == size, kind


@pytest.mark.parametrize("kind, mebibytes", [("linear", 162), ("mlp", 540), ("reduced_rank", 68), ("gptq", 43)])
def test_sizes_are_those_published_for_a_3b_model(kind, mebibytes):
    """AQUA-KV's table: 28 layers, K and V 1024 wide. For GPTQ it has 41: scales and zeros of groups of 128 take 2.5 MiB
    beside 40.5 MiB of codes."""
    pairs = [make_predictor(kind, in_features=inputs, out_features=1024) for inputs in (1024, 2048)]
    assert abs(27 * sum(map(layout_bytes, pairs)) / 2**20 - mebibytes) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_predictor_comes_back_bit_for_bit(kind):
    predictor, x, _ = small(kind)
    again = predictor_from_config(predictor.config(), predictor.state_dict())
    assert type(again) is type(predictor) and again.config() == predictor.config()
    expected = predictor(x)
    assert torch.equal(again(x), expected) and expected.dtype == torch.float32
    assert torch.equal(copy.deepcopy(predictor).to("cpu")(x.double()), expected)
    assert torch.equal(predictor(x.view(3, 2, 50, 9)).view(300, 6), expected)
    assert all(tensor.is_contiguous() for tensor in predictor.state_dict().values())


def test_copy_is_the_layer_itself():
    x = gaussian(20, 5)
    predictor = Copy().fit(stream(x, x))
    assert torch.equal(predictor(x.half()), x.half().float())
    assert predictor.state_dict() == {} and predictor.side_bytes == 0
    again = predictor_from_config(predictor.config(), {})
    assert torch.equal(again(x), x)
    with pytest.raises(DataError, match="as wide as y, not 5 and 4"):
        Copy().fit(stream(x, x[:, :4]))
    with pytest.raises(FormatError, match="from 5 to 4"):
        predictor_from_config(predictor.config() | {"out_features": 4}, {})


ALTERED_SETTINGS = [
    {"in_features": 13}, {"in_features": None}, {"in_features": -1}, {"in_features": "9"}, {"out_features": 1 << 60},
    {"in_features": 1 << 20, "out_features": 1 << 20}, {"out_features": 0}, {"out_features": [6]}, {"out_features": 6.},
    {"strength": float("nan")}, {"strength": "high"}, {"strength": -1.0}, {"rank": 0}, {"width": 65}, {"bits": 99},
    {"group_size": 0}, {"seed": -1}, {"epochs": 0}, {"learning_rate": True}, {"unknown": 1}, {"part": "Predictor"},
    {"part": "_Regression"}, {"part": "Fp16"}, {"part": "Nobody"}, {"part": None}, {"in_features": {"part": "Fp16"}},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_altered_files_are_refused(kind):
    predictor = small(kind)[0]
    config, state = predictor.config(), predictor.state_dict()
    for change in ALTERED_SETTINGS:  # a setting that a kind does not have is unknown to it
        with pytest.raises(FormatError):
            predictor_from_config(config | change, state)
    for nothing in (None, [], "Linear", [config]):
        with pytest.raises(FormatError):
            predictor_from_config(nothing, state)
    for name, tensor in state.items():
        others = [{}, {name: tensor[:-1]}, {name: tensor.double()}, {name: None}, {name: tensor, "more": tensor}]
        if tensor.is_floating_point():
            others.append({name: torch.full_like(tensor, float("nan"))})
        for other in others:
            rest = {key: value for key, value in state.items() if key != name}
            with pytest.raises(FormatError):
                predictor_from_config(config, rest | other)
    with pytest.raises(FormatError):
        predictor_from_config(config, None)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_samples_say_what_is_wrong(kind):
    x, y = gaussian(40, 4), gaussian(40, 3)
    nan = x.clone()
    nan[3, 1] = float("nan")
    for samples, message in [
        (stream(nan, y), "1 of 160 values of x are NaN"),
        (stream(x, y / 0), "120 of 120 values of y are NaN or infinite"),
        (lambda: iter([(x, y), (x[:, :2], y)]), "x is 2 wide, not in_features 4"),
        (lambda: iter([(x, y), (x, x)]), "y is 4 wide, not out_features 3"),
        (lambda: iter([]), "no samples"),
        (lambda: iter([(x[:0], y[:0])]), "no samples"),
        (stream(x * 1e-9, y * 1e4), "fp16"),
    ]:
        with pytest.raises(DataError, match=message):
            make_predictor(kind, **SMALL[kind], **({"strength": 1e-9} if kind != "mlp" else {})).fit(samples)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_calls_say_what_is_wrong(kind):
    predictor, x, y = small(kind)
    with pytest.raises(RuntimeError, match="frozen"):
        predictor.fit(stream(x, y))
    fresh = make_predictor(kind)
    assert fresh.state_dict() == {} and fresh.side_bytes == 0
    with pytest.raises(RuntimeError, match="not fitted: call fit"):
        fresh(x)


def test_unknown_kinds_and_settings_are_named():
    with pytest.raises(UnknownNameError, match="unknown predictor 'liner'. Did you mean 'linear'"):
        make_predictor("liner")
    with pytest.raises(UnknownNameError, match="setting of the gptq predictor 'bit'. Did you mean 'bits'"):
        make_predictor("gptq", bit=4)
