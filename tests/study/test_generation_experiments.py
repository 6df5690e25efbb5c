"""Notebook 08's tables at a small size, against what the byte meter and ``evaluate`` say by themselves."""

import itertools
import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import make

from vqkv.evaluation.capacity import architecture, capacity
from vqkv.evaluation.evaluate import evaluate
from vqkv.study.bench import caches
from vqkv.study.experiments import generation
from vqkv.study.experiments.capacity import MODELS, PRESETS, capacity_table
from vqkv.study.experiments.common import draw, load
from vqkv.study.figures import generation as figures

SHAPES, SOME = ["Mistral-7B", "Qwen2.5-7B"], ["quanto 4", "vqllm 8x2048", "kivi 2", "higgs 2"]
FITTED = {"corpus": "python-stdlib", "train_seqs": 2, "seq_len": 256, "codebook_sizes": [16], "kmeans_iterations": 1,
          "seed": 0, "device": "cpu"}  # fmt: skip


def test_memory_growth(llama_folder):
    how = {"generated": [0, 128, 256], "batches": [1, 2], "dtype": "bfloat16"}
    systems = ["DynamicCache", "quanto 4", "quanto 4, decoded kept", "kivi 2"]
    table = generation.memory_growth(llama_folder, systems=systems, **how, **FITTED)
    assert len(table) == 2 * 3 * 4 and len(table.attrs["sources"]) == 3
    at = table.set_index(["system", "batch", "generated"]).sort_index()
    assert (at["stored_bytes"] == at["expected_bytes"]).all()
    assert (at.loc["DynamicCache", "ratio"] == 1).all() and (at.loc["DynamicCache", "bits_total"] == 16).all()
    for system in ("DynamicCache", "quanto 4", "kivi 2"):
        one, two = (at.loc[system, batch]["stored_bytes"] for batch in (1, 2))
        assert (two == 2 * one).all() and one[256] - one[128] == one.diff().iloc[-1] > 0
    packs = at.loc["quanto 4", 1]  # 128 tokens at a time: one token earlier 127 of them are exact
    per_token, bits = 2 * 3 * 2 * 32, packs["bits_per_value"].iloc[0]
    assert packs["largest_bytes"].tolist()[1:] == [n * per_token * bits / 8 + 127 * per_token * 2 for n in (128, 256)]
    decoded = at.loc["quanto 4, decoded kept", 1, 256]["stored_bytes"] - packs.loc[256, "stored_bytes"]
    assert decoded == 256 * per_token * 2  # in 16 bits, what was packed when the last step read it


def test_loss_by_position_adds_up_to_what_evaluate_finds(llama_folder, tmp_path):
    gpt2 = str(make("gpt2", tmp_path))
    how = {"longest": 300, "num_seqs": 3, "chunk_size": 32, "bucket": 100, "batch_size": 2, "dtype": ""}
    systems = ["DynamicCache", "quanto 2", "transformers quanto 2", "kivi 2"]
    table = generation.loss_by_position([llama_folder, gpt2], systems=systems, **FITTED, **how)
    ends = table.groupby("model")["end"].max()
    assert (ends[llama_folder], ends[gpt2]) == (
        299,
        255,
    )  # gpt2 has learned 256 positions, the last of which predicts nothing
    exact = table[table["system"] == "DynamicCache"]
    assert exact["nll_added"].abs().max() < 1e-5 and exact["kl"].max() < 1e-5
    window = table[(table["model"] == llama_folder) & (table["system"] == "kivi 2")]["kl"].tolist()
    assert window[0] < 1e-5 < 1e-4 < window[2]  # its window of 128 tokens holds the first bucket

    model, tokenizer = load(llama_folder, "", "cpu", {})
    model.config.max_position_embeddings = 300  # evaluate refuses more than a model has
    train = draw(FITTED["corpus"], tokenizer, "train", 256, 2, 0, {})
    test = draw(FITTED["corpus"], tokenizer, "test", 300, 3, 0, {})
    for label, compressor in caches.contenders(model, train, systems[1:3], [16]).items():
        row = evaluate(model, compressor, test, chunk_size=32, reconstruction=False)
        mine = table[(table["model"] == llama_folder) & (table["system"] == label)]
        tokens = mine["end"] - mine["start"]  # those that read nothing packed lose nothing, and are not scored there
        lost = row["kl_mean"] * row["scored_tokens"]
        assert (tokens * mine["kl"]).sum() == pytest.approx(lost, rel=1e-3) and (mine["kl_se"] > 0).all()
        added = row["scored_tokens"] * math.log(row["ppl"] / row["ppl_exact"])
        assert (tokens * mine["nll_added"]).sum() == pytest.approx(added, rel=1e-3, abs=1e-3)


def test_a_choice_counts_side_information():
    rows = [("DynamicCache", 160, 0, 1.0), ("quanto 4", 20, 60, 8.0)]
    memory = pd.DataFrame(rows, columns=["system", "stored_bytes", "side_bytes", "ratio"])
    memory = memory.assign(batch=1, generated=8, values=80)
    told = generation.with_side(memory).set_index("system").loc["quanto 4"]
    assert told[["all_told_bytes", "bits_all_told", "ratio_all_told"]].tolist() == [80, 8, 2]
    times = pd.DataFrame(
        {"system": memory["system"], "batch": 1, "context": 9, "added_ms": [0, 3], "added_prefill_ms": 1}
    )
    losses = pd.DataFrame({"model": ["m", "m", "other"], "system": "quanto 4", "start": [0, 1, 0], "end": [1, 4, 1],
                           "kl": [1.0, 2.0, 9.0], "kl_floor": 0.0})  # fmt: skip
    found = generation.choices(times, memory, losses, "m", 9, sharing=6)
    assert found.loc["quanto 4", ["bits_all_told", "bits_shared", "kl", "added_ms"]].tolist() == [8, 3, 1.75, 3]
    assert figures.choose(found, ["quanto 4"]).axes


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=20), st.floats(0.01, 0.2))
def test_names_stand_apart_and_move_no_further_than_needed(places, step):
    places = sorted(places)
    spread = figures.spread(places, step)
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
    assert (row["context"], row["batch_size"], row["ratio"]) == (found.context, found.batch_size, found.ratio)
    assert row["weights_bytes"] + row["side_bytes"] + row["cache_bytes"] + row["working_bytes"] <= 80e9
