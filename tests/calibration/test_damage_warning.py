"""Warnings about what a preset loses: true numbers, and remedies that hold."""

import re
import warnings

import pytest
import torch

import vqkv
from vqkv import presets
from vqkv.calibration.calibrate import _hardly_pays
from vqkv.study.injection import inject


def calibrated(model, tokens, preset):
    """Bits of a packed value of a cache that is filled, and what ``calibrate`` warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compressor = vqkv.calibrate(model, tokens, preset, progress=False)
    cache = compressor.new_cache(model)
    with torch.no_grad():
        model(tokens[:1], past_key_values=cache)
    return cache.report().bits_per_value, [str(w.message) for w in said if "of the variance" in str(w.message)]


@pytest.fixture(scope="module")
def biased(llama_folder):
    """A model with key biases of norms 520 and 346 in its end layers, as Qwen2.5 has, and tokens."""
    bias = torch.zeros(3, 2, 32)
    for layer, norm in ((0, 520.0), (2, 346.0)):
        drawn = torch.randn(2, 32, generator=torch.Generator().manual_seed(layer)).pow(3)
        bias[layer] = drawn / drawn.norm() * norm
    tokens = torch.randint(1, 400, (8, 256), generator=torch.Generator().manual_seed(0))
    return inject(vqkv.load_model(llama_folder)[0], key_bias=bias), tokens


@pytest.mark.parametrize("preset", [presets.quanto(4), presets.turboquant(3)], ids=lambda p: p.name)
def test_the_remedy_of_a_destroyed_cache_survives_at_no_more_bits(biased, preset):
    bits, (message,) = calibrated(*biased, preset)
    assert "loses 100% of the variance" in message
    remedies = re.findall(r"(best|higgs)\(([\d.]+)\)", message)
    assert len(remedies) == 2
    for name, value in remedies:
        new_bits, said = calibrated(*biased, presets.make(name, bits=int(value) if name == "higgs" else float(value)))
        assert not said and new_bits <= bits, (name, new_bits, bits, said)


def test_fp16_loses_nothing_of_what_is_constant(biased):
    model, text = biased
    constant = inject(model, values=torch.tensor(1e-6), key_bias=torch.full((3, 2, 32), 3000.0))
    assert not calibrated(constant, text, presets.fp16())[1]


def test_the_two_reasons_for_falling_back_are_distinguished(biased):
    model, text = biased
    plan = [{"value": type("Role", (), {"sources": ("V-1",)})}] * 6
    assert "calibrate on 512 or more" in _hardly_pays(model, text[:1], plan, {})
    assert "0 of 6" in (why := _hardly_pays(model, text, plan, {})) and "calibrate on" not in why
