"""Notebook 08's tables at a small size, against what the byte meter and ``evaluate`` say by themselves."""

import itertools

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv.evaluation.capacity import architecture, capacity
from vqkv.study.experiments import generation
from vqkv.study.experiments.capacity import MODELS, PRESETS, capacity_table
from vqkv.study.figures import generation as figures
from vqkv.study.figures.labels import spread as spread_out

SHAPES, SOME = ["Mistral-7B", "Qwen2.5-7B"], ["quanto 4", "vqllm 8x2048", "kivi 2", "higgs 2"]


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=20), st.floats(0.01, 0.2))
def test_names_stand_apart_and_move_no_further_than_needed(places, step):
    places = sorted(places)
    spread = spread_out(places, step)
    assert all(b - a >= step - 1e-9 for a, b in itertools.pairwise(spread))
    assert sum(spread) == pytest.approx(sum(places), abs=1e-6)
    if all(b - a >= step for a, b in itertools.pairwise(places)):
        assert spread == pytest.approx(places, abs=1e-9)


@pytest.fixture(scope="module")
def table():
    return capacity_table(SHAPES, SOME, [24, 80], batch_size=1, context=8192, dtype="float16")


def test_rows_say_what_capacity_says(table):
    assert len(table) == len(SHAPES) * 2 * (1 + len(SOME))
    assert list(table.attrs["sources"]) == [f"config {MODELS[name]['source']}" for name in SHAPES]
    row = table.set_index(["model", "memory_gb", "label"]).loc[("Qwen2.5-7B", 80, "kivi 2")]
    config = {key: value for key, value in MODELS["Qwen2.5-7B"].items() if key != "source"}
    found = capacity(architecture(config, "float16"), PRESETS["kivi 2"], 80)
    assert (row["context"], row["batch_size"]) == (found.context, found.batch_size)
    assert row["ratio"] == found.context / found.fp16_context
    assert row["weights_bytes"] + row["side_bytes"] + row["cache_bytes"] + row["working_bytes"] <= 80e9


def test_what_reads_in_place_is_timed_and_drawn_beside_int4():
    settings = {"rounds": 1, "systems": ["quanto 4"], "codebook_sizes": [16], "seed": 0, "threads": 1,
                "dtype": "float32", "device": "cpu"}  # fmt: skip
    times = generation.read_in_place(["tiny"], runs=[[1, 140, 2], [1, 160, 2]], **settings)
    assert set(times["system"]) == {"DynamicCache", "transformers quanto 4", "quanto 4"} and len(times) == 6
    losses = pd.DataFrame({"system": ["quanto 4"], "bits_8k_x1": 4.5, "kl_mean": 0.1, "kl_low": 0.05, "kl_high": 0.2})
    assert len(figures.in_place(times, losses).axes) == 3
