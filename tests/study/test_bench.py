"""The benches at a small size. What they print is timed; what is tested is what they compare and how they count."""

import pandas as pd
import pytest
import torch

from vqkv.study import figures
from vqkv.study.bench import caches, generation
from vqkv.study.bench.caches import PEER, REFERENCE
from vqkv.study.bench.generation import latency, peak_memory
from vqkv.study.experiments import read_in_place

TINY = {"geometry": "tiny", "seed": 0, "threads": 1, "dtype": "float32", "device": "cpu"}


class Scripted:
    """Stands for ``Generation``: the busy machine slows every third turn of 3 tokens five times."""

    def __init__(self, model, system):
        self.system, self.tokens, self.stored_bytes = system, 0, 7

    def prefill(self, tokens):
        return 100.0 * (1 + self.system)

    def step(self):
        self.tokens += 1
        return (10.0 + self.system + (20 if self.tokens % 128 == 0 else 0)) * (5 if self.tokens // 3 % 3 == 2 else 1)


def test_what_is_added_is_the_median_difference_of_the_same_tokens():
    systems = {REFERENCE: 0, PEER: 4, "ours": 2}
    going = {label: Scripted(None, system) for label, system in systems.items()}
    rows = {row["system"]: row for row in generation.timed_run(going, torch.zeros(1, 8), 150, 3)}
    assert {label: row["added_ms"] for label, row in rows.items()} == systems
    assert rows["ours"]["prefill_ms"] == 300 and rows["ours"]["added_mean_ms"] > 2
    assert rows["ours"]["decode_ms"] == 12 < rows["ours"]["mean_ms"] and rows["ours"]["decode_q3"] == 60


def test_only_the_systems_asked_for_and_the_two_that_all_are_compared_with(monkeypatch):
    rows = latency([[2, 140, 3]], 1, ["vqllm 8x256"], **TINY)
    assert [row["system"] for row in rows] == [REFERENCE, PEER, "vqllm 8x256"] and rows[0]["added_ms"] == 0
    for row in rows:
        assert row["decode_q1"] <= row["decode_ms"] <= row["decode_q3"]
        assert row["prefill_ms"] > 0 and row["threads"] == 1 and "torch" in row["versions"]
    exact = 2 * 143 * 2 * 2 * 2 * 32 * 4  # sequences, tokens, layers, K and V, heads, head_dim, bytes
    assert rows[2]["stored_bytes"] < rows[1]["stored_bytes"] < rows[0]["stored_bytes"] == exact

    def missing():
        raise ImportError("no such package")

    monkeypatch.setitem(caches.THEIRS, PEER, missing)
    with pytest.warns(UserWarning, match="transformers quanto 4 is left out: no such package"):
        rows = latency([[1, 10, 2]], 1, ["kivi 2"], **TINY)
    assert [row["system"] for row in rows] == [REFERENCE, "kivi 2"]


def test_peak_memory_of_a_fresh_process(monkeypatch):
    """Whatever glibc was told for this process, what was freed is not counted."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    (row,) = peak_memory([1, 4096, 2], 512, [REFERENCE], **TINY)
    assert row["prefill_mb"] >= row["stored_mb"] and row["decode_mb"] > 0  # all of it is stored by then
    assert row["resident_mb"] == row["stored_mb"]
    assert row["decode_mb"] < 1.5 * row["stored_mb"]  # a layer's keys are copied as they grow
    assert row["stored_mb"] == 4098 * 2 * 2 * 2 * 32 * 4 / 1e6  # tokens, layers, K and V, heads, head_dim, bytes


def test_what_reads_in_place_is_timed_and_drawn_beside_int4():
    settings = {name: value for name, value in TINY.items() if name != "geometry"}
    times = read_in_place(["tiny"], runs=[[1, 140, 2], [1, 160, 2]], rounds=1, systems=["quanto 4"], **settings)
    assert set(times["system"]) == {"DynamicCache", "transformers quanto 4", "quanto 4"} and len(times) == 6
    losses = pd.DataFrame({"system": ["quanto 4"], "bits_8k_x1": 4.5, "kl_mean": 0.1, "kl_low": 0.05, "kl_high": 0.2})
    assert len(figures.in_place(times, losses).axes) == 3
