"""Ratios of KL with paired intervals, and how tables show them."""

import math

import numpy as np
import pandas as pd
import pytest

from vqkv.study.experiments.predictor_choices import BESIDE, _ratio, _systems
from vqkv.study.tables import with_interval


def ratio(ours, theirs):
    return _ratio(*(" ".join(map(str, each)) for each in (ours, theirs)))


def test_sequences_are_drawn_in_pairs():
    theirs = np.random.default_rng(0).uniform(0.01, 1.0, 12)
    found = ratio(2 * theirs, theirs)
    assert [*found.values()] == pytest.approx([2.0] * 3)  # apart, their intervals would be wide
    found = ratio(theirs + theirs[::-1], theirs)
    assert found["kl_ratio_low"] < 1.95 and found["kl_ratio_high"] > 2.05


def test_nothing_is_said_of_one_sequence_or_of_a_system_beside_itself():
    assert np.isnan([ratio([1], [2])["kl_ratio_low"], ratio([1, 2], [1, 2])["kl_ratio_high"]]).all()
    assert np.isnan([*_ratio("1 2", None).values()]).all()


def test_who_stands_beside_whom_is_in_the_table():
    names = _systems(0.5)
    assert {*BESIDE, *BESIDE.values()} <= {*names}


def test_intervals_in_words():
    ends = {"low": [0.01, math.nan, math.nan], "high": [0.02, math.nan, math.nan]}
    table = pd.DataFrame({"x": [0.01234, 1.0, math.nan]} | ends)
    assert with_interval(table, "x", "low", "high")["x"].tolist() == ["0.0123 (0.01 to 0.02)", "1", ""]
