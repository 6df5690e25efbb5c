"""What transformers' ``generate`` does with a cache: ways of decoding, padding, continued chats, compiled forwards."""

import copy

import pytest
import small_models
import torch
from preset_zoo import EVERY, PREDICTED
from strategies import exact, run
from transformers import DynamicCache

from vqkv import Compressor, DataError, calibrate, presets
from vqkv.cache.eviction import H2O
from vqkv.codecs.pipeline import Codec

TOKENS = torch.randint(1, 4096, (4, 48), generator=torch.Generator().manual_seed(0))
MORE = torch.randint(1, 4096, (2, 96), generator=torch.Generator().manual_seed(0))
PLAIN = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PRESETS = {
    "vqllm": lambda: presets.vqllm(num_quantizers=3, codebook_size=16, group_size=16),
    "quanto": lambda: presets.quanto(4, 16),
    "kivi": lambda: presets.kivi(4, 8, 4),
    "higgs": lambda: presets.higgs(4, 32, 2, 5),
    "aqua": lambda: presets.aqua(presets.higgs(4, 32), sink_tokens=2, recent_window=5),
}


model = small_models.fixture("gpt2", "qwen3")
any_caller = small_models.fixture("gpt2", "qwen3", "opt")  # OPT calls its decoder past the base model


@pytest.fixture(scope="module", params=sorted(PRESETS))
def compressor(request, llama):
    return calibrate(llama, TOKENS.repeat(4, 1), PRESETS[request.param](), progress=False)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    return small_models.sliding("mistral", tmp_path_factory.mktemp("sliding"))


@pytest.fixture(scope="module")
def higgs(llama):
    return calibrate(llama, TOKENS, PRESETS["higgs"](), progress=False)


def greedy(model, cache, tokens, new_tokens):
    """By hand, one token at a time: what ``generate`` must equal."""
    with torch.inference_mode():
        for _ in range(new_tokens):
            fresh = tokens[:, cache.get_seq_length() :]
            logits = model(fresh, past_key_values=cache).logits[:, -1:]
            tokens = torch.cat([tokens, logits.argmax(-1)], dim=1)
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["sampling", "beams", "sampled-beams", "prompt-lookup", "penalties", "several-returned"],
)
def test_every_way_of_decoding_equals_an_uncompressed_cache(model, options):
    """Stored without loss, a cache changes no choice: all that differs is how it is reordered, cropped and repeated."""
    rows = TOKENS[:1, :20].repeat(1, 2) if "prompt_lookup_num_tokens" in options else TOKENS[:2, :20]
    results = []
    for cache in (DynamicCache(), exact(model).new_cache(model)):
        torch.manual_seed(1)
        results.append(model.generate(rows, past_key_values=cache, **PLAIN | options))
    assert torch.equal(*results)


def test_assisted_decoding_crops_to_the_same_tokens(llama, compressor, tmp_path):
    """The assistant's rejected tokens are forgotten; greedy assisted decoding emits what the target would alone, as
    far as packing allows: tokens packed while guesses were in the window stay packed."""
    assistant = small_models.load("qwen3", tmp_path)
    cache = compressor.new_cache(llama)
    out = llama.generate(TOKENS[:1, :20], past_key_values=cache, assistant_model=assistant, **PLAIN)
    assert out.shape == (1, 28)
    assert cache.get_seq_length() == 27 and all(group.positions.seq_len == 27 for group in cache.batch.groups)


@pytest.mark.parametrize("name", sorted(small_models.SLIDING))
def test_guesses_are_taken_back_past_a_sliding_window(name, tmp_path):
    """As ``DynamicCache``: the greedy text, and no more than the window is held, be guesses recorded or not."""
    model, other = small_models.sliding(name, tmp_path / name), small_models.load("qwen3", tmp_path / "qwen3")
    rows, cache = TOKENS[:1, :8].repeat(1, 4), None
    expected = model.generate(rows, **PLAIN | {"max_new_tokens": 24})
    for guesses in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": other}, {"assistant_model": model}):
        cache = exact(model, sink_tokens=2, recent_window=5).new_cache(model)
        out = model.generate(rows, past_key_values=cache, **PLAIN | {"max_new_tokens": 24} | guesses)
        assert torch.equal(out, expected)
        held = {sum(layer.stores[0].parts) for layer in cache.compressed if layer.is_sliding}
        assert cache.get_seq_length() == 55 and held == {9}
    model.generate(out, past_key_values=cache, **PLAIN)
    assert {sum(layer.stores[0].parts) for layer in cache.compressed if layer.is_sliding} == {10}


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"split"}))  # which predicts, and so drops nothing
@torch.inference_mode()
def test_what_stays_after_guesses_were_taken_back_reads_as_before(sliding, name):
    """Also in the middle of a packed block, again and again, in a window that goes on and stays bounded."""
    compressor = calibrate(sliding, MORE.repeat(3, 1), EVERY[name], progress=False)
    cache, seen, layer = compressor.new_cache(sliding), 0, None
    cache.activate_past_recording()
    for new, removed in [(40, 3), (4, 1), (4, 3), (1, 0), (6, 2), (20, 17), (9, 0), (3, 2), (12, 7)]:
        sliding(MORE[:1, seen : seen + new], past_key_values=cache)
        layer, seen = cache.layers[1], seen + new - removed
        first, before = layer.first, (layer.keys, layer.values)
        cache.crop(-removed)
        for x, y in zip(before, (layer.keys, layer.values), strict=True):
            torch.testing.assert_close(y, x[:, :, layer.first - first : seen - first], rtol=1e-5, atol=1e-5)
        held, settings = sum(layer.stores[0].parts), cache.settings
        most = max(9, settings.recent_window + settings.block) + settings.block + settings.sink_tokens
        assert 9 <= held <= most and layer.get_seq_length() == seen == layer.first + held
    with pytest.raises(DataError, match="sliding window or a recurrent state has forgotten"):
        cache.crop(-held + 8)
    assert layer.get_seq_length() == seen


def test_generate_with_left_padding_equals_the_rows_alone(any_caller):
    model = any_caller
    compressor = calibrate(model, TOKENS, presets.higgs(4, 32, 2, 5), progress=False)
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
    values = sum(heads * (key + value) for heads, key, value in cache.settings.shapes)
    assert report.values == (seen - (mask == 0).sum()) * values


def test_a_slot_that_was_padding_cannot_be_shown_later(llama, higgs):
    cache, mask = higgs.new_cache(llama), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with torch.inference_mode():
        llama(TOKENS[:2, :20], attention_mask=mask, past_key_values=cache)
        with pytest.raises(DataError, match="was padding when it was cached"):
            llama(TOKENS[:2, 20:21], attention_mask=torch.ones(2, 21, dtype=torch.long), past_key_values=cache)
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("evicting", [False, True])
@torch.inference_mode()
def test_a_pass_that_does_not_go_on_where_the_cache_ends_is_refused(model, evicting):
    """transformers' own cache reads the wrong tokens, or fails in the rotation. What is held stays as it was."""
    compressor = exact(model)
    policy = H2O(compressor, retain=0.5) if evicting else compressor
    cache, ones = policy.new_cache(model), lambda slots: torch.ones(1, slots, dtype=torch.long)
    tokens, holds = torch.cat([TOKENS[:1], TOKENS[1:2]], dim=1), "the cache holds 20 tokens, the prompt has"
    first = model(tokens[:, :20], past_key_values=cache).logits[:, -1]
    padded = 1 - ones(5).tril()  # a first slot of padding, which eviction refuses anyway
    again, empty = "pass an empty cache, as assisted decoding reads it from its beginning", {"attention_mask": None}
    for message, use, start, stop, given in [
        (f"{holds} 10: pass the whole prompt", model.generate, 0, 10, {}),
        (f"{holds} 15: pass the whole prompt", model.generate, 0, 15, {}),
        (f"{holds} 20: pass the whole prompt", model.generate, 0, 20, {}),
        (f"{holds} 20: pass the whole prompt", model.generate, 0, 20, {"prefill_chunk_size": 8}),
        (f"{holds} 5: pass the whole prompt", model.generate, 20, 25, {}),
        (f"{holds} 5: pass the whole prompt|no share of its", model.generate, 20, 25, {"attention_mask": padded}),
        (f"{holds} 25: {again}", model.generate, 0, 25, {"prompt_lookup_num_tokens": 3}),
        ("a cache was given with use_cache=False", model.generate, 0, 25, {"use_cache": False}),
        ("a cache was given with use_cache=False", model, 20, 25, {"use_cache": False}),
        (f"{holds} no more: pass the whole prompt", model, 20, 20, empty),
        ("attention_mask has 5 slots, but the cache holds 20 and 5 came: pass one of 25", model, 20, 25,
         {"attention_mask": ones(5)}),
    ]:  # fmt: skip
        options = {} if use is model else PLAIN
        with pytest.raises(DataError, match=message):
            use(tokens[:, start:stop], past_key_values=cache, **options | given)
    for given in ({}, {"attention_mask": ones(25)}, {"attention_mask": ones(90)}):
        copied = copy.deepcopy(cache)
        logits = model(tokens[:, 20:25], past_key_values=copied, **given).logits[:, -1]
        assert copied.get_seq_length() == 25 and logits.shape == first.shape
    going_on = [
        model.generate(tokens[:, start:25], attention_mask=ones(25), past_key_values=copy.deepcopy(cache), **PLAIN)
        for start in (0, 20)
    ]
    assert torch.equal(going_on[0][:, 20:], going_on[1]) and cache.get_seq_length() == 20


def test_a_chat_goes_on(llama, compressor):
    """Prefill, generate, append, generate: as one loop over the same tokens."""
    cache, other = compressor.new_cache(llama), compressor.new_cache(llama)
    first = llama.generate(TOKENS[:1, :20], past_key_values=cache, **PLAIN)
    appended = torch.cat([first, TOKENS[1:2, :7]], dim=1)
    second = llama.generate(appended, past_key_values=cache, **PLAIN)
    by_hand = torch.cat([greedy(llama, other, TOKENS[:1, :20], 8), TOKENS[1:2, :7]], dim=1)
    assert torch.equal(second, greedy(llama, other, by_hand, 8))


def test_a_compiled_forward_gives_the_same_tokens(llama, higgs):
    compiled = torch.compile(llama.forward, backend="eager")
    cache, other = higgs.new_cache(llama), higgs.new_cache(llama)
    with torch.inference_mode():
        for part in TOKENS[:2].split([20, 1, 1, 26], dim=1):
            ours = compiled(part, past_key_values=cache).logits
            torch.testing.assert_close(ours, llama(part, past_key_values=other).logits, rtol=1e-3, atol=1e-3)


def counted(monkeypatch):
    """Tokens that codecs encode and decode from now on."""
    found = {"encode": [], "decode": []}
    encode, decode = Codec.encode, Codec.decode
    monkeypatch.setattr(Codec, "encode", lambda self, x: (found["encode"].append(x.shape[2]), encode(self, x))[1])
    monkeypatch.setattr(
        Codec, "decode", lambda self, p, *a, **k: (found["decode"].append(p.seq_len), decode(self, p, *a, **k))[1]
    )
    return found


@pytest.mark.parametrize("kept_tokens", [0, 16, 1000])
def test_tokens_are_encoded_once_and_decoded_once_a_step_or_once(llama, monkeypatch, kept_tokens):
    """What ``decoded_cache_bytes`` holds is decoded once; the rest once a step, for every layer's keys and values."""
    compressor = calibrate(llama, TOKENS, presets.higgs(4, 32, 2, 5), progress=False)
    token = 2 * 3 * 2 * 32 * 4  # keys and values of three layers with two heads of 32, fp32
    cache = compressor.new_cache(llama, decoded_cache_bytes=kept_tokens * token)
    found = counted(monkeypatch)
    steps = [20] + [1] * 15
    with torch.inference_mode():
        for part in TOKENS[:1, :35].split(steps, dim=1):
            llama(part, past_key_values=cache)
    places, packed = 6, 35 - 2 - 5
    assert sum(found["encode"]) == places * packed  # each token once
    history = [max(0, 20 + i - 2 - 5) for i in range(15)]  # packed before each step
    rest = sum(n - min(n, kept_tokens) for n in history)
    assert sum(found["decode"]) == places * (rest + min(history[-1], kept_tokens))
    report = cache.report()
    assert report.kinds["decoded"] == min(history[-1], kept_tokens) * token <= kept_tokens * token


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1GB"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(llama, higgs, wrong):
    with pytest.raises(DataError, match="decoded_cache_bytes"):
        higgs.new_cache(llama, decoded_cache_bytes=wrong)


@pytest.mark.parametrize("name", EVERY | PREDICTED)
def test_a_cache_can_be_saved_reset_cropped_and_reordered(llama, name, tmp_path):
    compressor, tokens = calibrate(llama, MORE.repeat(3, 1), (EVERY | PREDICTED)[name], progress=False), MORE[:, :60]
    cache = compressor.new_cache(llama)
    first = run(llama, cache, tokens, (40, 1, 1, 18))
    compressor.save_pretrained(tmp_path)
    assert torch.equal(run(llama, Compressor.from_pretrained(tmp_path).new_cache(llama), tokens, (40, 1, 1, 18)), first)
    swapped, more = copy.deepcopy(cache), MORE[:, 60:65]
    swapped.reorder_cache(torch.tensor([1, 0]))
    one = copy.deepcopy(cache)
    one.batch_select_indices(torch.tensor([False, True]))
    with pytest.raises(IndexError, match="no sequence is chosen"):
        one.batch_select_indices(torch.tensor([], dtype=torch.long))
    expected = run(llama, copy.deepcopy(cache), more, (5,))
    torch.testing.assert_close(run(llama, swapped, more.flip(0), (5,)).flip(0), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run(llama, one, more[1:], (5,)), expected[1:], rtol=1e-3, atol=1e-3)
    for length in (37, 16, 3, 0):
        cache.crop(length - cache.get_seq_length())
        held = {sum(store.parts) for group in cache.batch.groups for store in group.all_stores}
        assert held == ({length} if length else set()) and cache.get_seq_length() == length
        if length == 37:
            assert run(llama, copy.deepcopy(cache), tokens[:, 37:], (23,)).isfinite().all()
    assert torch.equal(run(llama, cache, tokens, (40, 1, 1, 18)), first)
    cache.reset()
    assert cache.report().cache_bytes == 0 and cache.get_seq_length() == 0
