"""Predictors as they are stored: bytes, round trips, and an error that says why for whatever is wrong."""

import copy
import math

import pytest
import torch
from predictor_zoo import SMALL, gaussian, small, stream

from vqkv.codecs.predictor_kinds import KINDS, Copy, make_predictor
from vqkv.codecs.stage import codec_from_config
from vqkv.errors import DataError


def layout_bytes(predictor, inputs, outputs):
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in predictor.layout(inputs, outputs).values())


def test_bytes_are_as_derived_by_hand():
    expected = {
        "linear": 2 * (9 * 6 + 6),
        "reduced_rank": 2 * (9 * 3 + 3 * 6 + 6),
        "mlp": 2 * (9 * 12 + 3 * 12 + 12 * 6 + 6),
        "gptq": 6 * 5 + 2 * 2 * 3 * 6 + 2 * 6,  # 9 codes of 4 bits take 5 bytes; groups of 4, 4 and 1 inputs
    }
    for kind, size in expected.items():
        predictor = small(kind)[0]
        assert predictor.side_bytes == layout_bytes(predictor, 9, 6) == size, kind


@pytest.mark.parametrize("kind, mebibytes", [("linear", 162), ("mlp", 540), ("reduced_rank", 68), ("gptq", 43)])
def test_sizes_are_those_published_for_a_3b_model(kind, mebibytes):
    """AQUA-KV's table: 28 layers, K and V 1024 wide. For GPTQ it has 41: scales and zeros of groups of 128 take 2.5 MiB
    beside 40.5 MiB of codes."""
    found = sum(layout_bytes(make_predictor(kind), inputs, 1024) for inputs in (1024, 2048))
    assert abs(27 * found / 2**20 - mebibytes) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_predictor_comes_back_bit_for_bit(kind):
    predictor, x, _ = small(kind)
    again = codec_from_config(predictor.config(), predictor.state_dict())
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
    again = codec_from_config(predictor.config(), {})
    assert torch.equal(again(x), x)


BAD_SETTINGS = [
    *[("linear", "strength", value) for value in (float("nan"), "high", -1.0)], ("reduced_rank", "rank", 0),
    ("mlp", "width", 65), ("mlp", "seed", -1), ("mlp", "epochs", 0), ("mlp", "learning_rate", True),
    ("gptq", "bits", 99), ("gptq", "group_size", 0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value"), BAD_SETTINGS)
def test_settings_beyond_reason_are_named(kind, name, value):
    with pytest.raises(DataError, match=name):
        make_predictor(kind, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_weights_beyond_fp16_are_refused(kind):
    x, y = gaussian(40, 4), gaussian(40, 3)
    with pytest.raises(DataError, match="fp16"):
        fresh = make_predictor(kind, **SMALL[kind], **({"strength": 1e-9} if kind != "mlp" else {}))
        fresh.fit(stream(x * 1e-9, y * 1e4))
