"""Ratios of KL with paired intervals, and how tables show them."""

import math

import numpy as np
import pandas as pd
import pytest

from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.experiments.predictors import BESIDE, CHOICES
from vqkv.study.tables import with_interval


def test_sequences_are_drawn_in_pairs():
    theirs = np.random.default_rng(0).uniform(0.01, 1.0, 12)
    assert paired_ratio(2 * theirs, theirs) == pytest.approx((2.0, 2.0, 2.0))  # apart, their intervals would be wide
    _, low, high = paired_ratio(theirs + theirs[::-1], theirs)
    assert low < 1.95 and high > 2.05


def test_who_stands_beside_whom_is_in_the_table():
    assert {*BESIDE, *BESIDE.values()} <= {*CHOICES}


def test_intervals_in_words():
    ends = {"low": [0.01, math.nan, math.nan], "high": [0.02, math.nan, math.nan]}
    table = pd.DataFrame({"x": [0.01234, 1.0, math.nan]} | ends)
    assert with_interval(table, "x", "low", "high")["x"].tolist() == ["0.0123 (0.01 to 0.02)", "1", ""]
