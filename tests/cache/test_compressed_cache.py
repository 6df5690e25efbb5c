"""The compressed cache: what attention reads, what is stored, the files that a key passes, and what is refused."""

import dataclasses
import sys
from pathlib import Path

import pytest
import small_models
import torch
from codec_zoo import EVERY, PREDICTED
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TOKENS as ALL
from strategies import run, with_settings
from transformers import DynamicCache

import vqkv
from vqkv import DataError, calibrate, presets
from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import tensor_bytes, tensors
from vqkv.codecs.predictive import ROLES

SMALL = {"num_quantizers": 3, "codebook_size": 16, "group_size": 16}
TOKENS = ALL[:, :48]
PACKAGE = Path(vqkv.__file__).parent


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TOKENS, presets.vqllm(**SMALL), progress=False)


@pytest.mark.parametrize("pre_rope", [False, None])
def test_a_key_passes_three_files_and_its_codec(llama, pre_rope):
    """On its way in and out, in one call of ``update``. Before RoPE it passes its rotation, too. A kernel's file turns
    autocast off."""
    cache = calibrate(llama, TOKENS, presets.vqllm(**SMALL, pre_rope=pre_rope), progress=False).new_cache(llama)
    run(llama, cache, TOKENS[:1, :20], (10, 10))
    passed = set()

    def see(frame, event, _):
        if event == "call" and frame.f_back:
            callee, caller = (Path(each.f_code.co_filename) for each in (frame, frame.f_back))
            if PACKAGE / "cache" in (callee.parent, caller.parent) and PACKAGE in callee.parents:
                room, *_, file = callee.relative_to(PACKAGE).parts
                passed.add(file if room == "cache" else room)

    update = cache.update
    cache.update = lambda *args, **kwargs: (sys.setprofile(see), update(*args, **kwargs), sys.setprofile(None))[1]
    run(llama, cache, TOKENS[:1, 20:21], (1,))
    rotation = set() if pre_rope is False else {"models"}
    assert passed == {"compressed.py", "layer.py", "store.py", "codecs", "kernels"} | rotation


def test_nothing_is_stored_but_payloads_sinks_and_window_and_tables_are_named(llama, compressor, tmp_path):
    compressor.save_pretrained(tmp_path)
    fresh = Compressor.from_pretrained(tmp_path)
    assert fresh.derived_bytes == 0 < fresh.side_bytes
    fresh = with_settings(fresh, sink_tokens=4, recent_window=8)
    cache = fresh.new_cache(llama)
    run(llama, cache)
    report, heads, layers = cache.report(), 2 * 2, 3
    assert tensor_bytes(cache) - tensor_bytes(fresh) == report.cache_bytes
    assert report.kinds["sinks"] == layers * 2 * heads * 4 * 32 * 2
    assert report.kinds["window"] == layers * 2 * heads * 8 * 32 * 2
    assert report.bits_per_value == (3 * 2 * 4 + 16) / 32  # 3 codes of 4 bits for each of 2 groups, one fp16 scale
    assert report.packed_values == layers * 2 * heads * 36 * 32
    assert sum(cache.layers[0].stores[0].parts) == report.seq_len == 48
    search = 3 * (16 + 1) * 64  # -2 c and |c|^2 beneath, of 3 codebooks of 16 codes, padded to whole blocks
    plain = 3 * 3 * 16 * 16  # as rows, exactly, and as the decoder reads them
    tables = layers * 2 * 4 * (search + plain)
    assert report.derived_bytes == tables and report.side_bytes == compressor.side_bytes
    assert "1.25 bits per packed value" in repr(cache) and f"tables made from it {tables:,}" in repr(cache)


def refused(model, cache, tokens, message):
    with pytest.raises(DataError, match=message):
        run(model, cache, tokens, (tokens.shape[1],))


@pytest.mark.parametrize("pre_rope", [True, False])
def test_a_refused_batch_leaves_no_trace(llama, compressor, pre_rope):
    base = with_settings(compressor, pre_rope=pre_rope, sink_tokens=1, recent_window=2)
    cache, undisturbed = base.new_cache(llama), base.new_cache(llama)
    expected = run(llama, undisturbed, pieces=(20, 10, 18))
    first = run(llama, cache, TOKENS[:2, :20], (20,))
    refused(llama, cache, TOKENS[:1, 20:25], "holds 2 sequences, but 1 came")
    assert torch.equal(torch.cat([first, run(llama, cache, TOKENS[:2, 20:], (10, 18))], dim=1), expected)


PIECES = st.lists(st.integers(1, 20), min_size=1, max_size=30).map(lambda pieces: (*pieces, 1000))
WINDOW = {"window": dataclasses.replace(presets.quanto(4, 32), recent_window=7, block_tokens=3)}


@pytest.mark.parametrize("name", EVERY | PREDICTED | WINDOW)
def test_the_same_codes_are_stored_in_any_pieces(llama, name):
    """What waits in the window is rounded to 16 bits; so is what is quantized as it comes."""
    compressor = calibrate(llama, ALL.repeat(2, 1), (EVERY | PREDICTED | WINDOW)[name], progress=False)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 1, 2, 60, 32, generator=generator).unbind() for _ in range(3)]

    def stored(pieces):
        cache, start = compressor.new_cache(llama), 0
        while start < 60:
            new, *pieces = pieces
            cache.expect(None, None)
            for layer, pair in enumerate(states):
                cache.update(*(x[:, :, start : start + new] for x in pair), layer)
            start += new
        return [x for x in tensors([group.all_stores for group in cache.batch.groups]) if x.numel()]

    stored([30, 30])  # reads packed tokens: tables that are made when they are first needed are there from now on
    at_once = stored([60])

    @settings(deadline=None, max_examples=2)
    @given(pieces=PIECES)
    def check(pieces):
        assert all(torch.equal(x, y) for x, y in zip(stored(pieces), at_once, strict=True))

    check()


@pytest.mark.parametrize("preset", [presets.kivi(4, 8, recent_window=16), presets.vqllm(**SMALL)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_no_codec_stores_is_refused_as_it_comes(preset, dtype, tmp_path):
    """Not once it leaves the window; by layer and role, also in the last layer's values, which no later layer misses.
    The cache is of no use then until it is reset; a value that every codec takes is taken."""
    model = small_models.load("llama", tmp_path, str(dtype).removeprefix("torch."))
    compressor = calibrate(model, TOKENS, preset, progress=False)
    expected = run(model, compressor.new_cache(model), TOKENS[:1], (28, 20))
    for value, layer, role in ((1e5, 0, 0), (float("nan"), 2, 1), (-6e4, 1, 1), (-4e4, 1, 0)):
        cache, pair = compressor.new_cache(model), [torch.ones(1, 2, 3, 32, dtype=dtype) for _ in "kv"]
        run(model, cache, TOKENS[:1, :20], (20,))
        cache.expect(None, None)
        for before in range(layer):
            cache.update(*pair, before)
        pair[role][0, 0, 2, 3] = value
        if abs(value) < 65504:
            for after in range(layer, 3):
                cache.update(*pair, after)
            assert run(model, cache, TOKENS[:1], (28, 20)).isfinite().all()
            continue
        with pytest.raises(DataError, match=f"the {ROLES[role]}s of layer {layer} cannot be cached: "):
            cache.update(*pair, layer)
        refused(model, cache, TOKENS[:1, :3], "failed half-way")
        refused(model, cache, TOKENS[:1, :3], "failed half-way")  # and again: asking changes nothing
        cache.reset()
        assert torch.equal(run(model, cache, TOKENS[:1], (28, 20)), expected)


@pytest.mark.parametrize("preset", [presets.quanto(4, 32), presets.kivi(4, 8, recent_window=4)], ids=["quanto", "kivi"])
@pytest.mark.parametrize("name", sorted(small_models.SLIDING))
def test_sliding_windows_drop_what_no_query_sees(name, preset, tmp_path):
    """The text is read as if all had been kept, and what is counted is what transformers' own cache holds."""
    model = small_models.sliding(name, tmp_path)
    compressor = calibrate(model, TOKENS, preset, progress=False)
    cache, full, dynamic = compressor.new_cache(model), compressor.new_cache(model), DynamicCache(config=model.config)
    full.batch.reaches = [None] * len(full.batch.reaches)
    read, kept, _ = (run(model, each) for each in (cache, full, dynamic))
    torch.testing.assert_close(read, kept, rtol=1e-4, atol=1e-4)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in dynamic.layers)
    report = cache.report()
    assert report.dynamic_values == held and report.ratio == pytest.approx(2 * held / report.cache_bytes)
    assert report.cache_bytes < full.report().cache_bytes
    assert report.cache_bytes == tensor_bytes(cache) - tensor_bytes(compressor)
    with pytest.raises(DataError, match="sliding window or a recurrent state has forgotten"):
        cache.crop(-40)  # more than the rest of a block
