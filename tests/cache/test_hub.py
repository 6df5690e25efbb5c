"""Compressors are shared as models are: a card, a folder or a name on the hub."""

from shutil import copytree
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard

from vqkv import Compressor, FormatError, calibrate, evaluate, presets

TOKENS = torch.randint(1, 400, (8, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TOKENS, presets.vqllm(2, 16, 8), progress=False)


def test_the_card_names_model_text_bits_and_losses(llama, compressor, tmp_path):
    compressor.save_pretrained(tmp_path)
    assert "were not measured" in (tmp_path / "README.md").read_text()
    compressor.notes |= {"corpus": "random tokens", "measured": evaluate(llama, compressor, TOKENS, chunk_size=16)}
    compressor.save_pretrained(tmp_path)
    card, row = ModelCard.load(tmp_path / "README.md"), Compressor.from_pretrained(tmp_path).notes["measured"]
    bits = "| bits a value, without side information | 1.5 |"
    for part in ("random tokens", "384 tokens", "num_quantizers=2", bits, "nats", f"| {row['kl_mean']:.4g} |"):
        assert part in card.text, part
    assert card.data.library_name == "vqkv"


def test_push_and_pull(compressor, tmp_path, monkeypatch):
    """The hub itself is out of reach: its client's calls are made on a folder."""

    def upload_folder(repo_id, folder_path, token):
        copytree(folder_path, tmp_path / repo_id)
        return SimpleNamespace(commit_url=f"https://hub/{token}")

    monkeypatch.setattr("vqkv.cache.compressor.create_repo", lambda repo_id, **_: None)
    monkeypatch.setattr("vqkv.cache.compressor.upload_folder", upload_folder)
    monkeypatch.setattr("vqkv.cache.compressor.hf_hub_download", lambda name, file, **_: tmp_path / name / file)
    assert compressor.push_to_hub("me/mine", token="secret") == "https://hub/secret"
    assert sorted(path.name for path in (tmp_path / "me/mine").iterdir()) == ["README.md", "compressor.safetensors"]
    assert Compressor.from_pretrained("me/mine").fingerprint == compressor.fingerprint


@pytest.mark.parametrize("name", ["nobody/nothing", "a/b/c"])
def test_a_name_that_is_nowhere(name):
    with pytest.raises(FormatError, match="is no folder, and not on the hub .*save_pretrained"):
        Compressor.from_pretrained(name)
