"""Sweeps in this process: rows that survive a kill, and those that must not be used again."""

import json
import multiprocessing
import os
import random
import signal

import numpy as np
import pandas as pd
import pytest
import sweep_cases as cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vqkv.cases
from vqkv import sweep, tables
from vqkv.cases import Case, Kept
from vqkv.errors import DataError
from vqkv.experiments.common import frame

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text())
COUNT = 24


def experiment(folder: str, count: int = 5, function: str = "cube", **more) -> pd.DataFrame:
    return frame(
        *sweep.sweep(getattr(cases, function), [{"x": x} for x in range(count)], {"folder": folder} | more, "toy")
    )


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The folder for results; beside it marks and the source's text."""
    monkeypatch.setenv("VQKV_OUT", str(tmp_path / "out"))
    (tmp_path / "text").write_text("abc")
    return tmp_path / "out"


def table(folder, name="toy", recompute=False, **parameters) -> pd.DataFrame:
    return tables.table(name, experiment, {"folder": f"in:{folder}"} | parameters, recompute)


def half_done(out, **more) -> list:
    """Cases 0 to 2 finished, then the run fails; returns their files, in the order of cases."""
    (out.parent / "fail").touch()
    with pytest.raises(OSError, match="no 3") as caught:
        table(out.parent, function="failing", **more)
    assert caught.value.__notes__ == ["in toy, case 4 of 5 (x=3)"]
    (out.parent / "fail").unlink()
    files = dict(zip(_finished(out), kept(out), strict=True))
    assert sorted(files) == [0, 1, 2]
    return [files[x] for x in sorted(files)]


def kept(out) -> list:
    return sorted(out.glob("results/.rows/toy/*/*.json"))


def finish(out, **more) -> list[int]:
    """Run to the end; returns how often each case was computed, the unfinished run's calls included."""
    found = table(out.parent, function="failing", **more)
    calls = [cases.marks(out.parent, x) for x in range(5)]
    rows = [row for x in range(5) for row in cases.cube(x, out.parent)[0]]
    assert found.to_dict("records") == [row | {"y": float(f"{row['y']:.6g}")} for row in rows]
    assert not list(out.glob("results/.rows"))
    return calls


def run_doomed(doom, arguments):
    cases.DOOM = doom
    table(*arguments, function="slow_cube", count=COUNT, seconds=0.01)


def test_killed_at_20_random_moments_it_ends_with_the_same_table_and_nothing_is_computed_twice(tmp_path, monkeypatch):
    rng, fork = random.Random(0), multiprocessing.get_context("fork")
    (tmp_path / "whole").mkdir(), (tmp_path / "killed").mkdir()
    monkeypatch.setenv("VQKV_OUT", str(tmp_path / "whole"))
    run_doomed(None, [tmp_path / "whole"])
    out = tmp_path / "killed"
    monkeypatch.setenv("VQKV_OUT", str(out))
    moments = sorted(rng.uniform(0, COUNT - 5) for _ in range(20))
    for moment in moments:
        before = {x: cases.marks(out, f"begun-{x}") for x in _finished(out)}
        process = fork.Process(target=run_doomed, args=((max(int(moment), len(before)), 0.02 * (moment % 1)), [out]))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert {x: cases.marks(out, f"begun-{x}") for x in before} == before
    before = {x: cases.marks(out, f"begun-{x}") for x in _finished(out)}
    assert len(before) > COUNT // 2
    run_doomed(None, [out])
    assert {x: cases.marks(out, f"begun-{x}") for x in before} == before
    name = "results/toy.csv"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() and not kept(out)


def _finished(out) -> list[int]:
    return [json.loads(path.read_text())["finished"]["case"]["arguments"]["x"] for path in kept(out)]


def test_a_failed_run_goes_on_from_its_last_finished_case(out):
    half_done(out)
    assert finish(out) == [1] * 5
    seconds = json.loads((out / "results/toy.json").read_text())["wall_seconds"]
    assert seconds >= 0 and table(out.parent, function="failing").attrs["vqkv"]["fresh"] is False


def test_seconds_of_an_earlier_run_count(out):
    for path in half_done(out):
        record = json.loads(path.read_text())["finished"]
        record["result"]["seconds"] = 100.0
        path.write_text(json.dumps({"sha256": vqkv.cases._sha256(record), "finished": record}))
    assert finish(out) == [1] * 5
    assert json.loads((out / "results/toy.json").read_text())["wall_seconds"] >= 300


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"",
        lambda data: data.replace(b'"y": 2.6666', b'"y": 2.6667'),
        lambda data: b"[" * 100_000,
        lambda data: b'{"finished": 1, "sha256": null}',
        lambda data: b"\xff\xfe",
    ],
)
def test_torn_or_altered_files_are_computed_again(out, damage):
    path = half_done(out)[2]
    assert damage(path.read_bytes()) != path.read_bytes()
    path.write_bytes(damage(path.read_bytes()))
    assert finish(out) == [1, 1, 2, 1, 1]


def test_a_file_in_another_case_s_place_is_not_that_case(out):
    zero, one, _ = half_done(out)
    zero.write_bytes(one.read_bytes())
    assert finish(out) == [2, 1, 1, 1, 1]


def test_rows_of_other_code_or_threads_are_not_used(out, monkeypatch):
    for name, value in (("CODE", "other"), ("_code_elsewhere", lambda function: "edited")):
        half_done(out)
        with monkeypatch.context() as patch:
            patch.setattr(vqkv.cases, name, value)
            assert finish(out)[:3] == [2] * 3
        (out / "results/toy.csv").unlink()
        [(out.parent / str(x)).unlink() for x in range(5)]
    half_done(out)
    monkeypatch.setattr(sweep.torch, "get_num_threads", lambda: 64)
    assert finish(out)[:3] == [2] * 3


def test_rows_of_other_parameters_are_not_used_and_a_recompute_is_a_run_of_its_own(out):
    half_done(out)
    half_done(out, scale=5)
    assert [cases.marks(out.parent, x) for x in range(4)] == [2, 2, 2, 0]
    half_done(out, recompute=True)
    assert finish(out, recompute=True) == [3, 3, 3, 1, 1]  # went on with the recompute's rows
    assert finish(out, recompute=True) == [5, 5, 5, 3, 3]  # one more by finish() itself


def test_rows_of_other_local_files_are_not_used(out):
    model = out.parent / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    used = {"folder": f"in:{out.parent}"}
    for word in (str(model), f"wikitext@{model}", str(model / "weights")):
        before = Case(cases.cube, used | {"deep": [{"model": word}]}, "").identity()
        assert before == Case(cases.cube, used | {"deep": [{"model": word}]}, "").identity()
        with (model / "weights").open("a") as file:
            file.write("2")
        assert before != Case(cases.cube, used | {"deep": [{"model": word}]}, "").identity()
    for word in ("", " ", "@", "cpu", "vqkv/llama-mini", "x" * 5000, "\0", "a\nb"):
        assert Case(cases.cube, {"word": word}, "").identity()["files"] == {}


def test_rows_of_a_source_that_has_changed_are_computed_again(out):
    half_done(out)
    (out.parent / "text").write_text("new")
    assert finish(out) == [2, 2, 2, 1, 1]
    assert json.loads((out / "results/toy.json").read_text())["sources"] == {"text": "new"}


def test_a_source_that_changes_during_a_sweep_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"text is abd for toy, case 2 of 2 but abc for toy, case 1"):
        sweep._sources(
            [Case(cases.cube, {}, f"toy, case {i} of 2") for i in (1, 2)],
            {i: {"sources": {"text": text}} for i, text in enumerate(("abc", "abd"))},
        )


def test_outside_a_table_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        rows, sources = sweep.sweep(cases.cube, [{"x": 1}], {"folder": "in:."}, "toy")
    assert sources == {"text": "abc"} and len(rows) == 2
    assert cases.marks(".", 1) == 2 and os.listdir(".") == ["1"]


@pytest.mark.parametrize("wrong", [[1], {"a": 1}, object(), 1j, b"x"])
def test_rows_hold_numbers_booleans_and_words_only(wrong):
    with pytest.raises(DataError, match="toy, case 1 of 1 .*'value'"):
        sweep.sweep(holding_what(wrong), [{"x": 1}], {}, "toy")


def holding_what(value):
    def compute(x):
        return [{"value": value}], {}

    return compute


def test_arguments_are_plain_literals():
    for wrong in (float("nan"), object()):
        with pytest.raises(DataError, match="toy: "):
            sweep.sweep(cases.cube, [{"x": wrong}], {"folder": "in:."}, "toy")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.text(), SCALARS, max_size=4), max_size=4), st.dictionaries(st.text(), st.text()))
def test_rows_come_back_exactly(tmp_path, rows, sources):
    with tables._working(
        tmp_path, {"name": "toy", "function": "", "parameters": {}, "versions": {}, "device": ""}, False
    ):
        case = Case(lambda: (rows, sources), {}, "toy")
        found, store = case.result(), Kept(1)
        store.put(case, found)
        back = store.get(case)
    assert repr(back["rows"]) == repr(rows) == repr(found["rows"])  # the order of columns too
    assert back["sources"] == sources and back["seconds"] == found["seconds"]


def test_numpy_s_scalars_become_python_s():
    found = Case(lambda: ([{"a": np.float32(0.1), "b": np.int64(3), "c": np.bool_(True)}], {}), {}, "toy").result()
    assert repr(found["rows"]) == "[{'a': 0.10000000149011612, 'b': 3, 'c': True}]"


def test_what_cases_share_is_made_once_bounded_and_forgotten(monkeypatch):
    made = []

    @sweep.per_process(maxsize=2)
    def square(x, about=None):
        made.append(x)
        return x * x

    def compute(x):
        return [{"y": square(x=x, about=[1, {"a": 2}])}], {}

    monkeypatch.setattr(sweep, "_held", [])
    rows, _ = sweep.sweep(compute, [{"x": x} for x in (1, 2, 1, 3, 1, 2)], {}, "toy")
    assert [row["y"] for row in rows] == [1, 4, 1, 9, 1, 4] and made == [1, 2, 3, 2]
    with pytest.raises(DataError, match="arguments of square"):
        square(x=object())


def test_what_cases_share_goes_at_the_end_also_after_an_error(tmp_path):
    shared = sweep.per_process(maxsize=1)(lambda x: [x])
    first = shared(x=1)
    assert shared(x=1) is first
    with pytest.raises(FileNotFoundError):
        sweep.sweep(cases.cube, [{"x": 1}], {"folder": f"in:{tmp_path / 'nowhere'}"}, "toy")
    assert shared(x=1) is not first
