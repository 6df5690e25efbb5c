"""Models that a device map spreads out: here over main memory and a disk, the two places that every machine has."""

import few_presets
import pytest
import torch

from vqkv import DataError, calibrate, evaluate, load_model, presets
from vqkv.calibration.finetune import finetune
from vqkv.models.capture import capture
from vqkv.models.load import describe, fingerprint, layer_devices

PLACES = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def spread(llama_folder, tmp_path_factory):
    model, _ = load_model(llama_folder, device=PLACES, offload_folder=str(tmp_path_factory.mktemp("offload")))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    return model


def test_it_is_the_same_model(llama, spread):
    assert describe(spread) == describe(llama) and fingerprint(spread) == fingerprint(llama)
    assert layer_devices(spread) == [torch.device("cpu")] * 3 == layer_devices(llama)
    for mine, theirs in zip(
        capture(spread, few_presets.text(2, 0)), capture(llama, few_presets.text(2, 0)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("preset", [presets.vqllm(2, 16, 8), presets.aqua("higgs", recent_window=0)])
@pytest.mark.parametrize("protocol", ["in_place", "chunked", "snapshot"])
def test_calibrated_and_evaluated_alike(llama, spread, preset, protocol):
    rows = []
    for model in (llama, spread):
        compressor = calibrate(model, few_presets.text(8, 0), preset, progress=False)
        rows.append((compressor.fingerprint, evaluate(model, compressor, few_presets.text(2, 1), protocol)))
    assert rows[0] == rows[1]


def test_generation(llama, spread):
    compressor = calibrate(llama, few_presets.text(8, 0), presets.vqllm(2, 16, 8), progress=False)
    prompt = few_presets.text(1, 2)
    made = [
        model.generate(prompt, past_key_values=compressor.new_cache(model), max_new_tokens=8, do_sample=False)
        for model in (llama, spread)
    ]
    assert torch.equal(*made)


def test_weights_that_are_elsewhere_cannot_be_trained(spread):
    with pytest.raises(DataError, match="not in memory"):
        finetune(spread, few_presets.text(8, 0), None, batch_size=4)


def test_auto(llama_folder, llama):
    model, _ = load_model(llama_folder, device="auto")
    assert fingerprint(model) == fingerprint(llama) and model.dtype is torch.float32
