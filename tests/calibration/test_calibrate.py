"""Calibration: what it keeps on disk and in memory, which predictions it takes, what it warns of; AQUA-KV's predictors
(Algorithm 1), in writing and reading caches (2 to 4); KVSharer."""

import multiprocessing
import re
import resource
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import small_models
import torch
from projections import changed
from safetensors import SafetensorError
from strategies import TOKENS, feed, gaussian, run

from vqkv import DataError, calibrate, evaluate, load_model, presets
from vqkv.calibration.calibrate import _hardly_pays
from vqkv.calibration.captured import CapturedTokens
from vqkv.calibration.cross_fit import FOLDS, cross_fit, folds_of
from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.predictive import ROLES, side_by_side
from vqkv.codecs.predictor_kinds import Linear
from vqkv.models.capture import capture
from vqkv.study.injection import inject


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_captured_tokens_serve_several_presets(llama, folder):
    with CapturedTokens(llama, TOKENS, batch_size=4, progress=False) as captured:
        for preset in (presets.aqua(), presets.kvquant(2, block_tokens=16, fisher=True), presets.vqllm(2, 16, 8)):
            given = calibrate(llama, TOKENS, preset, progress=False, captured=captured)
            own = calibrate(llama, TOKENS, preset, batch_size=4, progress=False)
            assert given.fingerprint == own.fingerprint and given.notes["batch_size"] == 4
        assert [*folder.iterdir()]
    assert not [*folder.iterdir()]


def test_a_write_that_fails_names_the_folder(llama, monkeypatch):
    def full(*args):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("vqkv.calibration.captured.save_file", full)
    with pytest.raises(DataError, match="cannot write to .* No space left on device. Use fewer tokens"):
        calibrate(llama, TOKENS, presets.aqua(), progress=False)
    calibrate(llama, TOKENS, presets.vqllm(2, 16, 8), progress=False)  # learns in one pass: nothing is written


def peaks(folder: str) -> list[float]:
    """MiB that this process has held at most, after calibrations on 8 sequences and after some on 56."""
    torch.set_num_threads(1)
    model, peak_mib = load_model(folder)[0], []
    for num_seqs in (8, 56):
        tokens = torch.randint(0, 400, (num_seqs, 256), generator=torch.Generator().manual_seed(0))
        for preset in (presets.vqllm(2, 16, 8), presets.aqua()):
            calibrate(model, tokens, preset, batch_size=4, progress=False)
        peak_mib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peak_mib


def test_memory_does_not_grow_with_the_tokens(llama_folder):
    """Keys and values of 48 x 256 more tokens take 18 MiB in fp32, which would show."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        short, long = pool.submit(peaks, llama_folder).result(300)
    assert long - short < 10  # MiB: allocators keep some of what batches leave


WIDTH = 64


def samples(count, noise, seed=0):
    """x, y = x W + noise with a mean, and folds, of ``count`` tokens."""
    mix, x = gaussian(WIDTH, WIDTH) / WIDTH**0.5, gaussian(count, WIDTH, seed=seed + 1)
    y = x @ mix + noise * gaussian(count, WIDTH, seed=seed + 2) + 3
    return x, y, torch.arange(count) % FOLDS


def left(predictor, x, y):
    return float((y - predictor(x)).square().mean())


@pytest.mark.parametrize("count", [96, 256, 4096])
def test_what_folds_leave_is_what_other_text_will_leave(count):
    x, y, fold = samples(count, 1.0)
    fit = cross_fit([(x, y, fold)], Linear())
    other = left(fit.complete, *samples(4096, 1.0, seed=7)[:2])
    folds = float((y - fit.held_out(x, fold, WIDTH)).square().mean())
    assert torch.equal(fit.held_out(x, fold, WIDTH)[fold == 1], fit.folds[1](x[fold == 1]))
    assert folds == pytest.approx(other, rel=0.25)
    itself = left(Linear().fit(lambda: iter([(x, y)])), x, y)
    assert itself < 0.6 * other or count == 4096
    assert folds_of(1, 2, 3, 8).tolist() == [[2] * 3, [3] * 3]  # sequences, or of few stretches of tokens
    assert folds_of(0, 1, 8, 1).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]


def test_batches_add_up_few_samples_take_a_stronger_penalty_and_what_gains_nothing_is_none():
    x, y, fold = samples(160, 1.0)
    assert cross_fit([(gaussian(160, WIDTH, seed=9), y, fold)], Linear()) is None
    assert cross_fit([(x, y, fold * 0)], Linear()) is None  # nothing to judge by
    fit = cross_fit([(x, y, fold)], Linear())
    split = cross_fit([(x[:50], y[:50], fold[:50]), (x[50:], y[50:], fold[50:])], Linear())
    torch.testing.assert_close(fit.complete.weight, split.complete.weight)
    assert fit.complete.strength > cross_fit([samples(8192, 1.0)], Linear()).complete.strength


def calibrated(model, tokens, preset):
    """Bits of a packed value of a cache that is filled, and what ``calibrate`` warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compressor = calibrate(model, tokens, preset, progress=False)
    cache = compressor.new_cache(model)
    with torch.no_grad():
        model(tokens[:1], past_key_values=cache)
    return cache.report().bits_per_value, [str(w.message) for w in said if "of the variance" in str(w.message)]


@pytest.fixture(scope="module")
def biased(llama_folder):
    """A model with key biases of norms 520 and 346 in its end layers, as Qwen2.5 has, and tokens."""
    bias = torch.zeros(3, 2, 32)
    for layer, norm in ((0, 520.0), (2, 346.0)):
        drawn = torch.randn(2, 32, generator=torch.Generator().manual_seed(layer)).pow(3)
        bias[layer] = drawn / drawn.norm() * norm
    tokens = torch.randint(1, 400, (8, 256), generator=torch.Generator().manual_seed(0))
    return inject(load_model(llama_folder)[0], key_bias=bias), tokens


@pytest.mark.parametrize("preset", [presets.quanto(4), presets.turboquant(3)], ids=lambda p: p.name)
def test_the_remedy_of_a_destroyed_cache_survives_at_no_more_bits(biased, preset):
    bits, (message,) = calibrated(*biased, preset)
    assert "loses 100% of the variance" in message
    remedies = re.findall(r"(best|higgs)\(([\d.]+)\)", message)
    assert len(remedies) == 2
    for name, value in remedies:
        new_bits, said = calibrated(*biased, presets.make(name, bits=int(value) if name == "higgs" else float(value)))
        assert not said and new_bits <= bits, (name, new_bits, bits, said)


def test_fp16_loses_nothing_of_what_is_constant(biased):
    model, text = biased
    constant = inject(model, values=torch.tensor(1e-6), key_bias=torch.full((3, 2, 32), 3000.0))
    assert not calibrated(constant, text, presets.fp16())[1]


def test_the_two_reasons_for_falling_back_are_distinguished(biased):
    model, text = biased
    plan = [{"value": type("Role", (), {"sources": ("V-1",)})}] * 6
    assert "calibrate on 512 or more" in _hardly_pays(model, text[:1], plan, {})
    assert "0 of 6" in (why := _hardly_pays(model, text, plan, {})) and "calibrate on" not in why


model = small_models.fixture("llama", "gpt2", "qwen3", "glm")


def by_hand(compressor, keys, values):
    """Algorithms 2 and 3 as the paper writes them: reconstructed keys and values of every layer."""
    out = []

    def predicted(role, layer, x, *sources):
        y = compressor.predictions[role, layer].predictor(torch.cat([*map(side_by_side, sources)], dim=-1))
        return y.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)

    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        key_codec, value_codec = compressor.codecs[layer]
        if layer == 0:
            out.append((key_codec.decode(key_codec.encode(k)), value_codec.decode(value_codec.encode(v))))
            continue
        k_pred = predicted("key", layer, k, out[-1][0])
        k_rec = key_codec.decode(key_codec.encode(k - k_pred)) + k_pred
        v_pred = predicted("value", layer, v, out[-1][1], k_rec)
        out.append((k_rec, value_codec.decode(value_codec.encode(v - v_pred)) + v_pred))
    return out


def test_writing_and_reading_follow_algorithms_2_to_4(model):
    """A cache without RoPE in between, so that keys go in as they are stored."""
    preset = presets.aqua(presets.higgs(2), sink_tokens=2, recent_window=0, pre_rope=False)
    compressor = calibrate(model, TOKENS, preset, progress=False)
    keys, values = capture(model, TOKENS[:2], pre_rope=False)
    read = feed(compressor.new_cache(model), keys, values, (30, 1, 1, 48))
    packed, reconstructions = [[x[:, :, 2:] for x in role] for role in (keys, values)], compressor.new_pass()
    for layer, expected in enumerate(by_hand(compressor, *packed)):
        again = compressor.reconstruct(layer, packed[0][layer], packed[1][layer], reconstructions)
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
        for exact, restored, got in zip((keys[layer], values[layer]), expected, read[-1][layer], strict=True):
            torch.testing.assert_close(got[:, :, 2:32], restored[:, :, :30], rtol=1e-4, atol=1e-4)
            assert torch.equal(got[:, :, :2], exact[:, :, :2].half().float())
            assert torch.equal(got[:, :, 32:], exact[:, :, 32:])
    assert not reconstructions  # forgotten once the last reader has run


@pytest.mark.parametrize(
    ("preset", "within"),
    [(presets.vqllm(3, 16, 16), 1e-3), (presets.aqua(presets.vqllm(2, 16, 16), sink_tokens=0, recent_window=0), 2e-3)],
)
def test_in_place_equals_restoring_every_layer_by_hand(llama, preset, within):
    """In place, the model sees what is restored of x for x; hooks on the projections do the same without a cache."""
    compressor = calibrate(llama, TOKENS, preset, progress=False)
    reconstructions = compressor.new_pass()
    with torch.inference_mode(), ExitStack() as stack:
        for layer, coders in enumerate(compressor.coders):
            for role, coder in zip(ROLES, coders, strict=True):
                restored = partial(coder.through, reconstructions=reconstructions)
                stack.enter_context(changed(llama, (role, layer), restored))
        by_hand = llama(TOKENS[:2], use_cache=False).logits
    ours = run(llama, compressor.new_cache(llama, in_place=True), TOKENS[:2], (80,))
    torch.testing.assert_close(ours, by_hand, rtol=within, atol=within)


def test_predictors_are_fitted_on_reconstructed_inputs(llama):
    compressor = calibrate(llama, TOKENS, presets.aqua(sink_tokens=0), batch_size=4, progress=False)
    keys, values = capture(llama, TOKENS)
    weights, solved = compressor.predictions["key", 2].predictor.weight.double(), []
    for source in (by_hand(compressor, keys, values)[1][0], keys[1]):
        ridge = Ridge()
        ridge.accumulate(side_by_side(source).flatten(0, 1), side_by_side(keys[2]).flatten(0, 1))
        solved.append(ridge.solve()[:-1])
    torch.testing.assert_close(weights, solved[0], rtol=2e-3, atol=2e-3)
    assert (weights - solved[1]).abs().max() > 0.01


def test_kvsharer_shares_whole_layers(llama):
    compressor = calibrate(llama, TOKENS, presets.kvsharer(threshold=-1.0), progress=False)
    ((_, later), (_, again)) = compressor.predictions
    (source,) = compressor.predictions["key", later].sources
    assert later == again and source[1] < later
    row = evaluate(llama, compressor, TOKENS, chunk_size=16)
    assert row["bits_per_value"] == pytest.approx(16 * 2 / 3) and row["side_bytes"] == 0
    read = feed(compressor.new_cache(llama), *capture(llama, TOKENS[:2]), (79, 1))
    assert torch.equal(read[1][later][1][:, :, :-1], read[1][source[1]][1][:, :, :-1])


def test_pairs_are_taken_least_alike_first_and_only_above_the_threshold():
    def similarity(plan):
        return 0.2 if plan[1]["key"].predictor is not None else 0.9

    apart = torch.tensor([[0.0, 8, 4, 9], [0, 0, 6, 7], [0, 0, 0, 5], [0, 0, 0, 0]])
    trial = SimpleNamespace(num_layers=4, distances=apart.clone, similarity=similarity)

    def sources(pairs, threshold):
        plan = presets.kvsharer(pairs, threshold).plan.arrange(presets.fp16(), trial)
        return {i: roles["value"].sources[0][1] for i, roles in enumerate(plan) if roles["value"].sources}

    assert sources(1, 0.5) == {3: 0} and sources(2, 0.1) == {3: 0, 1: 0}
    assert sources(2, 0.5) == {3: 0, 2: 1}  # 1 costs too much, 3 is already shared
    with pytest.raises(DataError, match="only 2 of 3 pairs"):
        sources(3, 0.5)
