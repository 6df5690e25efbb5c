"""What is not saved, not loaded, and what a save that fails leaves behind."""

import os
import resource
import signal

import pytest
import small_models
import torch
from preset_zoo import EVERY
from saved_states import TOKENS, feed, half_way, made, same_state, through_file

from vqkv import CompressedCache, DataError, FormatError, calibrate, load_model
from vqkv.evict import H2O
from vqkv.saved import inspect


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def kivi(llama):
    return calibrate(llama, TOKENS, EVERY["kivi"], progress=False)


def test_another_compressor_or_model_is_named(llama, kivi, tmp_path):
    kivi.new_cache(llama).save(tmp_path / "cache")
    other = calibrate(llama, TOKENS, EVERY["higgs"], progress=False)
    with pytest.raises(FormatError, match=r"saved with compressor 'kivi' \(\w{16}\), not 'higgs' \(\w{16}\)"):
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


def test_weights_are_compared(llama, kivi, tmp_path):
    kivi.new_cache(llama).save(tmp_path / "cache")
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
    monkeypatch.setattr(cache.layers[1].roles[0], "write", lambda *a: (_ for _ in ()).throw(DataError("no room")))
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
    with pytest.raises(DataError, match="an EvictingCache keeps more"):
        type(evicting).load(tmp_path / "cache", kivi, llama)


def test_values_that_no_model_goes_on_with_are_not_saved(llama, kivi, tmp_path):
    cache = kivi.new_cache(llama)
    feed(llama, cache, TOKENS[:, :5])
    cache.layers[0].roles[1].window = torch.full_like(cache.layers[0].roles[1].window, torch.inf)
    with pytest.raises(DataError, match="reach inf"):
        cache.save(tmp_path / "cache")


def test_other_files_are_refused(llama, kivi, tmp_path):
    kivi.save_pretrained(tmp_path / "c")
    (tmp_path / "text").write_text("not a cache")
    (tmp_path / "empty").write_bytes(b"")
    for path, message in (
        (tmp_path / "none", "is no file"),
        (tmp_path, "is no file"),
        (tmp_path / "text", "no saved cache"),
        (tmp_path / "empty", "no saved cache"),
        (next((tmp_path / "c").glob("codecs-*")), "a safetensors file, but no saved cache"),
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
