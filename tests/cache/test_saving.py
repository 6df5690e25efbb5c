"""Saved caches, loaded again, also in another process: they go on as if they had never been away, or are refused."""

import dataclasses
import os
import resource
import signal
from pathlib import Path

import forked
import pytest
import small_models
import torch
from predictor_zoo import SMALL as PREDICTORS
from preset_zoo import EVERY, PREDICTED
from safetensors.torch import load_file, save_file
from saved_states import MANY, PADDED, TOKENS, feed, half_way, made, rest, same_state, through_file

from vqkv import CompressedCache, Compressor, DataError, FormatError, calibrate, load_model, presets
from vqkv.cache.eviction import H2O
from vqkv.cache.saving import inspect
from vqkv.models.load import describe, difference

PREDICTING = {f"aqua-{kind}": presets.aqua(presets.quanto(), kind, recent_window=8, **arguments)
              for kind, arguments in PREDICTORS.items()}  # fmt: skip


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


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float16"), ("qwen3", "bfloat16"), ("llama-yarn", "float32")])
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


def test_what_was_loaded_does_not_change_with_its_file(llama, kivi, tmp_path):
    cache = kivi.new_cache(llama)
    half_way(llama, cache)
    again = through_file(cache, tmp_path / "cache")
    kivi.save_pretrained(tmp_path)
    compressor = Compressor.from_pretrained(tmp_path)
    for path in (tmp_path / "cache", tmp_path / "compressor.safetensors"):
        with open(path, "r+b") as file:
            file.write(bytes(path.stat().st_size))
    assert same_state(again, cache) and compressor.fingerprint == kivi.fingerprint


@pytest.mark.parametrize("other", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
def test_no_weights_match_every_model(llama, other):
    about = describe(llama)
    filled = [[other for _ in row] for row in about["weights"]]
    assert difference(about, llama) is None
    for weights in (filled, filled[:1], [*about["weights"], [1.0]], [row[:-1] for row in about["weights"]]):
        assert difference(about | {"weights": weights}, llama) == "other attention weights"


def generate_on(model_folder: str, folder: Path, arguments: dict) -> list:
    """What a new process generates from a saved cache."""
    model, text = load_model(model_folder)[0], load_file(folder / "tokens")
    cache = CompressedCache.load(folder / "cache", Compressor.from_pretrained(folder / "compressor"), model)
    return model.generate(text["tokens"], attention_mask=text["mask"], past_key_values=cache, **arguments).tolist()


def test_generate_goes_on_in_a_new_process(llama, tmp_path):
    """With the tokens of never having stopped."""
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    compressor = calibrate(llama, TOKENS, PREDICTED["aqua-kivi"], progress=False)
    compressor.save_pretrained(tmp_path / "compressor")
    cache = compressor.new_cache(llama)
    first = llama.generate(TOKENS[:, :60], attention_mask=PADDED[:, :60], past_key_values=cache, **arguments)
    cache.save(tmp_path / "cache")
    mask = torch.cat([PADDED[:, :60], torch.ones(3, 12, dtype=torch.long)], dim=1)
    save_file({"tokens": first.contiguous(), "mask": mask}, tmp_path / "tokens")
    more = llama.generate(first, attention_mask=mask, past_key_values=cache, **arguments)
    assert forked.call(generate_on, llama.config._name_or_path, tmp_path, arguments) == more.tolist()


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
        told = dataclasses.replace(cache.report(), derived_bytes=0).as_dict()  # of this process, not of the file
        assert {key: about[key] for key in told} == told
        assert about["compressor"]["name"] == cache.compressor.name and about["model"]["model_type"] == "llama"


def test_the_fingerprint_is_of_what_matters(llama, tmp_path):
    one = calibrate(llama, TOKENS, PREDICTED["aqua-vqllm"], progress=False)
    one.save_pretrained(tmp_path)
    again = Compressor.from_pretrained(tmp_path)
    again.name, again.notes = "other", {"another": "note"}
    assert again.fingerprint == one.fingerprint
    again.codecs[1][0].quantizer.codebooks[0, 0, 0] += 0.01
    others = [again, Compressor("other", one.codecs, dataclasses.replace(one.settings, recent_window=3), one.model)]
    others += [calibrate(llama, TOKENS, EVERY[name], progress=False) for name in ("vqllm", "beam", "kivi", "quanto")]
    assert len({compressor.fingerprint for compressor in (one, *others)}) == 7


def test_another_compressor_or_model_is_named(llama, kivi, tmp_path):
    kivi.new_cache(llama).save(tmp_path / "cache")
    other = calibrate(llama, TOKENS, EVERY["higgs"], progress=False)
    with pytest.raises(
        FormatError, match=r"saved with compressor 'kivi' with fingerprint \w{64}, not 'higgs' with fingerprint \w{64}:"
    ):
        CompressedCache.load(tmp_path / "cache", other, llama)
    changes = {
        "dtype float32, not .* with dtype bfloat16": llama.config._name_or_path,
        "rope_parameters .*default.*, not .*yarn": small_models.make("llama-yarn", tmp_path / "yarn"),
        "model_type llama, not .* with model_type gpt2": small_models.make("gpt2", tmp_path / "gpt2"),
    }
    for message, folder in changes.items():
        model = load_model(str(folder), "bfloat16" if "dtype" in message else None)[0]
        with pytest.raises(FormatError, match=f"saved with model .* with {message}"):
            CompressedCache.load(tmp_path / "cache", kivi, model)
    model = load_model(llama.config._name_or_path)[0]
    CompressedCache.load(tmp_path / "cache", kivi, model)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] *= 1.01
    with pytest.raises(FormatError, match=r"with weights \w{16}, not .* with weights \w{16}: load it"):
        CompressedCache.load(tmp_path / "cache", kivi, model)


def test_what_cannot_be_saved_is_named(llama, kivi, tmp_path, monkeypatch):
    policy = H2O(calibrate(llama, TOKENS, EVERY["vqllm"], progress=False), 0.5)
    evicting = policy.new_cache(llama)
    with pytest.raises(DataError, match="an EvictingCache keeps more .* Compressor.new_cache"):
        evicting.save(tmp_path / "cache")
    cache = kivi.new_cache(llama)
    with pytest.raises(FormatError, match="is a folder"):
        cache.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no such folder" / "cache")
    feed(llama, cache, TOKENS)
    monkeypatch.setattr(cache.layers[1].stores[0], "write", lambda *a: (_ for _ in ()).throw(DataError("no room")))
    with pytest.raises(DataError, match="no room"):
        feed(llama, cache, TOKENS[:, :5])
    with pytest.raises(DataError, match="failed half-way"):
        cache.save(tmp_path / "cache")
    gone = kivi.new_cache(load_model(llama.config._name_or_path)[0])
    with pytest.raises(DataError, match="the model that this cache was made for is gone"):
        gone.save(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    kivi.new_cache(llama).save(tmp_path / "cache")
    with pytest.raises(DataError, match="a H2O is no Compressor"):
        CompressedCache.load(tmp_path / "cache", policy, llama)


def test_other_files_are_refused(llama, kivi, tmp_path):
    kivi.save_pretrained(tmp_path / "c")
    (tmp_path / "text").write_text("not a cache")
    (tmp_path / "empty").write_bytes(b"")
    for path, message in (
        (tmp_path / "none", "missing, cut or altered, or no vqkv-cache: save a cache with"),
        (tmp_path, "missing"),
        (tmp_path / "text", "no vqkv-cache"),
        (tmp_path / "empty", "no vqkv-cache"),
        (tmp_path / "c" / "compressor.safetensors", "is vqkv-compressor 3; this vqkv reads vqkv-cache 6: save a cache"),
    ):
        for read in (inspect, lambda path: CompressedCache.load(path, kivi, llama)):
            with pytest.raises(FormatError, match=message):
                read(path)


def test_a_failed_save_leaves_the_older_file_and_nothing_else(llama, kivi, tmp_path, monkeypatch):
    """A disk with room for a part of it, and an interruption at the last moment."""
    cache, path = kivi.new_cache(llama), tmp_path / "cache"
    cache.save(path)
    before = path.read_bytes()
    half_way(llama, cache)
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    assert same_state(through_file(cache, path), cache)
