"""What caches lose of recall."""

import math

import pandas as pd
import pytest
import torch

from vqkv import DataError
from vqkv.data.recall import RecallTask
from vqkv.evaluation.exact import noise_floor
from vqkv.study import figures
from vqkv.study.experiments import first_lost, retrieval
from vqkv.study.tables import with_floor

SETTINGS = dict(
    models=["vqkv/llama-mini"], corpus="python-stdlib", pairs=[4], far_pairs=2, gaps=[20], num_seqs=2, train_seqs=2,
    seq_len=128, vqllm={"vqllm 2x16": [2, 16]}, designs=["steps, principal"], bits=[2.0], codebook_size=16,
    kmeans_iterations=1, sink_tokens=1, tell_apart=100, seed=0, dtype="float32", device="cpu",
)  # fmt: skip


def test_an_exact_cache_loses_nothing_and_every_system_has_a_row():
    table = retrieval(**SETTINGS)
    exact = table[table["system"] == "fp16"]
    assert (exact["lost"] == 0).all() and (exact["bits_per_value"] == 16).all()
    assert set(table["system"]) >= {"quanto 2", "kivi 2", "higgs 2", "vqllm 2x16", "steps, principal"}
    assert set(zip(table["pairs"], table["gap"], table["answers"])) == {(4, 0, 8), (2, 20, 4)}
    assert ((table["low"] <= table["lost"]) & (table["lost"] <= table["high"])).all()
    assert figures.recall_planes(table, [(4, 0), (2, 20)], ["steps, principal"]).axes


def test_episodes_too_few_to_tell_points_apart_are_refused():
    with pytest.raises(DataError, match="tell_apart 0 must be"):
        retrieval(**SETTINGS | {"tell_apart": 0})
    with pytest.raises(DataError, match="'recall of 2 pairs' asks 8 questions.*at least 73"):
        retrieval(**SETTINGS | {"tell_apart": 5, "num_seqs": 4, "pairs": [20]})


def test_the_first_rate_that_loses_is_the_largest(tokenizer):
    rows = [("vqllm 8x16", 2.2, 1.0), ("vqllm 3x16", 0.9, 12.0), ("vqllm 1x16", 0.4, 60.0), ("kivi 2", 3.0, 0.0)]
    table = pd.DataFrame(rows, columns=["system", "bits_per_value", "low"]).assign(model="m", pairs=16, gap=0)
    found = first_lost(table.assign(nominal_bits=0)).loc[("m", 16, 0)]
    assert found["vqllm"] == 0.9 and math.isnan(found["kivi"])
    assert first_lost(table.assign(nominal_bits=0, low=0.0)).isna().all(axis=None)
    assert first_lost(table.assign(nominal_bits=2)).loc[("m", 16, 0), "vqllm 1x16"] == 0.4


def test_an_episode_asks_for_each_pair_once_behind_what_stands_between(tokenizer):
    task = RecallTask(tokenizer)
    between = torch.full((3, 11), 7)
    batch = task.episodes(5, 3, seed=1, between=between)
    assert batch.answers.sum(1).tolist() == [5] * 3 and not (set(task.keys) & set(task.values))
    for row, column in batch.answers.nonzero().tolist():
        back = int(batch.distance[row, column])
        assert back > 11 and batch.tokens[row, column - back] == batch.tokens[row, column]
        assert batch.tokens[row, column - back - 1] == batch.tokens[row, column - 1]
    assert task.episodes(5, 3, seed=1).tokens.shape[1] == batch.tokens.shape[1] - 11


def test_a_number_that_is_none_is_no_floor():
    table = pd.DataFrame({"kl_mean": [math.nan, 1e-8, 0.01], "kl_floor": 1e-7})
    assert list(with_floor(table)["kl_mean"]) == ["nan", "at the fp16 floor", "0.01"]


def test_a_floor_needs_tokens_behind_the_first_piece():
    with pytest.raises(DataError, match="chunk_size 64 leaves nothing of 64 tokens"):
        noise_floor(None, torch.zeros(1, 64), 64)


@pytest.mark.parametrize("pairs", [0, 129])
def test_more_pairs_than_keys_are_refused(tokenizer, pairs):
    with pytest.raises(DataError, match="number of keys"):
        RecallTask(tokenizer).episodes(pairs, 1, seed=0)
