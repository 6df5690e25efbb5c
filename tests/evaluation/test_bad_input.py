"""Bad input gets an error that names the thing and the remedy, and nothing already written is lost."""

import shutil

import pytest
import torch

from vqkv import Compressor, FormatError, calibrate, load_model, presets

TOKENS = torch.randint(1, 4096, (4, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TOKENS, presets.vqllm(2, 16, 16), progress=False)


def test_a_compressor_is_never_half_written(compressor, tmp_path, monkeypatch):
    compressor.save_pretrained(tmp_path / "c")
    other = Compressor("other", compressor.codecs[:1], compressor.settings, compressor.model)
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(tmp_path / "c")
    monkeypatch.undo()
    assert Compressor.from_pretrained(tmp_path / "c").name == "vqllm"


def test_models_that_cannot_be_loaded(llama_folder, tmp_path):
    for name in ("cut", "deeper"):
        shutil.copytree(llama_folder, tmp_path / name)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"12345678")
    config = tmp_path / "deeper" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    for name in ("cut", "deeper"):
        with pytest.raises(FormatError, match="no model that can be loaded"):
            load_model(str(tmp_path / name))
    with pytest.raises(FormatError, match="'tpu'"):
        load_model(llama_folder, device="tpu")
