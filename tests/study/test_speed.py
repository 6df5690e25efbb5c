"""The kernels' bench: what it counts and compares, and page 09's tables and figures. Times are not tested."""

import sys
import time

import pandas as pd
import pytest
import torch

from vqkv.errors import DataError
from vqkv.kernels import dispatch
from vqkv.kernels import naive as reference
from vqkv.kernels.view import Affine, Mapped
from vqkv.study import experiments
from vqkv.study.bench import formats, plain, roofline, stored, timing
from vqkv.study.bench import speed as speed_bench
from vqkv.study.bench.case import Sizes

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
    assert (whole["threads"] == 1).all() and (timed["repetitions"] >= 2).all()
    assert whole["versions"].str.contains("torch").all() and whole["device"].notna().all()
    assert (timed["bound_ms"] > 0).all()
    assert set(whole["shape"][whole["operation"] == "rvq_encode"]) == {
        "N=40 d=32 K=2 C=32", "N=20 d=32 K=2 C=16", "N=20 d=32 K=2 C=32", "N=20 d=32 K=1 C=32"
    }  # fmt: skip


def test_every_kernel_is_timed(monkeypatch):
    sizes = Sizes(2, 2, 32, rows=40, sweep_rows=20, tokens=24, runs=((1, 16),), codebook_sizes=(16,), depths=(2,))
    cases = [case for make in speed_bench.OPERATIONS.values() for problem in make(sizes) for case in problem.cases]
    called, which = set(), dispatch.which
    monkeypatch.setattr(dispatch, "which", lambda name, *about: called.add(name) or which(name, *about))
    for case in cases:
        case.call()
    assert called == set(dispatch.ROOMS)


def test_ratios_are_those_of_the_row_s_own_numbers(whole):
    timed = whole[whole["operation"] != "roofline"]
    shares = (timed["bound_ms"] / timed["median"]).tolist()
    assert timed["ratio_to_bound"].tolist() == pytest.approx(shares, rel=1e-3)
    attended = timed[timed["operation"] == "decode_attention"]
    exact = attended[attended["format"] == "fp16"].set_index("shape")["median"]
    expected = attended["median"] / attended["shape"].map(exact)
    assert attended["ratio_to_fp16"].tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert timed[timed["operation"] != "decode_attention"]["ratio_to_fp16"].isna().all()
    row = timed[timed["operation"] == "affine_decode"].iloc[0]
    assert row["throughput"] == pytest.approx(2 * 24 * 32 / row["median"] / 1e3, rel=1e-3)
    copy = whole[whole["format"] == "copy"].iloc[0]
    assert copy["throughput"] == pytest.approx(2 * 2**12 / copy["median"] / 1e3, rel=1e-3)
    packed = timed[timed["operation"] == "pack"].iloc[0]  # of int16 codes to 11 bits: 2 bytes and 11 / 8 moved
    assert packed["bound_ms"] == pytest.approx(2 * 24 * 32 * (2 + 11 / 8) / (2 * 2**12) * copy["min"], rel=1e-3)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_remedy_is_named():
    with pytest.raises(DataError, match="finds no GPU; leave it out"):
        experiments.kernel_speed(operations=[], **SETTINGS | {"device": "cuda"})


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    speed_bench.main(only=["pack"], out=tmp_path / "new" / "bench.csv")
    table = pd.read_csv(tmp_path / "new" / "bench.csv")
    assert list(table["operation"]) == ["roofline"] * 3 + ["pack"] * 6
    assert capsys.readouterr().out.count("plain torch") == 3


def test_what_is_not_installed_is_named_and_left_out(monkeypatch):
    for package in ("faiss", "hqq.core.quantize", "optimum.quanto", "vector_quantize_pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.warns(UserWarning) as warned:
        table = experiments.kernel_speed(operations=["rvq_decode", "affine_decode"], **SETTINGS)
    assert set(table[table["operation"] != "roofline"]["implementation"].str[:5]) == {"vqkv ", "plain"}
    told = {str(each.message) for each in warned}
    for name in ("faiss", "hqq", "quanto", "vector-quantize-pytorch"):
        assert any(text.startswith(f"{name} is not timed: ModuleNotFoundError") for text in told), name


def test_calls_take_turns_and_slow_ones_fewer(monkeypatch):
    order, clocks = [], {"fast": [1.0], "slow": [600.0]}
    calls = [lambda name=name: order.append(name) or name for name in clocks]
    monkeypatch.setattr(timing, "cpu_times", lambda call: clocks[call()])
    assert timing.in_turn(calls, 5, "cpu") == [[1.0] * 5, [600.0] * 3]
    assert order == ["fast", "slow"] * 3 + ["fast"] * 2


def test_a_call_is_timed_in_milliseconds():
    for taken in timing.in_turn([lambda: time.sleep(0.003)], 2, "cpu"):
        assert len(taken) >= 2 and 3 <= min(taken) < 30


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


def test_the_bound_is_what_takes_longer():
    assert roofline.encode(torch.zeros(10, 4), torch.zeros(3, 8, 4)).exact
    line = roofline.Roofline(1e9, {"float32": 1e10, "float16": 1e11})
    assert line.bound(roofline.Demand(1e6, 1e6, 1)) == pytest.approx(1)
    assert line.bound(roofline.Demand(1e9, 1e6, 1)) == pytest.approx(10)
    assert line.bound(roofline.Demand(1e9, 1e6, 1, exact=True)) == pytest.approx(100)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_formats_are_what_they_say(name):
    expected = {"int2": 2.5, "int4": 4.5, "int8": 8.5, "grid 16": 2.125, "grid 256": 4.125,
                "product 256x4": 2 + 16 / (64 * 128), "residual 3x256 d=8": 3.125,
                "residual 8x2048 d=32": 2.875, "live 2.25": 2.25}  # fmt: skip
    assert formats.bits_per_value(name) == pytest.approx(expected[name])
    packed = formats.FORMATS[name]((2, 2, 70, 128), "cpu")
    assert packed.shape == (2, 2, 70, 128)
    if not isinstance(packed, Mapped):
        torch.testing.assert_close(plain.decode(packed), reference.decode(packed), rtol=1e-4, atol=1e-4)
    assert isinstance(packed, Affine) == name.startswith("int")
