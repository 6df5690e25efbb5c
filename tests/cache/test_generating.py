"""``vqkv.compressed``: code that makes its own caches reads compressed ones; and threads that share a model."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, pipeline

import vqkv
from vqkv import CompressedCache, FormatError, calibrate, presets

TOKENS = torch.randint(1, 400, (8, 48), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 20, dtype=torch.int64)
PADDED = MASK.index_put((torch.zeros(5).long(), torch.arange(5)), torch.tensor(0))
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def two(llama):
    """Compressors of 16 and of about 2 bits."""
    return [calibrate(llama, TOKENS, preset, progress=False) for preset in (presets.fp16(), presets.vqllm(2, 16, 8))]


def generated(model, cache=None, rows=2, mask=MASK, **settings):
    prompt = {"input_ids": TOKENS[:rows, :20], "attention_mask": mask[:rows]}
    return model.generate(**prompt | GREEDY | settings, past_key_values=cache).tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3, "rows": 1}, {"mask": PADDED}],
    ids=["greedy", "beams", "prompt-lookup", "padded"],
)  # fmt: skip
def test_generate_reads_what_a_cache_passed_to_it_would(llama, two, settings):
    wanted = generated(llama, two[1].new_cache(llama), **settings)
    with vqkv.compressed(llama, two[1]) as use:
        assert generated(llama, **settings) == wanted
    assert use.cache.report().bits_per_value < 3 and use.cache.get_seq_length() >= 31


def test_only_caches_that_the_model_makes_within_the_block_are_compressed(llama, mini, two):
    wanted, mine = generated(llama), DynamicCache(config=llama.config)
    llama(TOKENS[:1], past_key_values=mine)
    with pytest.raises(ZeroDivisionError), vqkv.compressed(llama, two[1]) as use:
        llama(TOKENS[:1, :1], past_key_values=mine)
        llama(TOKENS[:1], use_cache=False)
        llama(TOKENS[:1], past_key_values=two[0].new_cache(llama))
        1 / 0  # noqa: B018
    assert mine.get_seq_length() == 49 and use.cache is None
    assert generated(llama) == wanted and type(llama(TOKENS[:1], use_cache=True).past_key_values) is DynamicCache
    with pytest.raises(FormatError, match="calibrate"), vqkv.compressed(mini[0], two[0]):
        pass


def test_blocks_nest_and_threads_have_their_own_or_that_which_started_them(llama, two):
    made = lambda: llama(TOKENS[:1]).past_key_values.compressor  # noqa: E731

    def inside(compressor):
        with vqkv.compressed(llama, compressor):
            return {made() for _ in range(20)}

    with vqkv.compressed(llama, two[1]) as use, ThreadPoolExecutor(2) as pool:
        assert inside(two[0]) == {two[0]} and made() is two[1]
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
        thread = threading.Thread(target=model.generate, kwargs=asked)
        thread.start()
        assert "".join(streamer).startswith(made[0]["generated_text"])
        thread.join()
        assert isinstance(use.cache, CompressedCache)


def test_in_place_reads_its_own_tokens_and_evaluate_measures_the_same_within_a_block(llama, two):
    exact, wanted = llama(TOKENS[:1]).logits, vqkv.evaluate(llama, two[1], TOKENS, chunk_size=16)
    with vqkv.compressed(llama, two[1]):
        assert torch.equal(llama(TOKENS[:1]).logits, exact)
        assert vqkv.evaluate(llama, two[1], TOKENS, chunk_size=16) == wanted
    with vqkv.compressed(llama, two[1], in_place=True):
        assert not torch.allclose(llama(TOKENS[:1]).logits, exact)


@pytest.fixture(scope="module")
def higgs(llama):
    return calibrate(llama, TOKENS, presets.higgs(4, recent_window=4), progress=False)


def test_threads_share_a_model(llama, higgs):
    """Between every two layers of an evaluation, another thread generates with a cache of its own and calibrates."""
    expected, wanted = vqkv.evaluate(llama, higgs, TOKENS[:2]), generated(llama, higgs.new_cache(llama), mask=PADDED)
    main = threading.get_ident()

    def another(*_):
        if threading.get_ident() == main:
            assert pool.submit(generated, llama, higgs.new_cache(llama), mask=PADDED).result(60) == wanted
            fitted = pool.submit(calibrate, llama, TOKENS, presets.higgs(4, recent_window=4), progress=False)
            assert fitted.result(60).fingerprint == higgs.fingerprint

    handle = llama.model.layers[1].mlp.register_forward_hook(another)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert vqkv.evaluate(llama, higgs, TOKENS[:2]) == expected
    finally:
        handle.remove()
