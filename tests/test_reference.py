"""The bundled models, their tokenizer and the script that trains them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import vqkv
from vqkv.models import BUNDLED, describe
from vqkv.reference import train
from vqkv.reference.data import TOKENIZER_DIR, token_bytes


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_are_what_the_study_needs(name):
    model, tokenizer = vqkv.load_model(name)
    about, config = describe(model), model.config
    assert about["num_layers"] >= 6 and about["head_dim"] == 64 and config.max_position_embeddings >= 1024
    assert (BUNDLED[name] / "model.safetensors").stat().st_size <= 32e6
    if name == "vqkv/llama-mini":
        assert config.num_attention_heads >= 3 * about["num_kv_heads"] >= 6
        assert config.hidden_size >= 3 * about["num_kv_heads"] * 64  # or the predictors would be exact by algebra
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    card = (BUNDLED[name] / "README.md").read_text()
    assert f"{log['tokens']:,} in" in card and f"**{log['held_out'][-1][1]:.3f}**" in card
    assert sum(run["tokens"] for run in log["runs"]) == log["tokens"]
    text = "def add(a, b):\n    return a + b\n\n" + "# é日本\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_learned_their_text(name):
    """Far from chance (ln 4096 = 8.3 nats a token), and as good as the card says to within sampling."""
    model, tokenizer = vqkv.load_model(name)
    tokens = vqkv.load_corpus("python-stdlib", tokenizer, "test", seq_len=256, num_seqs=8)
    with torch.inference_mode():
        nll = vqkv.metrics.token_nll(model(tokens).logits[:, :-1], tokens[:, 1:]).sum().item()
    bits = nll / np.log(2) / token_bytes(tokenizer)[tokens[:, 1:]].sum()
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    assert bits < 1.35 * log["held_out"][-1][1] < 3.3


def test_training_stops_releases_and_goes_on_without_a_seam(tmp_path, monkeypatch):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    ids = np.array(tokenizer("x = 1\nprint(x)\n" * 400)["input_ids"], dtype=np.uint16)
    for split in ("train", "test"):
        (tmp_path / f"{split}.bin").write_bytes(ids.tobytes())
    monkeypatch.setitem(train.SCHEDULES, "cpu", [(0, 2, 64)])
    monkeypatch.setattr(train.Trainer, "bits_per_byte", lambda self: 1.0)
    folders = {"data": tmp_path, "state": tmp_path / "state", "release": tmp_path / "out"}
    first = train.Trainer("gpt2-mini", "cpu", **folders)
    first.run(minutes=1e9, tokens=5 * 128)
    assert first.log["tokens"] == 640 and (tmp_path / "out" / "README.md").exists()
    second = train.Trainer("gpt2-mini", "cpu", **folders)
    assert second.log["tokens"] == 512  # the state before the decay, which takes the last fifth
    weights = load_file(tmp_path / "state" / "model.safetensors")
    assert torch.equal(second.model.transformer.wte.weight, weights["transformer.wte.weight"])
    moments = second.optimizers[0].state[second.model.transformer.wte.weight]
    assert moments["step"] == 4 and moments["exp_avg"].abs().sum() > 0
    second.run(minutes=1e9, tokens=5 * 128)
    assert second.log["tokens"] == 512 + 640
    assert [run["tokens"] for run in second.log["runs"]] == [512, 640]
