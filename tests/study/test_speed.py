"""The benches at a small size: what they count and compare, and what pages make of it. Times are not tested."""

import sys

import pytest
import torch

from vqkv import kernels
from vqkv.study import experiments
from vqkv.study.bench import caches, formats, generation, roofline, stored
from vqkv.study.bench import speed as speed_bench
from vqkv.study.bench.caches import PEER, REFERENCE
from vqkv.study.bench.generation import latency, peak_memory
from vqkv.study.experiments import read_in_place

SETTINGS = {"geometry": "tiny", "rows": 40, "sweep_rows": 20, "tokens": 24, "runs": [[1, 16], [2, 8], [1, 8]],
            "codebook_sizes": [16, 32], "depths": [1, 2], "threads": 1, "repetitions": 2, "device": "cpu",
            "seed": 0}  # fmt: skip
TINY = {"seed": 0, "threads": 1, "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def small_probes():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed_bench, "COPIED", {"cpu": 2**12})
        patched.setattr(speed_bench, "SIDE", {"cpu": 8})
        yield


@pytest.fixture(scope="module")
def speed(small_probes):
    timed = set()  # the kernels whose twin is named beside their time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "which", lambda name, *about: timed.add(name) or kernels.dispatch.which(name, *about))
        table = experiments.kernel_speed(operations=[], **SETTINGS)
    assert timed == set(kernels.dispatch.OPERATIONS)
    return table


def test_one_tidy_row_per_operation_format_implementation_and_shape(speed):
    assert not speed.duplicated(["operation", "format", "implementation", "shape", "dtype"]).any()
    assert set(speed["operation"]) == {"roofline", *speed_bench.OPERATIONS}
    timed = speed[speed["operation"] != "roofline"]
    assert (timed["min"] <= timed["median"]).all() and (timed["median"] <= timed["max"]).all()
    assert (timed["repetitions"] >= 2).all() and (timed["bound_ms"] > 0).all()
    assert set(speed["shape"][speed["operation"] == "rvq_encode"]) == {
        "N=40 d=32 K=2 C=32", "N=20 d=32 K=2 C=16", "N=20 d=32 K=2 C=32", "N=20 d=32 K=1 C=32"
    }  # fmt: skip


def test_peers_solve_the_same_problem(speed):
    implementations = {operation: set(rows["implementation"]) for operation, rows in speed.groupby("operation")}
    assert implementations["rvq_encode"] >= {"vector-quantize-pytorch", "faiss beam 1", "plain torch"}
    assert implementations["rvq_encode_beam4"] >= {"faiss beam 4"} and implementations["product_encode"] >= {"faiss"}
    assert implementations["affine_encode"] >= {"quanto", "hqq", "plain torch"} <= implementations["affine_decode"]
    assert implementations["decode_attention"] >= {stored.SDPA, stored.DECODED}
    for operation, names in implementations.items():
        ours = [name for name in names if name.startswith("vqkv (")]
        assert len(ours) == (operation != "roofline"), operation
    codes = speed[speed["equal"].notna() & ~speed["operation"].isin(["rvq_encode_beam4", "grid_encode"])]
    assert (codes["equal"] == 1).all(), codes[codes["equal"] < 1]
    assert speed["equal"].min() > 0.9  # cdist of pairs rounds, and beams keep other candidates where scores nearly tie
    values = speed[speed["error"].notna() & ~speed["operation"].str.startswith("affine")]
    assert values["error"].max() < 5e-3  # fp16 attention
    lossy = speed[speed["operation"].isin(["affine_encode", "affine_decode"])].groupby("format")["error"]
    assert lossy.max()["int8"] < 0.02 < lossy.max()["int4"] < 0.2 < lossy.min()["int2"] < 0.5


def test_what_is_not_installed_is_named_and_left_out(monkeypatch):
    for package in ("faiss", "vector_quantize_pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    with (
        pytest.warns(UserWarning, match="faiss is not timed: ModuleNotFoundError"),
        pytest.warns(UserWarning, match="vector-quantize-pytorch is not timed: ModuleNotFoundError"),
    ):
        table = experiments.kernel_speed(operations=["rvq_decode"], **SETTINGS)
    assert set(table[table["operation"] != "roofline"]["implementation"].str[:5]) == {"vqkv ", "plain"}


def test_work_counted_by_hand():
    x, codebooks = torch.zeros(10, 4), torch.zeros(3, 8, 4)
    keys = formats.affine(4, (1, 2, 5, 128), "cpu")
    packed = 2 * 5 * (64 + 2 * 2 * 2)  # codes, and two ends of two groups in fp16
    query, exact = torch.zeros(1, 8, 1, 128, dtype=torch.float16), torch.zeros(1, 2, 5, 128, dtype=torch.float16)
    for work, flops, moved, values in (
        (roofline.encode(x, codebooks), 3 * 10 * 8 * 4 * 2, 160 + 384 + 10 * 3 * 8, 40),
        (roofline.encode(x, codebooks, beam=4), (1 + 2 * 4) * 10 * 8 * 4 * 2, 160 + 384 + 10 * 3 * 8, 40),
        (roofline.encode(x, codebooks, code_bytes=3 / 8), 3 * 10 * 8 * 4 * 2, 160 + 384 + 10 * 3 * 3 / 8, 40),
        (roofline.decode(keys), 2 * 1280, packed + 4 * 1280, 1280),
        (roofline.attention(query, keys, formats.affine(4, (1, 2, 5, 128), "cpu")), 4 * 8 * 5 * 128 + 4 * 1280,
         2 * packed + 2 * 2048, 2 * 1280),
        (roofline.attention(query, exact, exact.clone()), 4 * 8 * 5 * 128, 2 * 2 * 1280 + 2 * 2048, 2 * 1280),
    ):  # fmt: skip
        assert (work.flops, work.bytes, work.values) == (flops, moved, values)


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
    rows = latency([[2, 140, 3]], 1, ["vqllm 8x256"], geometry="tiny", **TINY).to_dict("records")
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
        rows = latency([[1, 10, 2]], 1, ["kivi 2"], geometry="tiny", **TINY)
    assert rows["system"].tolist() == [REFERENCE, "kivi 2"]


def test_peak_memory_of_a_fresh_process(monkeypatch):
    """Whatever glibc was told for this process, what was freed is not counted."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    (row,) = peak_memory([1, 4096, 2], 512, [REFERENCE], geometry="tiny", **TINY).to_dict("records")
    assert row["prefill_mb"] >= row["stored_mb"] and row["decode_mb"] > 0  # all of it is stored by then
    assert row["resident_mb"] == row["stored_mb"]
    assert row["decode_mb"] < 1.5 * row["stored_mb"]  # a layer's keys are copied as they grow
    assert row["stored_mb"] == 4098 * 2 * 2 * 2 * 32 * 4 / 1e6  # tokens, layers, K and V, heads, head_dim, bytes


def test_what_reads_in_place_is_timed():
    times = read_in_place(["tiny"], runs=[[1, 140, 2], [1, 160, 2]], rounds=1, systems=["quanto 4"], **TINY)
    assert set(times["system"]) == {"DynamicCache", "transformers quanto 4", "quanto 4"} and len(times) == 6
