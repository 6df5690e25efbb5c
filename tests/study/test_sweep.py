"""Sweeps here and in processes: equal rows, also after a kill; and one case of a stored table, computed again."""

import copy
import json
import math
import multiprocessing
import re
import signal

import pandas as pd
import pytest
import sweep_cases as cases

from vqkv.errors import DataError, UnknownNameError
from vqkv.study import reproduce, steering, sweep, tables
from vqkv.study.shared import per_process, plain
from vqkv.study.subject import Subject

WORDS = r"unknown preset 'vqlm'. Did you mean 'vqllm'\? Known: vqllm."
KEPT = pd.DataFrame({"system": ["a", "a", "b"], "bits": [1, 2, 2], "kl": [0.5, 0.25, math.nan], "kl_each": "0.1"})


def steer(monkeypatch, out, **how):
    monkeypatch.setattr(steering, "current", steering.Steering(str(out), **how))


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The folder for results; next to it marks."""
    steer(monkeypatch, tmp_path / "out")
    return tmp_path / "out"


def table(folder, recompute=False) -> pd.DataFrame:
    return tables.table("toy", cases.troubled, {"folder": str(folder)}, recompute)


def finished(out) -> list[int]:
    paths = out.glob("results/.rows/toy/*/*.json")
    return sorted(json.loads(path.read_text())["rows"][0]["x"] for path in paths)


def half_done(out, error=UnknownNameError, message=WORDS, why="fail", **more):
    """Run until case 3 fails."""
    (out.parent / why).touch()
    with pytest.raises(error, match=message) as caught:
        table(out.parent, **more)
    (out.parent / why).unlink()
    return caught


def finish(out) -> list[int]:
    """Run to the end; returns how often each case was computed, the unfinished run's calls included."""
    computed = table(out.parent)
    calls = [cases.marks(out.parent, x) for x in range(5)]
    rows = [row for x in range(5) for row in cases.cube.row(x, out.parent)]
    assert computed.to_dict("records") == [row | {"y": float(f"{row['y']:.6g}")} for row in rows]
    assert not list(out.glob("results/.rows"))
    return calls


def test_a_killed_run_goes_on_at_its_next_row(out):
    (out.parent / "kill").touch()
    process = multiprocessing.get_context("fork").Process(target=table, args=[out.parent])
    process.start()
    process.join(60)
    (out.parent / "kill").unlink()
    assert process.exitcode == -signal.SIGKILL and finished(out) == [0, 1, 2]
    assert finish(out) == [1] * 5


def test_a_failed_run_names_its_case_and_goes_on_from_the_last_finished_one(out):
    assert half_done(out).value.__notes__ == ["in troubled, case 4 of 5 (x=3)"]
    assert finished(out) == [0, 1, 2]
    assert finish(out) == [1] * 5


def test_processes_make_the_same_table_and_one_that_dies_loses_nothing(out, monkeypatch):
    steer(monkeypatch, out, workers=2)
    half_done(out, RuntimeError, r"a worker died.*memory", why="kill")
    done = finished(out)
    assert done and 3 not in done  # the other worker may have gone on to the last
    error = copy.copy(UnknownNameError("preset", "vqlm", ["vqllm"]))  # as a worker hands it over
    assert re.fullmatch(WORDS, str(error))
    steer(monkeypatch, out)
    calls = [cases.marks(out.parent, x) for x in range(5)]
    assert finish(out) == [calls[x] + (x not in done) for x in range(5)]


def test_rows_of_other_code_threads_or_parameters_are_not_used(out, monkeypatch):
    half_done(out)
    for name, other in (("CODE", "other"), ("torch.get_num_threads", lambda: 64)):
        with monkeypatch.context() as patch:
            patch.setattr(f"vqkv.study.sweep.{name}", other)
            half_done(out)
    half_done(out, recompute=True)  # a run of its own
    assert [cases.marks(out.parent, x) for x in range(4)] == [4, 4, 4, 0]
    assert finish(out) == [4, 4, 4, 1, 1]


def test_a_source_that_changes_on_the_way_is_an_error():
    results = {name: {"sources": {"text": "abc"}} for name in ("case 1", "case 2")}
    assert sweep._sources(results) == {"text": "abc"}
    with pytest.raises(DataError, match="text is abd for case 3, abc before: begin again with --recompute"):
        sweep._sources(results | {"case 3": {"sources": {"text": "abd"}}})
    other = {"case 3": {"sources": {"model b": "x", "text": "abd"}}}
    assert sweep._sources(results | other) == {"text": "abc", "model b": "x", "text, model b": "abd"}


def test_a_subject_s_copies_share_its_sources_and_each_case_has_its_own():
    subject = Subject("vqkv/llama-mini", "python-stdlib", test_size=[1, 8])
    other = subject.changed(seed=3)
    assert other.test.shape == (1, 8) and other.model is subject.model
    assert subject.sources.keys() == {"model vqkv/llama-mini", "corpus python-stdlib test 1x8 seed 3"}
    assert [(each.seed, each.sources) for each in subject.each(seed=[0, 1])] == [(0, {}), (1, {})]

    def row(subject):
        return {"tokens": subject.test.sum().item()}

    made = sweep.experiment(lambda subject: sweep.product(subject=subject.each(seed=[0, 1])))(row)
    sources = made(subject=plain(subject, "")).attrs["sources"]
    assert list(sources) == [f"corpus python-stdlib test 1x8 seed {seed}" for seed in (0, 1)]


def test_a_case_that_is_refused_has_no_rows_and_only_all_of_them_are_an_error():
    def row(x, least):
        if x < least:
            raise DataError(f"{x} is too small")
        return {"x": x}

    made = sweep.experiment(lambda: [{"x": 1}, {"x": 2}])(row)
    with pytest.warns(UserWarning, match="no rows of row, case 1 of 2 .x=1.: 1 is too small"):
        assert made(least=2).to_dict("list") == {"x": [2]}
    with pytest.raises(DataError, match="1 is too small .in row, case 1 of 2"):
        made(least=3)


def test_what_cases_share_is_made_once_bounded_and_forgotten():
    made = []

    @per_process(maxsize=2)
    def square(x, about=None):
        made.append(x)
        return x * x

    cases = sweep.experiment(lambda listed: sweep.product(x=listed))
    squares = cases(lambda x: {"y": square(x=x, about=[1, {"a": 2}])})
    assert squares(listed=[1, 2, 1, 3, 1, 2])["y"].tolist() == [1, 4, 1, 9, 1, 4] and made == [1, 2, 3, 2]
    with pytest.raises(TypeError):
        squares(listed=[2, None])
    square(x=2, about=[1, {"a": 2}])
    assert made == [1, 2, 3, 2, 2, None, 2]  # forgotten at the end, also after an error


@pytest.mark.parametrize(
    ("row", "difference", "column"),
    [
        ({"system": "a", "bits": 2, "kl": 0.25}, 0, ""),
        ({"system": "b", "bits": 2, "kl": math.nan, "more": 5, "kl_each": "0.2"}, 0, ""),
        ({"system": "a", "bits": 2, "kl": 0.2}, 0.2, "kl"),
        ({"system": "b", "bits": 3, "kl": math.nan}, 1 / 3, "bits"),
        ({"system": "b", "bits": 2, "kl": 0.0}, math.inf, "kl"),
        ({"system": "c", "bits": 2, "kl": 0.25}, math.inf, "no row with {'system': 'c'}"),
    ],
)
def test_rows_are_compared_with_the_nearest_of_the_same_words(row, difference, column):
    rows = pd.DataFrame([{"system": "a", "bits": 1, "kl": 0.5}, row])
    assert reproduce.compared(rows, KEPT) == {"difference": pytest.approx(difference), "column": column}


def test_one_case_of_an_experiment_is_drawn_and_computed_alone(tmp_path, monkeypatch):
    record = {"function": "sweep_cases.cube", "parameters": {"folder": str(tmp_path)}, "device": "any"}
    monkeypatch.setattr(reproduce, "provenance", lambda name: record)
    monkeypatch.setattr(reproduce, "stored_table", lambda name: cases.cube(folder=str(tmp_path)))
    case = reproduce.again("toy", seed=0)
    assert case["case"].startswith("cube, case ") and case["difference"] == 0
    assert sum(cases.marks(tmp_path, x) == 2 for x in range(5)) == 1


def test_a_table_that_fails_is_named_and_none_is_begun_when_time_is_over(monkeypatch):
    record = reproduce.provenance("14_stages") | {"function": "vqkv.study.experiments.nothing"}
    monkeypatch.setattr(reproduce, "provenance", lambda name: record)
    case = reproduce.again("14_stages", seed=0)
    assert "AttributeError" in case["case"] and case["difference"] == math.inf
    assert reproduce.again("14_stages", seed=0, until=0)["case"] == "not reached"
