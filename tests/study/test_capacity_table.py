"""The capacity table: models of published sizes, the blog's figures beside ours, and the figure."""

import pytest

from vqkv.evaluation.capacity import architecture, capacity
from vqkv.study.experiments.capacity import BASELINE, MODELS, PRESETS, capacity_table

ARGUMENTS = {"batch_size": 1, "context": 8192, "dtype": "float16"}
SOME_MODELS, SOME = ["Mistral-7B", "Qwen2.5-7B"], ["quanto 4", "vqllm 8x2048", "kivi 2", "higgs 2"]


@pytest.fixture(scope="module")
def table():
    return capacity_table(SOME_MODELS, SOME, [24, 80], **ARGUMENTS)


def test_rows_say_what_capacity_says(table):
    assert len(table) == len(SOME_MODELS) * 2 * (1 + len(SOME))
    assert list(table.attrs["sources"]) == [f"config {MODELS[name]['source']}" for name in SOME_MODELS]
    row = table.set_index(["model", "memory_gb", "label"]).loc[("Qwen2.5-7B", 80, "kivi 2")]
    config = {key: value for key, value in MODELS["Qwen2.5-7B"].items() if key != "source"}
    found = capacity(architecture(config, "float16"), PRESETS["kivi 2"], 80)
    assert (row["context"], row["batch_size"], row["ratio"]) == (found.context, found.batch_size, found.ratio)
    assert row["weights_bytes"] + row["side_bytes"] + row["cache_bytes"] + row["working_bytes"] <= 80e9


def test_every_preset_holds_more_than_fp16_at_its_bits(table):
    values = {"Mistral-7B": 64 * 8 * 128, "Qwen2.5-7B": 56 * 4 * 128}
    for _, row in table.iterrows():
        assert row["ratio"] == 1 if row["label"] == BASELINE else row["ratio"] > 1.5
        if row["memory_gb"] == 80:  # the window is small beside so many tokens
            bits = 8 * row["cache_bytes"] / (row["context"] * values[row["model"]])
            assert bits == pytest.approx(row["bits_per_value"], rel=0.01)
    bits = table.set_index(["model", "label"])["bits_per_value"].to_dict()
    assert bits["Mistral-7B", "vqllm 8x2048"] == 2.875 and bits["Qwen2.5-7B", "quanto 4"] == 4.5
