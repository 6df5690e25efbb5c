"""Captured keys and values on disk: whose they are, what fails, and that memory does not grow with the tokens."""

import copy
import resource

import few_presets
import forked
import pytest
import torch
from safetensors import SafetensorError

from vqkv import DataError, calibrate, load_model, presets
from vqkv.calibration.captured import CapturedTokens

TOKENS = torch.randint(1, 4096, (6, 80), generator=torch.Generator().manual_seed(0))


def test_captured_tokens_serve_several_presets_and_are_checked(llama, tmp_path):
    with CapturedTokens(llama, TOKENS, batch_size=4, folder=tmp_path, progress=False) as captured:
        given, own = (
            calibrate(llama, TOKENS, presets.aqua(), batch_size=4, progress=False, captured=c) for c in (captured, None)
        )
        for place, prediction in given.predictions.items():
            assert torch.equal(prediction.predictor.weight, own.predictions[place].predictor.weight)
        with pytest.raises(DataError, match="captured holds other tokens"):
            calibrate(llama, TOKENS[:4], presets.aqua(), progress=False, captured=captured)
        with pytest.raises(DataError, match="other side of RoPE"):
            calibrate(llama, TOKENS, presets.aqua(pre_rope=False), progress=False, captured=captured)
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_captured_tokens_keep_what_they_were_made_from(llama, tmp_path):
    tokens = TOKENS.clone()
    with CapturedTokens(llama, tokens, batch_size=2, folder=tmp_path, progress=False) as captured:
        assert calibrate(llama, tokens, presets.aqua(), progress=False, captured=captured).notes["batch_size"] == 2
        other = copy.deepcopy(llama).bfloat16()
        with pytest.raises(DataError, match="other weights"):
            calibrate(other, TOKENS, presets.aqua(), progress=False, captured=captured)
        with torch.no_grad():
            other = copy.deepcopy(llama)
            other.model.layers[1].mlp.up_proj.weight.mul_(2)  # keys of layers above depend on it
        with pytest.raises(DataError, match="other weights"):
            calibrate(other, TOKENS, presets.aqua(), progress=False, captured=captured)
        tokens.fill_(3)
        with pytest.raises(DataError, match="captured holds other tokens"):
            calibrate(llama, tokens, presets.aqua(), progress=False, captured=captured)


def test_reconstructions_go_where_the_captured_tokens_are(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "small"))
    with CapturedTokens(llama, TOKENS, folder=tmp_path, progress=False) as captured:
        calibrate(llama, TOKENS, presets.aqua(), progress=False, captured=captured)  # the small one does not exist


def test_an_interrupted_capture_leaves_nothing(llama, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("vqkv.calibration.captured.capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CapturedTokens(llama, TOKENS, folder=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_names_the_folder(llama, tmp_path, monkeypatch):
    def full(*args):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("vqkv.calibration.captured.save_file", full)
    with pytest.raises(DataError, match="cannot write to .* No space left on device. Use fewer tokens"):
        calibrate(llama, TOKENS, presets.aqua(), progress=False)


def peaks(folder: str, name: str) -> list[float]:
    """MiB that this process has held at most, after a calibration on 16 sequences and after one on 160."""
    torch.set_num_threads(1)
    model, found = load_model(folder)[0], []
    preset = presets.aqua() if name == "aqua" else few_presets.PRESETS[name]
    for num_seqs in (16, 160):
        tokens = few_presets.text(num_seqs, 0, seq_len=256)
        calibrate(model, tokens, preset, batch_size=4, progress=False)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return found


@pytest.mark.parametrize("name", ["aqua", "vqllm"])
def test_memory_does_not_grow_with_the_tokens(llama, name):
    """Keys and values of 144 x 256 more tokens take 54 MiB in fp32, which would show."""
    short, long = forked.call(peaks, llama.config._name_or_path, name)
    assert long - short < 10  # MiB: allocators keep some of what batches leave
