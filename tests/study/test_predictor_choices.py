"""Ratios of KL with paired intervals, and how tables show them."""

import math

import numpy as np
import pandas as pd
import pytest

from vqkv.study.experiments import ridge_strengths
from vqkv.study.experiments.predictor_choices import BESIDE, _ratio, _systems
from vqkv.study.tables import with_interval

DATA = {"models": ["vqkv/llama-mini"], "corpus": "python", "train_seqs": 4, "seq_len": 40, "num_seqs": 2}
DATA |= {"batch_size": 4, "seed": 0, "dtype": "", "device": "cpu"}


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


def test_the_strength_is_chosen_where_nothing_was_learned():
    table = ridge_strengths(**DATA, held_out=2, strengths=[1e-3, 100.0], chunk_size=16)
    assert table["train_seqs"].tolist() == [2, 2, 4] and table["kl_held_out"].isna().tolist() == [False, False, True]
    assert table["chosen"].sum() == 1 and table.loc[table["chosen"], "kl_held_out"].item() == table["kl_held_out"].min()
    assert table["kl_ratio"].iloc[-1] == 1
