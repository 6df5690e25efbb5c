"""Threads of one process that use one model: each with its own cache, while others make caches, fit and measure."""

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vqkv import calibrate, evaluate, presets

TOKENS = torch.randint(1, 4000, (8, 48), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(2, 48, dtype=torch.int64).index_put((torch.zeros(5).long(), torch.arange(5)), torch.tensor(0))


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TOKENS, presets.higgs(4, recent_window=4), progress=False)


@pytest.fixture
def often():
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_passes_of_other_threads_are_not_measured(llama, compressor):
    """Another thread's pass comes between every two layers of an evaluation."""
    expected, main = evaluate(llama, compressor, TOKENS[:2]), threading.get_ident()
    with ThreadPoolExecutor(1) as pool:

        def another(*_):
            if threading.get_ident() == main:
                pool.submit(llama, TOKENS[:, :9]).result(30)

        handle = llama.model.layers[1].mlp.register_forward_hook(another)
        try:
            assert evaluate(llama, compressor, TOKENS[:2]) == expected
        finally:
            handle.remove()


def test_threads_generate_while_others_make_caches_and_calibrate(llama, compressor, often):
    asked = {"attention_mask": PADDED[:, :20], "max_new_tokens": 3, "do_sample": False}
    expected = llama.generate(TOKENS[:2, :20], past_key_values=compressor.new_cache(llama), **asked)

    def generate(model) -> None:
        cache = compressor.new_cache(model)
        assert torch.equal(model.generate(TOKENS[:2, :20], past_key_values=cache, **asked), expected)
        assert cache.report().derived_bytes >= 0

    def fit(model) -> None:
        fitted = calibrate(model, TOKENS, presets.higgs(4, recent_window=4), progress=False)
        assert fitted.fingerprint == compressor.fingerprint

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            model = copy.deepcopy(llama)  # of which nothing is known yet
            for done in [pool.submit(work, model) for work in (generate, fit, generate)]:
                done.result(60)
