"""``vqkv.compressed``: code that makes its own caches reads compressed ones, and only within the block."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, pipeline

import vqkv
from vqkv import CompressedCache, FormatError, calibrate, presets

TOKENS = torch.randint(1, 400, (8, 48), generator=torch.Generator().manual_seed(0))
PROMPT = {"input_ids": TOKENS[:2, :20], "attention_mask": torch.ones(2, 20, dtype=torch.int64)}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def two(llama):
    """Compressors of 16 and of about 2 bits."""
    return [calibrate(llama, TOKENS, preset, progress=False) for preset in (presets.fp16(), presets.vqllm(2, 16, 8))]


def generated(model, cache=None, **settings):
    return model.generate(**PROMPT | GREEDY | settings, past_key_values=cache).tolist()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate_reads_what_a_cache_passed_to_it_would(llama, two, settings):
    prompt = {name: x[:1] for name, x in PROMPT.items()} if "prompt_lookup_num_tokens" in settings else PROMPT
    wanted = generated(llama, two[1].new_cache(llama), **prompt | settings)
    with vqkv.compressed(llama, two[1]) as use:
        assert generated(llama, **prompt | settings) == wanted
    assert use.cache.report().bits_per_value < 3 and use.cache.get_seq_length() >= 31


def test_a_padded_batch(llama, two):
    padded = PROMPT | {"attention_mask": torch.ones(2, 20, dtype=torch.int64)}
    padded["attention_mask"][0, :5] = 0
    wanted = generated(llama, two[1].new_cache(llama), **padded)
    with vqkv.compressed(llama, two[1]):
        assert generated(llama, **padded) == wanted


def test_outside_and_after_an_error_the_model_is_as_before(llama, two):
    wanted = generated(llama)
    with pytest.raises(ZeroDivisionError), vqkv.compressed(llama, two[1]):
        1 / 0  # noqa: B018
    assert generated(llama) == wanted
    assert type(llama(TOKENS[:1], use_cache=True).past_key_values) is DynamicCache


def test_caches_that_the_caller_passes_stay(llama, two):
    mine = DynamicCache(config=llama.config)
    llama(TOKENS[:1], past_key_values=mine)
    with vqkv.compressed(llama, two[1]) as use:
        llama(TOKENS[:1, :1], past_key_values=mine)
        llama(TOKENS[:1], use_cache=False)
        llama(TOKENS[:1], past_key_values=two[0].new_cache(llama))
    assert mine.get_seq_length() == 49 and use.cache is None


def test_blocks_nest(llama, two):
    made = lambda: llama(TOKENS[:1]).past_key_values.compressor  # noqa: E731
    with vqkv.compressed(llama, two[0]):
        with vqkv.compressed(llama, two[1]):
            assert made() is two[1]
        assert made() is two[0]


def test_threads_have_their_own_blocks_and_see_those_that_started_them(llama, two):
    def inside(compressor):
        with vqkv.compressed(llama, compressor):
            return {llama(TOKENS[:1]).past_key_values.compressor for _ in range(20)}

    with vqkv.compressed(llama, two[1]) as use, ThreadPoolExecutor(2) as pool:
        assert [*pool.map(inside, two)] == [{two[0]}, {two[1]}]
        pool.submit(llama, TOKENS[:1]).result(60)
        assert use.cache.get_seq_length() == 48


def test_a_pipeline_and_a_streamer(mini):
    model, tokenizer = mini
    text = vqkv.load_corpus("python", tokenizer, "train", 64, 4, 0)
    compressor = calibrate(model, text, presets.quanto(), progress=False)
    with vqkv.compressed(model, compressor) as use:
        made = pipeline("text-generation", model=model, tokenizer=tokenizer)("def main(", **GREEDY)
        assert isinstance(use.cache, CompressedCache) and made[0]["generated_text"].startswith("def main(")
        streamer = TextIteratorStreamer(tokenizer)
        use.cache = None
        asked = tokenizer("def main(", return_tensors="pt") | GREEDY | {"streamer": streamer}
        thread = Thread(target=model.generate, kwargs=asked)
        thread.start()
        assert "".join(streamer).startswith(made[0]["generated_text"])
        thread.join()
        assert isinstance(use.cache, CompressedCache)


def test_in_place_reads_its_own_tokens_compressed(llama, two):
    exact = llama(TOKENS[:1]).logits
    with vqkv.compressed(llama, two[1]):
        assert torch.equal(llama(TOKENS[:1]).logits, exact)
    with vqkv.compressed(llama, two[1], in_place=True):
        assert not torch.allclose(llama(TOKENS[:1]).logits, exact)


def test_a_compressor_of_another_model_is_refused(llama, mini, two):
    with pytest.raises(FormatError, match="calibrate"), vqkv.compressed(mini[0], two[0]):
        pass


def test_evaluate_measures_the_same_within_a_block(llama, two):
    wanted = vqkv.evaluate(llama, two[1], TOKENS, chunk_size=16)
    with vqkv.compressed(llama, two[1]):
        assert vqkv.evaluate(llama, two[1], TOKENS, chunk_size=16) == wanted
