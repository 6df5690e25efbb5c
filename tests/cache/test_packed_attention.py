"""Attention that reads packed tokens: the same numbers as with everything decoded, and nothing decoded for it."""

import copy
import dataclasses
import gc

import pytest
import small_models
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DynamicCache, Gemma2Config

from vqkv import DataError, calibrate, presets
from vqkv.cache.eviction import H2O
from vqkv.cache.packed_attention import NAME
from vqkv.codecs.pipeline import Codec

TRAIN = torch.randint(1, 4096, (8, 48), generator=torch.Generator().manual_seed(0))
TOKENS = TRAIN[:4]
PLAIN = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
READ = {
    "vqllm": presets.vqllm(num_quantizers=3, codebook_size=16, group_size=16),
    "quanto": presets.quanto(4, 16),
    "hqq": presets.hqq(2, 32),
    "rvq2": presets.rvq2(codebook_size=16, keyframe=8),
    "live": presets.live(3.0),
}
DECODED = {"kivi": presets.kivi(4, 8, 4), "aqua": presets.aqua(presets.higgs(4, 32), recent_window=5)}


model = small_models.fixture("gemma", "gpt2", "llama-yarn", "qwen2")


def fitted(model, preset, **settings):
    defaults = {"flush_block": 8, "sink_tokens": 2, "recent_window": 4}
    return calibrate(model, TRAIN, dataclasses.replace(preset, **defaults | settings), progress=False)


@pytest.fixture(scope="module", params=sorted(READ))
def compressor(request, llama):
    return fitted(llama, READ[request.param])


def logits(model, cache, tokens, prompt: int, step: int = 1, **inputs) -> torch.Tensor:
    """Of all tokens after the prompt, fed ``step`` at a time."""
    with torch.inference_mode():
        model(tokens[:, :prompt], past_key_values=cache, **inputs)
        parts = [model(part, past_key_values=cache).logits for part in tokens[:, prompt:].split(step, dim=1)]
    return torch.cat(parts, dim=1)


def both(model, run):
    """``run()`` with everything decoded, and with packed tokens read as they are."""
    found = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        found.append(run())
    model.set_attn_implementation("sdpa")
    return found


def assert_same(theirs: torch.Tensor, ours: torch.Tensor, first: int = 1) -> None:
    """The ``first`` tokens, which read the same stored tokens, to rounding. A code may flip by rounding, too, and later
    tokens read it."""
    torch.testing.assert_close(theirs[:, :first], ours[:, :first], rtol=1e-4, atol=1e-4)
    assert (theirs - ours).norm() < 0.02 * ours.norm()


@pytest.fixture
def nothing_decoded(monkeypatch):
    """A switch: from then on, whoever decodes a payload fails."""

    def refuse(*_):
        raise AssertionError("a payload was decoded")

    return lambda: monkeypatch.setattr(Codec, "decode", refuse)


@pytest.mark.parametrize("name", sorted(READ | DECODED))
def test_logits_are_those_of_decoded_tokens_on_every_architecture(model, name):
    compressor = fitted(model, (READ | DECODED)[name])
    ours, theirs = both(model, lambda: logits(model, compressor.new_cache(model), TOKENS, 30))
    assert_same(theirs, ours)


@pytest.mark.parametrize("step", [1, 16, 17])
def test_several_new_tokens_see_those_before_them(llama, compressor, step):
    ours, theirs = both(llama, lambda: logits(llama, compressor.new_cache(llama), TOKENS, 20, step))
    assert_same(theirs, ours, step)


def test_a_step_decodes_nothing(llama, compressor, nothing_decoded):
    cache = compressor.new_cache(llama)
    llama.set_attn_implementation(NAME)
    with torch.inference_mode():
        llama(TOKENS[:, :30], past_key_values=cache)
        nothing_decoded()
        for token in TOKENS[:, 30:].split(1, dim=1):
            llama(token, past_key_values=cache)
    llama.set_attn_implementation("sdpa")
    assert cache.report().packed_bytes and cache.get_seq_length() == 48


def test_every_way_to_generate_gives_the_same_tokens(llama, compressor):
    for options in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        ours, theirs = both(
            llama,
            lambda options=options: llama.generate(
                TOKENS[:1, :20], past_key_values=compressor.new_cache(llama), **PLAIN | options
            ),
        )
        assert torch.equal(ours, theirs)


def test_padded_batches_read_what_each_row_stores(llama, compressor):
    mask = torch.ones(4, 40, dtype=torch.long)
    for row, missing in enumerate((0, 9, 0, 17)):
        mask[row, :missing] = 0
    given = {"attention_mask": mask, **PLAIN}

    def run():
        return llama.generate(TOKENS[:, :40] * mask, past_key_values=compressor.new_cache(llama), **given)

    ours, theirs = both(llama, run)
    assert torch.equal(ours, theirs)


def ones(*hidden):
    """A mask of 31 slots that hides some (row, slots)."""
    mask = torch.ones(4, 31, dtype=torch.long)
    for row, slots in hidden:
        mask[row, slots] = 0
    return mask


EVERY_ROW, OWN = slice(None), torch.zeros(4, 1, 1, 31).index_fill(3, torch.arange(3, 20), -torch.inf)
MASKS = {
    "hides stored tokens": (None, ones((EVERY_ROW, slice(5, 9)))),
    "of the caller's own shape": (None, OWN),
    "hides stored tokens beside padding": (
        ones((1, slice(9)))[:, :30],
        ones((1, slice(9)), (EVERY_ROW, slice(12, 18))),
    ),
    "hides stored tokens, and the new slot is padding": (None, ones((2, 30), (EVERY_ROW, slice(12, 18)))),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_obeyed(llama, compressor, name):
    before, after = MASKS[name]

    def run():
        cache = compressor.new_cache(llama)
        with torch.inference_mode():
            llama(TOKENS[:, :30], past_key_values=cache, attention_mask=before)
            return llama(TOKENS[:, 30:31], past_key_values=cache, attention_mask=after).logits

    ours, theirs = both(llama, run)
    rows = [0, 1, 3]  # the new slot of the third may be padding
    torch.testing.assert_close(theirs[rows], ours[rows], rtol=1e-4, atol=1e-4)


def test_models_that_change_values_after_the_cache_are_told_so(tmp_path):
    config = {name: x for name, x in small_models.COMMON.items() if name != "head_dim"} | {"hidden_size": 128}
    model = small_models.load("diffllama", tmp_path, config=DiffLlamaConfig(**config))
    cache = fitted(model, READ["quanto"]).new_cache(model)
    model.set_attn_implementation(NAME)
    with pytest.raises(DataError, match="set_attn_implementation"), torch.inference_mode():
        logits(model, cache, TOKENS, 30)


def test_another_model_of_the_same_kind_reads_decoded_tokens(llama):
    """Also when the model that the cache was made for is gone."""
    other = copy.deepcopy(llama)
    compressor, mine = fitted(llama, READ["quanto"]), copy.deepcopy(llama)
    expected = logits(llama, compressor.new_cache(llama), TOKENS, 30)
    llama.set_attn_implementation(NAME)
    torch.testing.assert_close(logits(other, compressor.new_cache(llama), TOKENS, 30), expected)
    llama.set_attn_implementation("sdpa")
    cache = compressor.new_cache(mine)
    del mine
    gc.collect()
    torch.testing.assert_close(logits(other, cache, TOKENS, 30), expected)


@pytest.mark.parametrize("name", sorted(set(small_models.SLIDING) - {"gemma2"}))
def test_sliding_windows_are_obeyed(name, tmp_path):
    model = small_models.load(name, tmp_path, config=small_models.SLIDING[name]())
    compressor = fitted(model, READ["quanto"])
    ours, theirs = both(model, lambda: logits(model, compressor.new_cache(model), TOKENS, 30))
    assert_same(theirs, ours)


def test_soft_caps_are_refused_by_name(tmp_path):
    config = Gemma2Config(**small_models.COMMON, sliding_window=10, attn_logit_softcapping=5.0)
    model = small_models.load("gemma2", tmp_path, config=config)
    model.set_attn_implementation(NAME)
    with pytest.raises(DataError, match=r"softcap.*eager"):
        model(TOKENS, past_key_values=DynamicCache())


def test_other_caches_and_none_attend_as_sdpa_does(llama):
    for cache in (lambda: None, DynamicCache):
        ours, theirs = both(llama, lambda cache=cache: llama(TOKENS, past_key_values=cache()).logits)
        assert torch.equal(ours, theirs)


def test_evicted_tokens_stay_away(llama):
    system = H2O(fitted(llama, READ["quanto"]), retain=0.5)
    ours, theirs = both(llama, lambda: logits(llama, system.new_cache(llama), TOKENS, 30))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_positions_that_do_not_count_up(llama, compressor):
    ids = torch.arange(30) * 2

    def run():
        cache = compressor.new_cache(llama)
        with torch.inference_mode():
            llama(TOKENS[:, :30], past_key_values=cache, position_ids=ids[None])
            return llama(TOKENS[:, 30:31], past_key_values=cache, position_ids=torch.tensor([[77]])).logits

    ours, theirs = both(llama, run)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_decoded_tokens_that_are_kept_are_read(llama, compressor):
    run = lambda: logits(llama, compressor.new_cache(llama, decoded_cache_bytes=10**6), TOKENS, 30)  # noqa: E731
    ours, theirs = both(llama, run)
    assert torch.equal(ours, theirs)


def test_compiled_forwards_get_tensors(llama, compressor):
    compiled = torch.compile(llama, backend="eager")
    ours = logits(llama, compressor.new_cache(llama), TOKENS, 30)
    llama.set_attn_implementation(NAME)
    theirs = logits(compiled, compressor.new_cache(llama), TOKENS, 30)
    llama.set_attn_implementation("sdpa")
    assert_same(theirs, ours)


def test_loading_a_model_with_it(tmp_path):
    folder = small_models.make("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME)
    cache = fitted(model, READ["quanto"]).new_cache(model)
    assert model.generate(TOKENS[:, :20], past_key_values=cache, **PLAIN).shape == (4, 28)


def test_a_step_that_wants_gradients_reads_the_same(llama, compressor):
    def run():
        cache = compressor.new_cache(llama)
        return torch.cat([llama(x, past_key_values=cache).logits for x in TOKENS.split([20, 1, 27], dim=1)[:2]], dim=1)

    plain, packed = both(llama, run)
    assert packed.requires_grad
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)
