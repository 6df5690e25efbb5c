"""Captured keys and values on disk: whose they are, what fails, and that memory does not grow with the tokens."""

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from safetensors import SafetensorError

from vqkv import DataError, calibrate, load_model, presets
from vqkv.calibration.captured import CapturedTokens

TOKENS = torch.randint(1, 4096, (6, 80), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
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
    """MiB that this process has held at most, after calibrations on 8 sequences and after some on 80."""
    torch.set_num_threads(1)
    model, peak_mib = load_model(folder)[0], []
    for num_seqs in (8, 80):
        tokens = torch.randint(0, 400, (num_seqs, 256), generator=torch.Generator().manual_seed(0))
        for preset in (presets.vqllm(2, 16, 8), presets.aqua()):
            calibrate(model, tokens, preset, batch_size=4, progress=False)
        peak_mib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peak_mib


def test_memory_does_not_grow_with_the_tokens(llama_folder):
    """Keys and values of 72 x 256 more tokens take 27 MiB in fp32, which would show."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        short, long = pool.submit(peaks, llama_folder).result(300)
    assert long - short < 10  # MiB: allocators keep some of what batches leave
