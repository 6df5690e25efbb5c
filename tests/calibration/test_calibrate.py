"""What ``calibrate`` keeps on disk and in memory, which predictions it takes, and what it warns of: true numbers, and
remedies that hold."""

import multiprocessing
import re
import resource
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from safetensors import SafetensorError
from strategies import gaussian

from vqkv import DataError, calibrate, load_model, presets
from vqkv.calibration.calibrate import _hardly_pays
from vqkv.calibration.captured import CapturedTokens
from vqkv.calibration.cross_fit import FOLDS, cross_fit, folds_of
from vqkv.codecs.predictor_kinds import Linear
from vqkv.study.injection import inject

TOKENS = torch.randint(1, 4096, (6, 80), generator=torch.Generator().manual_seed(0))


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


def test_a_prediction_that_gains_nothing_is_none():
    x, y, fold = samples(256, 1.0)
    assert cross_fit([(gaussian(256, WIDTH, seed=9), y, fold)], Linear()) is None
    assert cross_fit([(x, y, fold * 0)], Linear()) is None  # nothing to judge by


def test_batches_add_up_and_few_samples_take_a_stronger_penalty():
    x, y, fold = samples(160, 1.0)
    fit = cross_fit([(x, y, fold)], Linear())
    split = cross_fit([(x[:50], y[:50], fold[:50]), (x[50:], y[50:], fold[50:])], Linear())
    torch.testing.assert_close(fit.complete.weight, split.complete.weight)
    assert fit.complete.strength > cross_fit([samples(8192, 1.0)], Linear()).complete.strength


def test_folds_are_sequences_or_stretches_of_tokens():
    assert folds_of(1, 2, 3, 8).tolist() == [[2] * 3, [3] * 3]
    assert folds_of(0, 1, 8, 1).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]


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
