"""The capacity table: models of published sizes, the blog's figures beside ours, and the figure."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from vqkv import figures, tables
from vqkv.capacity import architecture, capacity
from vqkv.experiments.capacity import BASELINE, MODELS, PRESETS, blog_claims, capacity_table
from vqkv.figures.capacity import context_dots
from vqkv.footprint import dynamic_footprint

# What the hub counts in each model's safetensors.
PARAMETERS = {
    "Llama-2-7B": 6_738_415_616,
    "Mistral-7B": 7_248_023_552,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-7B": 7_615_616_512,
}
LLAMA_1 = {  # hidden size, MLP, layers, heads (Touvron et al. 2023, table 2)
    "7B": (4096, 11008, 32, 32), "13B": (5120, 13824, 40, 40),
    "30B": (6656, 17920, 60, 52), "65B": (8192, 22016, 80, 64),
}  # fmt: skip
ARGUMENTS = {"batch_size": 1, "context": 8192, "dtype": "float16"}
SOME_MODELS, SOME = ["Mistral-7B", "Qwen2.5-7B"], ["quanto 4", "vqllm 8x2048", "kivi 2", "higgs 2"]


def laid_out(name):
    return architecture({key: value for key, value in MODELS[name].items() if key != "source"}, "float16")


@pytest.fixture(scope="module")
def table():
    return capacity_table(SOME_MODELS, SOME, [24, 80], **ARGUMENTS)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_number_of_weights(name):
    assert sum(parameter.numel() for parameter in laid_out(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", LLAMA_1)
def test_published_sizes_of_weights_and_caches(name):
    """``kv_size_by_context``'s GB are GiB; its 10M tokens are ten million, the other lengths powers of two."""
    hidden, mlp, layers, heads = LLAMA_1[name]
    config = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    heads = {"num_attention_heads": heads, "num_key_value_heads": heads}
    needed = dynamic_footprint(architecture({"model_type": "llama", "vocab_size": 32000} | config | heads, "float16"))
    published = tables.published("kv_size_by_context").set_index(["model", "batch"])
    for batch in (1, 4):
        row = published.loc[(name, batch)]
        assert needed.weights / 2**30 == pytest.approx(row["weights_gb_16bit"], rel=0.01)
        for column, tokens in {"kv_gb_32k": 2**15, "kv_gb_128k": 2**17, "kv_gb_10m_16bit": 10**7}.items():
            assert needed.cache_bytes(tokens, batch) / 2**30 == pytest.approx(row[column], abs=0.5 * batch)


def test_the_blogs_worked_size_and_what_its_contexts_leave_open():
    """5.2 GB for 10,000 tokens, to the byte. But neither 40K nor 128K tokens come to 80 GB: more than 30 GB of it are
    left. The two agree with each other: beside something that takes what fp16 leaves, int4 has about as many tokens."""
    worked, fp16, int4 = blog_claims(80, 10_000, 40_000, 128_000, "float16").to_dict("records")
    assert round(worked["cache_gb"] * 1e9) == 2 * 2 * 32 * 32 * 128 * 10_000
    assert fp16["context"] > 3 * 40_000 and int4["context"] > 2 * 128_000
    assert fp16["counted_gb"] < 35 and fp16["left_gb"] > 45 and int4["left_gb"] > 30
    assert abs(fp16["context_beside_rest"] - 40_000) <= 1
    assert 85_000 < int4["context_beside_rest"] < 131_000


def test_rows_say_what_capacity_says(table):
    assert len(table) == len(SOME_MODELS) * 2 * (1 + len(SOME))
    assert list(table.attrs["sources"]) == [f"config {MODELS[name]['source']}" for name in SOME_MODELS]
    row = table.set_index(["model", "memory_gb", "label"]).loc[("Qwen2.5-7B", 80, "kivi 2")]
    found = capacity(laid_out("Qwen2.5-7B"), PRESETS["kivi 2"], 80)
    assert (row["context"], row["batch_size"], row["ratio"]) == (found.context, found.batch_size, found.ratio)
    assert row["weights_bytes"] + row["side_bytes"] + row["cache_bytes"] + row["working_bytes"] <= 80e9
    again = capacity_table(["Qwen2.5-7B"], ["kivi 2", "vqllm 8x2048"], [80], **ARGUMENTS)
    mine = table[(table["model"] == "Qwen2.5-7B") & (table["memory_gb"] == 80)]
    mine = mine[mine["label"].isin([BASELINE, "kivi 2", "vqllm 8x2048"])].sort_values("label", ignore_index=True)
    pd.testing.assert_frame_equal(again.sort_values("label", ignore_index=True), mine)


def test_every_preset_holds_more_than_fp16_at_its_bits(table):
    values = {"Mistral-7B": 64 * 8 * 128, "Qwen2.5-7B": 56 * 4 * 128}
    for _, row in table.iterrows():
        assert row["ratio"] == 1 if row["label"] == BASELINE else row["ratio"] > 1.5
        if row["memory_gb"] == 80:  # the window is small beside so many tokens
            bits = 8 * row["cache_bytes"] / (row["context"] * values[row["model"]])
            assert bits == pytest.approx(row["bits_per_value"], rel=0.01)
    bits = table.set_index(["model", "label"])["bits_per_value"].to_dict()
    assert bits["Mistral-7B", "vqllm 8x2048"] == 2.875 and bits["Qwen2.5-7B", "quanto 4"] == 4.5


def test_the_figure_has_a_dot_for_every_row(table):
    with plt.rc_context():
        figures.use_style()
        fig = context_dots(table)
    try:
        dots = [line for ax in fig.axes for line in ax.lines if line.get_marker() == "o"]
        assert sorted(line.get_xdata()[0] for line in dots) == sorted(table["context"])
        assert [ax.get_title().split(" (")[0] for ax in fig.axes] == SOME_MODELS
        texts = {text.get_text() for ax in fig.axes for text in ax.texts}
        assert texts == {f"{ratio:.1f}x" for ratio in table[table["memory_gb"] == 80]["ratio"]}
    finally:
        plt.close(fig)
