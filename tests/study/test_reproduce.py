"""One case of a stored table, computed again."""

import math

import pandas as pd
import pytest
import sweep_cases as cases

from vqkv.study import reproduce

KEPT = pd.DataFrame({"system": ["a", "a", "b"], "bits": [1, 2, 2], "kl": [0.5, 0.25, math.nan], "kl_each": "0.1"})


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
    monkeypatch.setattr(reproduce, "known", lambda name: cases.cube(folder=str(tmp_path)))
    found = reproduce.again("toy", seed=0)
    assert found["case"].startswith("cube, case ") and found["difference"] == 0
    assert sum(cases.marks(tmp_path, x) == 2 for x in range(5)) == 1


def test_a_table_that_fails_is_named_and_none_is_begun_when_time_is_over(monkeypatch):
    record = reproduce.provenance("14_stages") | {"function": "vqkv.study.experiments.nothing"}
    monkeypatch.setattr(reproduce, "provenance", lambda name: record)
    found = reproduce.again("14_stages", seed=0)
    assert "AttributeError" in found["case"] and found["difference"] == math.inf
    assert reproduce.again("14_stages", seed=0, until=0)["case"] == "not reached"
