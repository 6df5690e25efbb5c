"""What caches lose of recall."""

import pytest
import torch

from vqkv import DataError
from vqkv.study import figures
from vqkv.study.experiments import retrieval
from vqkv.study.experiments.phenomena import noise_floor
from vqkv.study.subject import Subject

SETTINGS = dict(
    subject=Subject("vqkv/llama-mini", "python-stdlib", [2, 128], [2, 96]), episodes=[[1, 150, 2]], passage=32,
    systems=["higgs 2"], designs=["uniform, pca"], bits=[2.0], least_exact=0,
    vqllm={"vqllm 2x16": [2, 16]}, learning={"codebook_size": 16, "kmeans_iterations": 1, "sink_tokens": 1},
)  # fmt: skip


def test_an_exact_cache_loses_nothing_and_every_system_has_a_row_for_each_task():
    table = retrieval(**SETTINGS)
    assert (table.loc[table["system"] == "fp16", "lost"] == 0).all()
    assert table["system"].tolist() == ["fp16", "fp16", "higgs 2", "higgs 2", *["uniform, pca"] * 2]
    assert table["task"].tolist() == ["copy", "facts"] * 3
    assert table["questions"].tolist() == [32, 2] * 3
    assert ((table["lost_low"] <= table["lost"]) & (table["lost"] <= table["lost_high"])).all()
    names = {("fp16", 16.0): "exact", ("higgs 2", 0.0): "HIGGS"}
    assert len(figures.told_bars(table, names).axes) == 1


def test_a_task_that_the_model_itself_fails_is_refused():
    with pytest.raises(DataError, match="itself tells .* take a larger model"):
        retrieval(**SETTINGS | {"least_exact": 1.01})


def test_a_floor_needs_tokens_behind_the_first_piece():
    with pytest.raises(DataError, match="chunk_size 64 leaves nothing of 64 tokens"):
        noise_floor(None, torch.zeros(1, 64), 64)
