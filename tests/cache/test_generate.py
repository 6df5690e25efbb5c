"""What transformers does with a cache that is given to it, or that it makes within ``vqkv.compressed``; threads."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import small_models
import torch
from strategies import PLAIN, exact
from transformers import DynamicCache, TextIteratorStreamer, pipeline

import vqkv
from vqkv import CompressedCache, DataError, FormatError, calibrate, presets
from vqkv.codecs.pipeline import Codec

TOKENS = torch.randint(1, 4096, (8, 48), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 20, dtype=torch.int64)
PADDED = MASK.index_put((torch.zeros(5).long(), torch.arange(5)), torch.tensor(0))
HIGGS = presets.higgs(4, 32, sink_tokens=2, recent_window=5)


model = small_models.fixture("gpt2", "qwen3")
any_caller = small_models.fixture("gpt2", "qwen3", "opt")  # OPT calls its decoder past the base model


@pytest.fixture(scope="module")
def higgs(llama):
    return calibrate(llama, TOKENS, HIGGS, progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["sampling", "beams", "sampled-beams", "prompt-lookup", "penalties"],
)
def test_every_way_of_decoding_equals_an_uncompressed_cache(model, options):
    """Stored without loss, a cache changes no choice: all that differs is how it is reordered, cropped and repeated."""
    rows = TOKENS[:1, :20].repeat(1, 2) if "prompt_lookup_num_tokens" in options else TOKENS[:2, :20]
    results = []
    for cache in (DynamicCache(), exact(model).new_cache(model)):
        torch.manual_seed(1)
        results.append(model.generate(rows, past_key_values=cache, **PLAIN | options))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", sorted(small_models.SLIDING))
def test_guesses_are_taken_back_past_a_sliding_window(name, tmp_path):
    """As ``DynamicCache``: the greedy text, and no more than the window is held, be guesses recorded or not."""
    model, rows, cache = small_models.sliding(name, tmp_path), TOKENS[:1, :8].repeat(1, 4), None
    expected = model.generate(rows, **PLAIN | {"max_new_tokens": 24})
    for guesses in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        cache = exact(model, sink_tokens=2, recent_window=5).new_cache(model)
        out = model.generate(rows, past_key_values=cache, **PLAIN | {"max_new_tokens": 24} | guesses)
        assert torch.equal(out, expected)
        held = {sum(layer.stores[0].parts) for layer in cache.compressed if layer.is_sliding}
        assert cache.get_seq_length() == 55 and held == {9}
    model.generate(out, past_key_values=cache, **PLAIN)
    assert {sum(layer.stores[0].parts) for layer in cache.compressed if layer.is_sliding} == {10}


def test_generate_with_left_padding_equals_the_rows_alone(any_caller):
    model = any_caller
    compressor = calibrate(model, TOKENS, HIGGS, progress=False)
    rows = [TOKENS[0, :9], TOKENS[1, :20], TOKENS[2, :14]]
    padded = torch.stack([torch.cat([torch.zeros(20 - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.arange(20) >= 20 - len(row) for row in rows]).long()
    cache = compressor.new_cache(model)
    together = model.generate(padded, attention_mask=mask, past_key_values=cache, **PLAIN)
    for row, out in zip(rows, together, strict=True):
        alone = model.generate(row[None], past_key_values=compressor.new_cache(model), **PLAIN)
        assert torch.equal(out[20:], alone[0, len(row) :])
    report, seen = cache.report(), mask.numel() + 3 * 7  # the last token is never fed back
    assert report.kinds["positions"] == 0  # each row's own tokens are at 0, 1, 2, ...
    assert report.kinds["padding"] == seen  # and padding is not stored
    values = sum(heads * (key + value) for heads, key, value in compressor.model["shapes"])
    assert report.values == (seen - (mask == 0).sum()) * values
    with pytest.raises(DataError, match="was padding when it was cached"):
        model(TOKENS[:3, :1], attention_mask=torch.ones(3, 28, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 27


@torch.inference_mode()
def test_a_pass_that_does_not_go_on_where_the_cache_ends_is_refused(model):
    """transformers' own cache reads the wrong tokens, or fails in the rotation. What is held stays as it was."""
    cache, ones = exact(model).new_cache(model), lambda slots: torch.ones(1, slots, dtype=torch.long)
    tokens, holds = torch.cat([TOKENS[:1], TOKENS[1:2]], dim=1), "the cache holds 20 tokens, .*pass the whole prompt"
    first = model(tokens[:, :20], past_key_values=cache).logits[:, -1]
    padded = 1 - ones(5).tril()  # a first slot of padding
    for message, use, start, stop, given in [
        (holds, model.generate, 0, 10, {}),
        (holds, model.generate, 20, 25, {}),
        (holds, model.generate, 20, 25, {"attention_mask": padded}),
        (holds, model.generate, 0, 25, {"prompt_lookup_num_tokens": 3}),
        ("a cache was given with use_cache=False", model.generate, 0, 25, {"use_cache": False}),
        ("a cache was given with use_cache=False", model, 20, 25, {"use_cache": False}),
        (holds, model, 20, 20, {"attention_mask": None}),
        (holds, model, 20, 25, {"attention_mask": ones(5)}),
    ]:
        with pytest.raises(DataError, match=message):
            use(tokens[:, start:stop], past_key_values=cache, **({} if use is model else PLAIN) | given)
    for given in ({}, {"attention_mask": ones(25)}, {"attention_mask": ones(90)}):
        copied = copy.deepcopy(cache)
        logits = model(tokens[:, 20:25], past_key_values=copied, **given).logits[:, -1]
        assert copied.get_seq_length() == 25 and logits.shape == first.shape
    going_on = [
        model.generate(tokens[:, start:25], attention_mask=ones(25), past_key_values=copy.deepcopy(cache), **PLAIN)
        for start in (0, 20)
    ]
    assert torch.equal(going_on[0][:, 20:], going_on[1]) and cache.get_seq_length() == 20


@pytest.mark.parametrize("kept_tokens", [0, 16, 1000])
def test_tokens_are_encoded_once_and_decoded_once_a_step_or_once(llama, higgs, monkeypatch, kept_tokens):
    """What ``decoded_cache_bytes`` holds is decoded once; the rest once a step, for every layer's keys and values."""
    token = 2 * 3 * 2 * 32 * 4  # keys and values of three layers with two heads of 32, fp32
    cache = higgs.new_cache(llama, decoded_cache_bytes=kept_tokens * token)
    counts, encode, decode = {"encode": 0, "decode": 0}, Codec.encode, Codec.decode

    def counting(name, tokens):
        counts[name] += tokens

    monkeypatch.setattr(Codec, "encode", lambda self, x: (counting("encode", x.shape[2]), encode(self, x))[1])
    monkeypatch.setattr(Codec, "decode", lambda self, p: (counting("decode", p.seq_len), decode(self, p))[1])
    with torch.inference_mode():
        for part in TOKENS[:1, :35].split([20] + [1] * 15, dim=1):
            llama(part, past_key_values=cache)
    history = [max(0, 20 + i - 2 - 5) for i in range(15)]  # packed before each step
    rest = sum(n - min(n, kept_tokens) for n in history)
    assert counts == {"encode": 6 * (35 - 2 - 5), "decode": 6 * (rest + min(history[-1], kept_tokens))}
    assert cache.report().kinds["decoded"] == min(history[-1], kept_tokens) * token <= kept_tokens * token


@pytest.fixture(scope="module")
def two(llama):
    """Compressors of 16 and of about 2 bits."""
    return [calibrate(llama, TOKENS, preset, progress=False) for preset in (presets.fp16(), presets.vqllm(2, 16, 8))]


def generated(model, cache=None, rows=2, mask=MASK, **settings):
    prompt = {"input_ids": TOKENS[:rows, :20], "attention_mask": mask[:rows]}
    return model.generate(**prompt | PLAIN | settings, past_key_values=cache).tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3, "rows": 1}, {"mask": PADDED}],
    ids=["greedy", "beams", "prompt-lookup", "padded"],
)  # fmt: skip
def test_generate_reads_what_a_cache_passed_to_it_would(llama, two, settings):
    wanted = generated(llama, two[1].new_cache(llama), **settings)
    with vqkv.compressed(llama, two[1]) as use:
        assert generated(llama, **settings) == wanted
    assert use.cache.report().bits_per_value < 3 and use.cache.get_seq_length() == 27


def test_only_caches_that_the_model_makes_within_the_block_are_compressed(llama, mini, two):
    wanted, mine = generated(llama), DynamicCache(config=llama.config)
    row = vqkv.evaluate(llama, two[1], TOKENS, chunk_size=16)
    llama(TOKENS[:1], past_key_values=mine)
    with pytest.raises(ZeroDivisionError), vqkv.compressed(llama, two[1]) as use:
        llama(TOKENS[:1, :1], past_key_values=mine)
        llama(TOKENS[:1], use_cache=False)
        llama(TOKENS[:1], past_key_values=two[0].new_cache(llama))
        assert vqkv.evaluate(llama, two[1], TOKENS, chunk_size=16) == row
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
        made = pipeline("text-generation", model=model, tokenizer=tokenizer)("def main(", **PLAIN)
        assert isinstance(use.cache, CompressedCache) and made[0]["generated_text"].startswith("def main(")
        streamer = TextIteratorStreamer(tokenizer)
        use.cache = None
        asked = tokenizer("def main(", return_tensors="pt") | PLAIN | {"streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=asked)
        thread.start()
        assert "".join(streamer).startswith(made[0]["generated_text"])
        thread.join()
        assert isinstance(use.cache, CompressedCache)


def test_threads_share_a_model(llama, higgs):
    """Between every two layers of an evaluation, another thread generates with a cache of its own and calibrates."""
    expected, wanted = vqkv.evaluate(llama, higgs, TOKENS[:2]), generated(llama, higgs.new_cache(llama), mask=PADDED)
    main = threading.get_ident()

    def another(*_):
        if threading.get_ident() == main:
            assert pool.submit(generated, llama, higgs.new_cache(llama), mask=PADDED).result(60) == wanted
            fitted = pool.submit(calibrate, llama, TOKENS, HIGGS, progress=False)
            assert fitted.result(60).fingerprint == higgs.fingerprint

    handle = llama.model.layers[1].mlp.register_forward_hook(another)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert vqkv.evaluate(llama, higgs, TOKENS[:2]) == expected
    finally:
        handle.remove()
