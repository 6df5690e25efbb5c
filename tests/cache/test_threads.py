"""Threads of one process that use one model: each with its own cache, while others make caches, fit and measure."""

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

from vqkv import calibrate, evaluate, load_model, presets
from vqkv.kernels.derived import remembered, tables_of
from vqkv.kernels.precision import full_precision
from vqkv.models.layers import kv_layers
from vqkv.runtime.files import replacing

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


class Held(DynamicCache):
    """Waits in the last layer for ``go``, once ``inside`` is set."""

    def __init__(self, config, inside, go):
        super().__init__(config=config)
        self.inside, self.go = inside, go

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if layer_idx == 2:
            self.inside.set()
            self.go.wait(30)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def test_a_pass_that_ends_during_a_probe_disturbs_neither(llama_folder):
    model, inside, go = load_model(llama_folder)[0], threading.Event(), threading.Event()
    held, main = Held(model.config, inside, go), threading.get_ident()
    model.model.register_forward_pre_hook(lambda *_: None)  # modules without hooks do not look for them at the end
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(model, TOKENS, past_key_values=held)
        inside.wait(30)

        def let_it_end(*_):
            if threading.get_ident() == main:
                go.set()
                other.result(30)

        model.model.layers[1].mlp.register_forward_hook(let_it_end)
        assert [layer.attention for layer in kv_layers(model)] == [each.self_attn for each in model.model.layers]
        assert other.result(30).logits.shape[:2] == TOKENS.shape


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


def test_full_precision_lasts_until_the_last_thread_leaves():
    def within(entered, leave) -> str:
        with full_precision(torch.device("cpu")):
            entered.set()
            leave.wait(30)
            return torch.get_float32_matmul_precision()

    torch.set_float32_matmul_precision("high")
    try:
        events = [(threading.Event(), threading.Event()) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            works = []
            for entered, leave in events:
                works.append(pool.submit(within, entered, leave))
                entered.wait(30)
            for work, (_, leave) in zip(works, events, strict=True):
                leave.set()
                assert work.result(30) == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_two_threads_replace_one_file(tmp_path):
    path = tmp_path / "file"

    def write(data: bytes) -> None:
        with replacing(path) as file:
            file.write(data)

    with ThreadPoolExecutor(1) as pool, replacing(path) as file:
        file.write(b"mine" * 9)
        pool.submit(write, b"other").result(30)
        assert path.read_bytes() == b"other"
    assert path.read_bytes() == b"mine" * 9 and list(tmp_path.iterdir()) == [path]


def test_tables_are_listed_while_another_thread_adds_some(often):
    build, x, stop = remembered(lambda tensor, key: key), torch.ones(2), threading.Event()

    def add() -> None:
        for key in range(20_000):
            build(x, key)
            if stop.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add)
        try:
            while not adding.done():
                assert tables_of(x) is not None
        finally:
            stop.set()
        adding.result(30)
