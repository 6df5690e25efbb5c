"""One preset, from calibration to generated text, step by step: how a cached key becomes bytes and comes back."""

import torch

import vqkv
from vqkv import presets


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
