"""Bad input gets an error that names the thing and the remedy, and nothing already written is lost."""

import copy
import pickle
import shutil

import pytest
import torch

from vqkv import Compressor, DataError, FormatError, UnknownNameError, calibrate, load_corpus, load_model, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.exact import Fp16
from vqkv.data.corpus import documents

TOKENS = torch.randint(1, 4096, (4, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TOKENS, presets.vqllm(2, 16, 16), progress=False)


def test_copies_of_a_cache_go_their_own_ways_and_share_the_codebooks(llama, compressor):
    cache = compressor.new_cache(llama)
    with torch.inference_mode():
        llama(TOKENS[:, :30], past_key_values=cache)
        twin = copy.deepcopy(cache)
        both = [llama(TOKENS[:, 30:], past_key_values=c).logits for c in (cache, twin)]
    assert torch.equal(*both) and twin.compressor is compressor
    assert tensor_bytes(cache, twin) == 2 * cache.report().cache_bytes + tensor_bytes(compressor)
    assert pickle.dumps(llama.base_model._forward_pre_hooks)  # the hooks must not stop a model from being saved


def test_no_graph_is_kept(llama):
    preset = presets.Preset("exact", Fp16, Fp16, sink_tokens=2, recent_window=4)
    cache = calibrate(llama, TOKENS, preset, progress=False).new_cache(llama)
    llama(TOKENS, past_key_values=cache)
    assert not any(part.requires_grad for layer in cache.layers for s in layer.stores for part in (s.sinks, s.window))


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


def test_local_text_has_two_splits_and_many_windows(tmp_path, tokenizer):
    (tmp_path / "long.txt").write_text("".join(f"line {i} of a long file\n" for i in range(40_000)))
    name = str(tmp_path / "long.txt")
    assert not set(documents(name, "train")) & set(documents(name, "test"))
    assert load_corpus(name, tokenizer, "train", 64, 30).shape == load_corpus(name, tokenizer, "train", 64, 30, 1).shape
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    (tmp_path / "utf16.txt").write_bytes("some text".encode("utf-16"))
    for name, error, message in (
        (str(tmp_path / "bad.jsonl"), DataError, "line 2"),
        (str(tmp_path / "utf16.txt"), DataError, "not UTF-8"),
        ("", UnknownNameError, ""),
    ):
        with pytest.raises(error, match=message):
            load_corpus(name, tokenizer)


@pytest.mark.parametrize("setting", ["flush_block", "pre_rope"])
def test_arguments_of_presets_are_checked(setting):
    with pytest.raises(DataError, match=f"{setting} 0"):
        presets.Preset("x", Fp16, Fp16, **{setting: 0})
