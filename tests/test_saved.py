"""Saved caches: loaded again, also in another process, they go on as if they had never been away."""

import dataclasses
from pathlib import Path

import forked
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from predictor_zoo import SMALL as PREDICTORS
from preset_zoo import EVERY, PREDICTED
from safetensors.torch import load_file, save_file
from saved_states import MANY, PADDED, TOKENS, feed, half_way, made, rest, same_state, through_file

from vqkv import CompressedCache, Compressor, calibrate, load_model, presets
from vqkv.saved import inspect

PREDICTING = {f"aqua-{kind}": presets.aqua(presets.quanto(), kind, recent_window=8, **arguments)
              for kind, arguments in PREDICTORS.items()}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def kivi(llama):
    """Blocks of 16 tokens, 8 recent ones."""
    return calibrate(llama, TOKENS, EVERY["kivi"], progress=False)


@pytest.mark.parametrize("name", EVERY | PREDICTED | PREDICTING)
def test_a_loaded_cache_goes_on_as_if_never_saved(llama, tmp_path, name):
    tokens = MANY if name in PREDICTING else TOKENS
    compressor = calibrate(llama, tokens, (EVERY | PREDICTED | PREDICTING)[name], progress=False)
    for in_place in (False, True):
        cache = compressor.new_cache(llama, in_place)
        half_way(llama, cache)
        again = through_file(cache, tmp_path / "cache")
        assert same_state(again, cache) and len(cache.batch.groups) == 3
        assert again.report() == cache.report() and again.is_initialized == cache.is_initialized
        assert torch.equal(rest(llama, again), rest(llama, cache))
        assert same_state(again, cache)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "llama-yarn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_models_and_types(tmp_path, name, dtype):
    model = made(name, tmp_path, dtype)
    cache = calibrate(model, TOKENS, EVERY["kivi"], progress=False).new_cache(model)
    half_way(model, cache)
    again = through_file(cache, tmp_path / "cache")
    assert same_state(again, cache) and torch.equal(rest(model, again), rest(model, cache))


def test_an_empty_cache_and_one_that_was_reset(llama, kivi, tmp_path):
    cache = kivi.new_cache(llama)
    again = through_file(cache, tmp_path / "cache")
    assert same_state(again, cache) and inspect(tmp_path / "cache")["seq_len"] == 0
    assert torch.equal(feed(llama, again, TOKENS), feed(llama, cache, TOKENS))
    cache.reset()
    assert through_file(cache, tmp_path / "cache").get_seq_length() == 0


def test_decoded_tokens_are_not_saved_and_may_be_kept_anew(llama, kivi, tmp_path):
    cache = kivi.new_cache(llama, decoded_cache_bytes=1 << 20)
    half_way(llama, cache)
    assert cache.report().kinds["decoded"]
    again = through_file(cache, tmp_path / "cache", decoded_cache_bytes=1 << 19)
    assert again.report().kinds["decoded"] == 0 and again.settings.decoded_cache_bytes == 1 << 19
    expected = rest(llama, through_file(cache, tmp_path / "cache"))
    for other in (cache, again):
        assert torch.equal(rest(llama, other), expected) and other.report().kinds["decoded"]


def test_a_loaded_cache_does_not_change_with_its_file(llama, kivi, tmp_path):
    cache = kivi.new_cache(llama)
    half_way(llama, cache)
    again = through_file(cache, tmp_path / "cache")
    with open(tmp_path / "cache", "r+b") as file:
        file.write(bytes((tmp_path / "cache").stat().st_size))
    assert same_state(again, cache)


def generate_on(model_folder: str, folder: Path, arguments: dict, names: list[str]) -> dict:
    """What a new process generates from saved caches."""
    model, found = load_model(model_folder)[0], {}
    for name in names:
        compressor = Compressor.from_pretrained(folder / name)
        cache = CompressedCache.load(folder / f"{name}.cache", compressor, model)
        text = load_file(folder / f"{name}.tokens")
        more = model.generate(text["tokens"], attention_mask=text["mask"], past_key_values=cache, **arguments)
        found[name] = more.tolist()
    return found


def test_generate_goes_on_in_a_new_process(llama, tmp_path):
    """With the tokens of never having stopped."""
    expected, folder = {}, tmp_path
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for name in ("kivi", "aqua-vqllm"):
        compressor = calibrate(llama, TOKENS, (EVERY | PREDICTED)[name], progress=False)
        compressor.save_pretrained(folder / name)
        cache = compressor.new_cache(llama)
        first = llama.generate(
            TOKENS[:, :60],
            attention_mask=PADDED[:, :60],
            past_key_values=cache,
            return_dict_in_generate=True,
            **arguments,
        )
        cache.save(folder / f"{name}.cache")
        mask = torch.cat([PADDED[:, :60], torch.ones(3, 12, dtype=torch.long)], dim=1)
        save_file({"tokens": first.sequences.contiguous(), "mask": mask}, folder / f"{name}.tokens")
        more = llama.generate(first.sequences, attention_mask=mask, past_key_values=cache, **arguments)
        expected[name] = more.tolist()
    assert forked.call(generate_on, llama.config._name_or_path, folder, arguments, list(expected)) == expected


steps = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 40)),
        st.tuples(st.just("crop"), st.integers(1, 30)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=1, max_size=3)),
        st.tuples(st.just("pad"), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(steps=steps, in_place=st.booleans())
def test_whatever_was_done_to_it(llama, kivi, tmp_path_factory, steps, in_place):
    """What is loaded is what was saved, and saves to the same bytes."""
    cache, path = kivi.new_cache(llama, in_place), tmp_path_factory.mktemp("any") / "cache"
    for step, argument in (("feed", 3), *steps):
        size, slots = cache.batch.size or 3, cache.get_seq_length()
        if step == "crop":
            cache.crop(-argument)
        elif step == "select":
            cache.batch_select_indices(torch.tensor(argument) % size)
        else:
            new = torch.ones(size, argument, dtype=torch.long)
            if step == "pad":
                new[0, : argument // 2 + 1] = 0
            held = torch.ones(size, slots) if cache.batch.tokens is None else cache.batch.tokens
            feed(llama, cache, TOKENS[:1, :argument].expand(size, -1), torch.cat([held.long(), new], dim=1))
    again = through_file(cache, path)
    data = path.read_bytes()
    assert same_state(again, cache) and through_file(again, path) and path.read_bytes() == data


def test_the_file_is_the_bytes_of_the_report_and_a_header(llama, tmp_path):
    preset = presets.vqllm(num_quantizers=2, codebook_size=16, group_size=8)
    long = TOKENS.repeat(1, 21)[:, :2000]
    cache = calibrate(llama, TOKENS, preset, progress=False).new_cache(llama)
    for piece in long.split(200, dim=1):
        feed(llama, cache, piece)
    cache.save(tmp_path / "cache")
    stored, about = cache.report().cache_bytes, inspect(tmp_path / "cache")
    assert about["file_bytes"] == (tmp_path / "cache").stat().st_size == stored + about["header_bytes"]
    assert about["header_bytes"] < 0.01 * stored
    kinds = load_file(tmp_path / "cache")  # by safetensors' own hand
    assert sum(x.numel() * x.element_size() for x in kinds.values()) == stored


def test_inspect_reports_what_the_cache_does(llama, tmp_path):
    for name in ("kivi", "vqq", "aqua-vqllm"):
        cache = calibrate(llama, TOKENS, (EVERY | PREDICTED)[name], progress=False).new_cache(llama)
        half_way(llama, cache)
        cache.save(tmp_path / "cache")
        about = inspect(tmp_path / "cache")
        assert {key: about[key] for key in cache.report().as_dict()} == cache.report().as_dict()
        assert about["compressor"]["name"] == cache.compressor.name and about["model"]["model_type"] == "llama"


def test_the_fingerprint_is_of_what_matters(llama, tmp_path):
    one = calibrate(llama, TOKENS, PREDICTED["aqua-vqllm"], progress=False)
    one.save_pretrained(tmp_path)
    again = Compressor.from_pretrained(tmp_path)
    again.name, again.notes = "other", {"another": "note"}
    assert again.fingerprint == one.fingerprint == one.to("cpu").fingerprint
    again.codecs[1][0].quantizer.codebooks[0, 0, 0] += 0.01
    others = [again, Compressor("other", one.codecs, dataclasses.replace(one.settings, recent_window=3), one.model)]
    others += [calibrate(llama, TOKENS, EVERY[name], progress=False) for name in ("vqllm", "beam", "kivi", "quanto")]
    assert len({compressor.fingerprint for compressor in (one, *others)}) == 7
