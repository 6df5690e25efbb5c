"""The kernels' bench: what it counts and compares, and page 09's tables and figures. Times are not tested."""

import sys

import pytest
import torch

from vqkv.study import experiments
from vqkv.study.bench import formats, roofline, stored
from vqkv.study.bench import speed as speed_bench

SETTINGS = {"geometry": "tiny", "rows": 40, "sweep_rows": 20, "tokens": 24, "runs": [[1, 16], [2, 8], [1, 8]],
            "codebook_sizes": [16, 32], "depths": [1, 2], "threads": 1, "repetitions": 2, "device": "cpu",
            "seed": 0}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_probes():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed_bench, "COPIED", {"cpu": 2**12})
        patched.setattr(speed_bench, "SIDE", {"cpu": 8})
        yield


@pytest.fixture(scope="module")
def whole(small_probes):
    return experiments.kernel_speed(operations=[], **SETTINGS)


def test_one_tidy_row_per_operation_format_implementation_and_shape(whole):
    assert not whole.duplicated(["operation", "format", "implementation", "shape", "dtype"]).any()
    assert set(whole["operation"]) == {"roofline", *speed_bench.OPERATIONS}
    timed = whole[whole["operation"] != "roofline"]
    assert (timed["min"] <= timed["median"]).all() and (timed["median"] <= timed["max"]).all()
    assert (timed["repetitions"] >= 2).all() and (timed["bound_ms"] > 0).all()
    assert set(whole["shape"][whole["operation"] == "rvq_encode"]) == {
        "N=40 d=32 K=2 C=32", "N=20 d=32 K=2 C=16", "N=20 d=32 K=2 C=32", "N=20 d=32 K=1 C=32"
    }  # fmt: skip


def test_peers_solve_the_same_problem(whole):
    found = {operation: set(rows["implementation"]) for operation, rows in whole.groupby("operation")}
    assert found["rvq_encode"] >= {"vector-quantize-pytorch", "faiss beam 1", "plain torch"}
    assert found["rvq_encode_beam4"] >= {"faiss beam 4"} and found["product_encode"] >= {"faiss"}
    assert found["affine_encode"] >= {"quanto", "hqq", "plain torch"} <= found["affine_decode"]
    assert found["decode_attention"] >= {stored.SDPA, stored.DECODED}
    for operation, names in found.items():
        ours = [name for name in names if name.startswith("vqkv (")]
        assert len(ours) == (operation != "roofline"), operation
    codes = whole[whole["equal"].notna() & ~whole["operation"].isin(["rvq_encode_beam4", "grid_encode"])]
    assert (codes["equal"] == 1).all(), codes[codes["equal"] < 1]
    assert whole["equal"].min() > 0.9  # cdist of pairs rounds, and beams keep other candidates where scores nearly tie
    values = whole[whole["error"].notna() & ~whole["operation"].str.startswith("affine")]
    assert values["error"].max() < 5e-3  # fp16 attention
    lossy = whole[whole["operation"].isin(["affine_encode", "affine_decode"])].groupby("format")["error"]
    assert lossy.max()["int8"] < 0.02 < lossy.max()["int4"] < 0.2 < lossy.min()["int2"] < 0.5


def test_what_is_not_installed_is_named_and_left_out(monkeypatch):
    for package in ("faiss", "hqq.core.quantize", "optimum.quanto", "vector_quantize_pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.warns(UserWarning) as warned:
        table = experiments.kernel_speed(operations=["rvq_decode", "affine_decode"], **SETTINGS)
    assert set(table[table["operation"] != "roofline"]["implementation"].str[:5]) == {"vqkv ", "plain"}
    told = {str(each.message) for each in warned}
    for name in ("faiss", "hqq", "quanto", "vector-quantize-pytorch"):
        assert any(text.startswith(f"{name} is not timed: ModuleNotFoundError") for text in told), name


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
