"""Bad input gets an error that names the thing and the remedy, and nothing already written is lost."""

import copy
import json
import pickle
import shutil

import pytest
import torch

from vqkv import (
    Compressor,
    DataError,
    FormatError,
    UnknownNameError,
    calibrate,
    evaluate,
    load_corpus,
    load_model,
    presets,
)
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.exact import Fp16
from vqkv.data.corpus import documents

TOKENS = torch.randint(1, 4096, (4, 48), generator=torch.Generator().manual_seed(0))
SMALL = {"num_quantizers": 2, "codebook_size": 16, "group_size": 16}


@pytest.fixture
def model(llama_folder):
    return load_model(llama_folder)[0]


@pytest.fixture
def compressor(model):
    return calibrate(model, TOKENS, presets.vqllm(**SMALL), progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 48}, "chunk_size 48 .* from 1 to 47"),  # would read no packed history and look perfect
        ({"batch_size": 0}, "batch_size 0"),
        ({"protocol": "snapshot", "prompt_len": 47}, "prompt_len 47"),
        ({"answers": torch.zeros(4, 48, dtype=torch.bool)}, "nothing is left to score"),
        ({"tokens": TOKENS.int()}, "int64"),
        ({"tokens": TOKENS + 4096}, "the model knows 0 to 4095"),
    ],
)
def test_evaluate_refuses_what_it_cannot_measure(model, compressor, arguments, message):
    with pytest.raises(DataError, match=message):
        evaluate(model, compressor, **({"tokens": TOKENS} | arguments))


def test_attention_error_does_not_depend_on_the_batch_size(model, compressor):
    rows = [evaluate(model, compressor, TOKENS, batch_size=size)["attention_mse"] for size in (1, 3, 4)]
    assert rows == pytest.approx([rows[0]] * 3, rel=1e-3)


def test_copies_of_a_cache_go_their_own_ways_and_share_the_codebooks(model, compressor):
    cache = compressor.new_cache(model)
    with torch.inference_mode():
        model(TOKENS[:, :30], past_key_values=cache)
        twin = copy.deepcopy(cache)
        both = [model(TOKENS[:, 30:], past_key_values=c).logits for c in (cache, twin)]
    assert torch.equal(*both) and twin.compressor is compressor
    assert tensor_bytes(cache, twin) == 2 * cache.report().cache_bytes + tensor_bytes(compressor)
    assert pickle.dumps(model.base_model._forward_pre_hooks)  # the hooks must not stop a model from being saved


def test_no_graph_is_kept(model):
    preset = presets.Preset("exact", Fp16, Fp16, sink_tokens=2, recent_window=4)
    cache = calibrate(model, TOKENS, preset, progress=False).new_cache(model)
    model(TOKENS, past_key_values=cache)
    assert not any(part.requires_grad for layer in cache.layers for s in layer.stores for part in (s.sinks, s.window))


def test_a_compressor_is_never_half_written(compressor, tmp_path, monkeypatch):
    compressor.save_pretrained(tmp_path / "c")
    other = Compressor("other", compressor.codecs[:1], compressor.settings, compressor.model)
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(tmp_path / "c")
    monkeypatch.undo()
    assert Compressor.from_pretrained(tmp_path / "c").name == "vqllm"
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="is a file"):
        compressor.save_pretrained(tmp_path / "file")


def test_models_that_cannot_be_loaded(llama_folder, tmp_path):
    for name, damage in (
        ("cut", lambda f: (f / "model.safetensors").write_bytes(b"12345678")),
        ("deeper", _one_layer_more),
    ):
        shutil.copytree(llama_folder, tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(FormatError, match="no model that can be loaded"):
            load_model(str(tmp_path / name))
    with pytest.raises(FormatError, match="'tpu'"):
        load_model(llama_folder, device="tpu")
    assert json.loads((tmp_path / "deeper" / "config.json").read_text())["num_hidden_layers"] == 4


def _one_layer_more(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))


def test_local_text_has_two_splits_and_many_windows(tmp_path):
    tokenizer = load_model("vqkv/gpt2-mini")[1]
    (tmp_path / "long.txt").write_text("".join(f"line {i} of a long file\n" for i in range(40_000)))
    name = str(tmp_path / "long.txt")
    assert not set(documents(name, "train")) & set(documents(name, "test"))
    assert load_corpus(name, tokenizer, "train", 64, 30).shape == load_corpus(name, tokenizer, "train", 64, 30, 1).shape
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        load_corpus(str(tmp_path / "bad.jsonl"), tokenizer)
    (tmp_path / "utf16.txt").write_bytes("some text".encode("utf-16"))
    with pytest.raises(DataError, match="not UTF-8"):
        load_corpus(str(tmp_path / "utf16.txt"), tokenizer)
    with pytest.raises(UnknownNameError):
        load_corpus("", tokenizer)


def test_arguments_of_presets_are_checked():
    with pytest.raises(DataError, match="flush_block 0"):
        presets.Preset("x", Fp16, Fp16, flush_block=0)
    with pytest.raises(DataError, match="pre_rope 0"):
        presets.Preset("x", Fp16, Fp16, pre_rope=0)
