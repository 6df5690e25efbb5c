"""Caches that come back: what page 13 says of them, at a small size."""

import math

import pandas as pd
import pytest
import torch
from transformers import DynamicCache

from vqkv.study import figures
from vqkv.study.bench.caches import Uncompressed
from vqkv.study.experiments import break_even, chat, restored_quality, restoring_times
from vqkv.study.experiments.restoring import FP16
from vqkv.study.subject import Subject

MINI = Subject("vqkv/llama-mini", "python-stdlib", [4, 128])
SYSTEMS = ["quanto 4", "lossless"]


def test_every_way_to_store_has_a_row_for_every_prompt(llama_folder):
    table = restoring_times(MINI.changed(name=llama_folder), SYSTEMS, lengths=[130, 254], rounds=1, threads=1)
    counts = table.groupby("tokens", sort=False)["system"].apply(list)
    assert len(counts) == 2 and all(systems == [FP16, *SYSTEMS] for systems in counts)
    sizes = table.pivot_table(index="tokens", columns="system", values="file_bytes")
    assert (sizes["lossless"] < sizes[FP16]).all() and sizes.loc[254, "quanto 4"] < 0.7 * sizes.loc[254, FP16]
    assert (table[["ready_ms", "again_ms"]] > 0).all(axis=None)
    assert len(figures.waiting(table).axes) == 2


def test_break_even_is_where_both_files_are_ready_at_once():
    rows = [(FP16, 8e6, 10.0), ("small", 1e6, 45.0), ("small and fast", 1e6, 9.0)]
    times = pd.DataFrame(rows, columns=["system", "file_bytes", "ready_ms"]).assign(model="m", tokens=9, again_ms=90.0)
    found = break_even(times).set_index("system")
    speed = found.loc["small", "bandwidth"] * 1e6  # bytes a second
    assert 8e6 / speed + 0.010 == pytest.approx(1e6 / speed + 0.045)
    assert found.loc["small", ["smaller", "faster"]].tolist() == [8, 2]
    assert math.isinf(found.loc["small and fast", "bandwidth"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_file_gives_sixteen_bits_back(tmp_path, llama_folder, dtype):
    model = make_model(llama_folder, dtype)
    cache = DynamicCache(config=model.config)
    model(torch.arange(20)[None], past_key_values=cache, use_cache=True)
    way = Uncompressed()
    way.save(cache, tmp_path / "cache")
    for old, new in zip(cache.layers, way.load(tmp_path / "cache", model).layers, strict=True):
        rounded = old.keys.half() if dtype == torch.float32 else old.keys
        assert new.keys.equal(rounded.to(dtype)) and new.values.shape == old.values.shape


def make_model(folder: str, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def test_a_restored_cache_goes_on_with_the_same_bits():
    table = restored_quality(subject=MINI, systems=SYSTEMS, prompt_len=128, num_seqs=2)
    table = table.set_index("system")
    assert table["same"].all() and table.loc["lossless", "kl_mean"] < 1e-5 < table.loc["quanto 4", "kl_mean"]
    assert (table["kl_low"] <= table["kl_mean"]).all()
    assert table.loc["lossless", "copied"] == table.loc["lossless", "copied_exact"]


def test_a_chat_reads_only_what_is_new():
    table = chat(MINI, ["quanto 4"], turns=3, said=24, answered=8, threads=1)
    assert table["restored"].tolist() == [0, 32, 64] and table["tokens"].tolist() == [24, 56, 88]
    assert table["same"].all() and table["folder_bytes"].is_monotonic_increasing
    assert figures.chat_lines(table).axes
