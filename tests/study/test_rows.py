"""Rows of experiments at a small size, against what is known of them, and their way to a figure; and snapshot streams:
exact restore, bytes that add up."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

import vqkv
from vqkv.study import experiments, figures, steering, tables
from vqkv.study.experiments import chat, group_sizes, restored_quality, retrieval
from vqkv.study.snapshots import MAGIC_BYTES, RECORD_BYTES, Stream
from vqkv.study.subject import Subject

PACKAGE = str(Path(vqkv.__file__).parent) + "/"


def test_what_is_held_exact_costs_bits_and_spares_loss(llama_folder):
    systems = {"swept": ["transformers quanto 2"], "lengths": [0, 16], "systems": ["transformers hqq 8"]}
    subject = Subject(llama_folder, "python-stdlib", [1, 64], [3, 64])
    table = experiments.residual_lengths(subject=subject, **systems, length=16, prompt_len=32)
    assert table["length"].tolist() == [0, 16, 16]
    theirs, eight = (rows.set_index("length") for _, rows in table.groupby("system", sort=False))
    assert theirs.loc[0, "held"] == 0 and theirs.loc[16, "held"] == pytest.approx(sum([*range(16), *range(15)]) / 31)
    assert theirs.loc[16, "kl_mean"] < theirs.loc[0, "kl_mean"]
    assert theirs["bits_per_value"].between(2.5, 2.625).all()  # scales weighed in 16 bits, few groups of 64 padded
    expected = theirs["bits_per_value"] + (16 - theirs["bits_per_value"]) * theirs["held"] / 1024
    assert theirs["bits_1k"].tolist() == pytest.approx(expected.tolist())
    assert eight["kl_mean"].iloc[0] < 0.1 * theirs.loc[16, "kl_mean"]


def test_codebooks_of_their_own_cost_side_information_and_no_bits():
    subject = Subject("vqkv/llama-mini", "python-stdlib", [2, 128], [2, 64])
    quantizer = {"codebook_size": 16, "num_quantizers": 2, "group_size": 32}
    table = group_sizes(subject=subject, seeds=[0], sizes=[16, 32], quantizer=quantizer, chunk_size=32)
    own = table[table["group_size"] == 32].set_index("codebooks")
    codebooks = own["side_bytes"] / own["side_bytes"]["shared"]  # 2 KV heads of 2 groups each
    assert codebooks.to_dict() == {"shared": 1, "by group": 2, "by head and group": 4}
    assert own["bits_per_value"].nunique() == 1 and own["key_mse"]["by head and group"] < own["key_mse"]["shared"]
    assert (own["bits_8k"] - own["bits_per_value"]).is_monotonic_increasing
    halves = table[table["group_size"] == 16].set_index("num_quantizers")["bits_per_value"]
    assert halves[1] == own["bits_per_value"]["shared"] < halves[2]


def test_an_exact_cache_loses_nothing_and_every_system_has_a_row_for_each_task():
    subject = Subject("vqkv/llama-mini", "python-stdlib", [2, 128], [2, 96])
    asked = {"episodes": [[1, 150, 2]], "passage": 32, "systems": ["higgs 2"], "designs": ["uniform, pca"]}
    asked |= {"vqllm": {"vqllm 2x16": [2, 16]}, "bits": [2.0], "least_exact": 0}
    learning = {"codebook_size": 16, "kmeans_iterations": 1, "sink_tokens": 1}
    table = retrieval(subject=subject, learning=learning, **asked)
    assert (table.loc[table["system"] == "fp16", "lost"] == 0).all()
    assert table["system"].tolist() == ["fp16", "fp16", "higgs 2", "higgs 2", *["uniform, pca"] * 2]
    assert table["task"].tolist() == ["copy", "facts"] * 3
    assert table["questions"].tolist() == [32, 2] * 3
    assert ((table["lost_low"] <= table["lost"]) & (table["lost"] <= table["lost_high"])).all()


def test_a_restored_cache_goes_on_with_the_same_bits_and_a_chat_reads_only_what_is_new():
    subject = Subject("vqkv/llama-mini", "python-stdlib", [4, 128])
    table = restored_quality(subject=subject, systems=["quanto 4", "lossless"], prompt_len=128, num_seqs=2)
    table = table.set_index("system")
    assert table["same"].all() and table.loc["lossless", "kl_mean"] < 1e-5 < table.loc["quanto 4", "kl_mean"]
    assert table.loc["lossless", "copied"] == table.loc["lossless", "copied_exact"]
    table = chat(subject, ["quanto 4"], turns=3, said=24, answered=8, threads=1)
    assert table["restored"].tolist() == [0, 32, 64] and table["tokens"].tolist() == [24, 56, 88]
    assert table["same"].all() and table["folder_bytes"].is_monotonic_increasing


def holds(value, number: float) -> bool:
    """Whether an argument or a result has the number in it."""
    if isinstance(value, dict | list | tuple):
        return any(holds(each, number) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, pd.DataFrame):
        return "kl_mean" in value and number in set(value["kl_mean"])
    return isinstance(value, float) and float(f"{value:.6g}") == number


def test_a_row_passes_eight_files_at_most(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(steering, "current", steering.Steering(str(tmp_path)))
    subject, seen = Subject(llama_folder, "python-stdlib", [1, 64], [2, 64]), []

    def watch(frame, event, result):
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(PACKAGE):
            given = result if event == "return" else [*frame.f_locals.values()]
            if isinstance(given, dict | list | tuple | pd.DataFrame):
                seen.append((path.removeprefix(PACKAGE), given))

    asked = {"subject": subject, "seeds": [0], "facts": {}, "chunk_size": 16}
    asked["quantizer"] = {"num_quantizers": 1, "codebook_size": 4, "group_size": 32}
    sys.setprofile(watch)
    try:
        rows = tables.table("toy", experiments.grouping, asked)
        figures.show(figures.grouping_bars(rows), "toy", rows)
    finally:
        sys.setprofile(None)
    passed = {path for path, given in seen if holds(given, rows["kl_mean"][0])}
    assert {"evaluation/evaluate.py", "study/tables.py", "study/figures/codebooks.py"} <= passed and len(passed) <= 8


def bits(state, tokens=None):
    """The bytes of all keys and values of the first tokens."""
    return [x[:, :, :tokens].contiguous().view(torch.uint8) for role in state for x in role]


@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(1, 14),
    interval=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 5, 8])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    stored=st.tuples(st.sampled_from(["exact", "fp32"]), st.sampled_from(["exact", "fp32"])),
    seed=st.integers(0, 1000),
)
def test_exact_streams_restore_every_step_bit_for_bit(steps, interval, sizes, dtype, stored, seed):
    layers, batch, heads, head_dim = sizes
    state = gaussian(2, layers, batch, heads, steps, head_dim, seed=seed).to(dtype)
    state[0, 0, 0, 0, 0, 0] = -0.0
    stream = Stream(tuple(map(list, state)), *stored, interval)
    assert len(stream) == steps
    for i in range(steps):
        assert all(torch.equal(*each) for each in zip(bits(stream.state(i)), bits(state, i + 1), strict=True))
    widths = [4 if name == "fp32" else dtype.itemsize for name in stored]
    token = 2 * layers * batch * heads * head_dim
    report = stream.report()
    assert report["keyframe_bytes"] == sum(range(interval, steps + 1, interval)) * token * widths[0]
    assert report["delta_bytes"] == (steps - steps // interval) * token * widths[1]
    assert report["every_fp32_bytes"] == sum(range(steps + 1)) * token * 4
    assert report["live_fp16_bytes"] == steps * token * 2
    framing = MAGIC_BYTES + RECORD_BYTES * (1 + steps)
    parts = ("header_bytes", "keyframe_bytes", "delta_bytes")
    assert framing + sum(report[part] for part in parts) == report["file_bytes"]
