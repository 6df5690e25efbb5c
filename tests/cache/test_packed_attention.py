"""Attention that reads packed tokens: the same numbers as with everything decoded, and nothing decoded for it."""

import copy
import dataclasses
import gc

import pytest
import small_models
import torch
from strategies import PLAIN, run
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DynamicCache, Gemma2Config

from vqkv import DataError, calibrate, presets
from vqkv.cache.packed_attention import NAME
from vqkv.codecs.pipeline import Codec
from vqkv.study.eviction import H2O

TRAIN = torch.randint(1, 4096, (8, 48), generator=torch.Generator().manual_seed(0))
TOKENS = TRAIN[:4]
READ = {
    "vqllm": presets.vqllm(num_quantizers=3, codebook_size=16, group_size=16),
    "quanto": presets.quanto(4, 16),
    "vq": presets.vq(codebook_size=16, block_tokens=8),
    "live": presets.live(3.0),
}
DECODED = {"kivi": presets.kivi(4, 8, recent_window=4), "aqua": presets.aqua(presets.higgs(4, 32), recent_window=5)}


model = small_models.fixture("gemma", "gpt2", "llama-yarn", "qwen2")


def fitted(model, preset):
    settings = {"block_tokens": 8, "sink_tokens": 2, "recent_window": 4}
    return calibrate(model, TRAIN, dataclasses.replace(preset, **settings), progress=False)


@pytest.fixture(scope="module", params=["live", "quanto", "vqllm"])
def compressor(request, llama):
    """Of each kind of view that kernels read."""
    return fitted(llama, READ[request.param])


@pytest.fixture(scope="module")
def quanto(llama):
    return fitted(llama, READ["quanto"])


def logits(model, cache, prompt: int = 30, step: int = 1) -> torch.Tensor:
    """Of all tokens after the prompt, fed ``step`` at a time."""
    steps = [part.shape[1] for part in TOKENS[:, prompt:].split(step, dim=1)]
    return run(model, cache, TOKENS, (prompt, *steps))[:, prompt:]


def both(model, call):
    """``call()`` with everything decoded, and with packed tokens read as they are."""
    results = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        results.append(call())
    model.set_attn_implementation("sdpa")
    return results


def assert_same(theirs: torch.Tensor, ours: torch.Tensor, first: int = 1) -> None:
    """The ``first`` tokens, which read the same stored tokens, to rounding. A code may flip by rounding, too, and later
    tokens read it."""
    torch.testing.assert_close(theirs[:, :first], ours[:, :first], rtol=1e-4, atol=1e-4)
    assert (theirs - ours).norm() < 0.02 * ours.norm()


@pytest.mark.parametrize("name", sorted(READ | DECODED))
def test_logits_are_those_of_decoded_tokens_on_every_architecture(model, name):
    compressor = fitted(model, (READ | DECODED)[name])
    ours, theirs = both(model, lambda: logits(model, compressor.new_cache(model)))
    assert_same(theirs, ours)


@pytest.mark.parametrize("step", [16, 17])
def test_several_new_tokens_see_those_before_them(llama, compressor, step):
    ours, theirs = both(llama, lambda: logits(llama, compressor.new_cache(llama), 20, step))
    assert_same(theirs, ours, step)


def test_a_step_decodes_nothing(llama, compressor, monkeypatch):
    def refuse(*_):
        raise AssertionError("a payload was decoded")

    cache = compressor.new_cache(llama)
    llama.set_attn_implementation(NAME)
    with torch.inference_mode():
        llama(TOKENS[:, :30], past_key_values=cache)
        monkeypatch.setattr(Codec, "decode", refuse)
        for token in TOKENS[:, 30:].split(1, dim=1):
            llama(token, past_key_values=cache)
    llama.set_attn_implementation("sdpa")
    assert cache.report().packed_bytes and cache.get_seq_length() == 48


def test_compiled_forwards_get_tensors(llama, quanto):
    ours = logits(llama, quanto.new_cache(llama), prompt=46)
    llama.set_attn_implementation(NAME)
    theirs = logits(torch.compile(llama, backend="eager"), quanto.new_cache(llama), prompt=46)
    llama.set_attn_implementation("sdpa")
    assert_same(theirs, ours)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"padded": True}], ids=str)
def test_every_way_to_generate_gives_the_same_tokens(llama, compressor, options):
    mask = torch.ones(4, 40, dtype=torch.long)
    mask[1, :9] = mask[3, :17] = 0
    asked = {"attention_mask": mask, "input_ids": TOKENS[:, :40] * mask}
    if "padded" not in options:
        asked = {"input_ids": TOKENS[:1, :20], **options}

    def generated():
        return llama.generate(**asked, past_key_values=compressor.new_cache(llama), **PLAIN)

    assert torch.equal(*both(llama, generated))


def ones(*hidden):
    """A mask of 31 slots that hides some (row, slots)."""
    mask = torch.ones(4, 31, dtype=torch.long)
    for row, slots in hidden:
        mask[row, slots] = 0
    return mask


EVERY_ROW, OWN = slice(None), torch.zeros(4, 1, 1, 31).index_fill(3, torch.arange(3, 20), -torch.inf)
PASSES = {  # what two passes are given
    "hides stored tokens": ({}, {"attention_mask": ones((EVERY_ROW, slice(5, 9)))}),
    "a mask of the caller's own shape": ({}, {"attention_mask": OWN}),
    "hides stored tokens, and the new slot is padding": (
        {}, {"attention_mask": ones((2, 30), (EVERY_ROW, slice(12, 18)))},
    ),
    "positions that do not count up": (
        {"position_ids": torch.arange(30)[None] * 2}, {"position_ids": torch.tensor([[77]])},
    ),
    "gradients": ({}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_masks_and_positions_are_obeyed(llama, quanto, name):
    first, second = PASSES[name]

    def call():
        cache = quanto.new_cache(llama)
        with torch.inference_mode(name != "gradients"):
            llama(TOKENS[:, :30], past_key_values=cache, **first)
            return llama(TOKENS[:, 30:31], past_key_values=cache, **second).logits

    ours, theirs = both(llama, call)
    rows = [0, 1, 3]  # the new slot of the third may be padding
    torch.testing.assert_close(theirs[rows], ours[rows], rtol=1e-4, atol=1e-4)
    assert theirs.requires_grad == (name == "gradients")


def test_other_caches_models_and_kept_or_evicted_tokens_are_read_as_with_sdpa(llama, quanto):
    """Also when the model that the cache was made for is gone."""
    kept, mine, other = {"decoded_cache_bytes": 10**6}, copy.deepcopy(llama), copy.deepcopy(llama)
    gone = quanto.new_cache(mine)
    del mine
    gc.collect()
    for call in (
        lambda: llama(TOKENS, past_key_values=None).logits,
        lambda: llama(TOKENS, past_key_values=DynamicCache()).logits,
        lambda: logits(llama, quanto.new_cache(llama, **kept)),
        lambda: logits(llama, quanto.new_cache(llama, in_place=True)),
        lambda: logits(llama, H2O(quanto, retain=0.5).new_cache(llama)),
        lambda: logits(other, quanto.new_cache(llama)),
    ):
        torch.testing.assert_close(*both(llama, call), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(other, gone), logits(llama, quanto.new_cache(llama)))


@pytest.mark.parametrize("name", sorted(set(small_models.SLIDING) - {"gemma2"}))
def test_sliding_windows_are_obeyed(name, tmp_path):
    model = small_models.load(name, tmp_path, config=small_models.SLIDING[name]())
    compressor = fitted(model, READ["quanto"])
    ours, theirs = both(model, lambda: logits(model, compressor.new_cache(model)))
    assert_same(theirs, ours)


def test_models_that_change_values_after_the_cache_read_decoded_tokens(tmp_path):
    config = {name: x for name, x in small_models.COMMON.items() if name != "head_dim"} | {"hidden_size": 128}
    model = small_models.load("diffllama", tmp_path, config=DiffLlamaConfig(**config))
    compressor = fitted(model, READ["quanto"])
    assert torch.equal(*both(model, lambda: logits(model, compressor.new_cache(model))))


def test_soft_caps_are_refused_and_models_load_with_it(tmp_path):
    config = Gemma2Config(**small_models.COMMON, sliding_window=10, attn_logit_softcapping=5.0)
    model = small_models.load("gemma2", tmp_path / "gemma2", config=config)
    model.set_attn_implementation(NAME)
    with pytest.raises(DataError, match=r"softcap.*eager"):
        model(TOKENS, past_key_values=DynamicCache())
    folder = small_models.make("llama", tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME)
    cache = fitted(model, READ["quanto"]).new_cache(model)
    assert model.generate(TOKENS[:, :20], past_key_values=cache, **PLAIN).shape == (4, 28)
