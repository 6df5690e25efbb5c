"""What transformers' own tests ask of a cache: copies, padding that nobody needs, iteration, export; and what people
try with one that they should not."""

import copy
import pickle

import pytest
import small_models
import torch
from transformers import DynamicCache

from vqkv import DataError, calibrate, presets

TOKENS = torch.randint(1, 4096, (16, 48), generator=torch.Generator().manual_seed(0))
PLAIN = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PRESETS = {"higgs": presets.higgs(4, 32, 2, 5), "aqua": presets.aqua(presets.higgs(4, 32), recent_window=5)}


@pytest.fixture(scope="module", params=PRESETS)
def compressor(request, llama):
    return calibrate(llama, TOKENS, PRESETS[request.param], progress=False)


@torch.inference_mode()
def test_a_prompt_is_cached_once_and_copied_for_each_question(llama, compressor):
    prompt, questions = TOKENS[:1, :20], TOKENS[1:4, :6]
    cached = compressor.new_cache(llama)
    llama(prompt, past_key_values=cached)
    for question in questions:
        rows = torch.cat([prompt, question[None]], dim=1)
        out = llama.generate(rows, past_key_values=copy.deepcopy(cached), **PLAIN)
        other = compressor.new_cache(llama)
        llama(prompt, past_key_values=other)
        assert torch.equal(out, llama.generate(rows, past_key_values=other, **PLAIN))
    assert cached.get_seq_length() == 20


@torch.inference_mode()
def test_keys_and_values_are_read_layer_by_layer(llama, compressor):
    """As attention reads them: near the exact ones, padding as zeros, and nothing is stored of it."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    cache, exact = compressor.new_cache(llama), DynamicCache(config=llama.config)
    assert [layer.decoded() for layer in cache.layers] == [None] * 3
    for each in (cache, exact):
        llama(TOKENS[:2, :40], attention_mask=mask, past_key_values=each)
    before = cache.report()
    for (keys, values, _), theirs in zip(cache, exact.layers, strict=True):
        for x, y in ((keys, theirs.keys), (values, theirs.values)):
            assert x.shape == y.shape and x.dtype == y.dtype and not x[0, :, :5].any()
            assert (x[1] - y[1]).norm() < 0.2 * y[1].norm()
    assert cache.report() == before


def test_a_cast_of_the_model_is_noticed_at_once(tmp_path):
    model = small_models.load("llama", tmp_path)
    cache = calibrate(model, TOKENS, PRESETS["higgs"], progress=False).new_cache(model)
    model(TOKENS[:1, :20], past_key_values=cache)
    model.to(torch.bfloat16)
    with pytest.raises(DataError, match="the model is torch.bfloat16 now, this cache was made for torch.float32"):
        model(TOKENS[:1, 20:], past_key_values=cache)


def test_what_is_not_a_cache_or_not_a_file_says_what_is(llama, compressor):
    with pytest.raises(DataError, match=r"cache.save\(path\)"):
        pickle.dumps(compressor.new_cache(llama))
    for use in (llama, llama.generate):
        with pytest.raises(DataError, match=r"past_key_values=compressor.new_cache\(model\)"):
            use(TOKENS[:1, :4], past_key_values=compressor)
