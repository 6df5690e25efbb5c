"""Notebook 08's tables at a small size, against what the byte meter and ``evaluate`` say by themselves."""

import itertools

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv.study.experiments import generation
from vqkv.study.figures import generation as figures
from vqkv.study.figures.labels import spread as spread_out


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=20), st.floats(0.01, 0.2))
def test_names_stand_apart_and_move_no_further_than_needed(places, step):
    places = sorted(places)
    spread = spread_out(places, step)
    assert all(b - a >= step - 1e-9 for a, b in itertools.pairwise(spread))
    assert sum(spread) == pytest.approx(sum(places), abs=1e-6)
    if all(b - a >= step for a, b in itertools.pairwise(places)):
        assert spread == pytest.approx(places, abs=1e-9)


def test_what_reads_in_place_is_timed_and_drawn_beside_int4():
    settings = {"rounds": 1, "systems": ["quanto 4"], "seed": 0, "threads": 1,
                "dtype": "float32", "device": "cpu"}  # fmt: skip
    times = generation.read_in_place(["tiny"], runs=[[1, 140, 2], [1, 160, 2]], **settings)
    assert set(times["system"]) == {"DynamicCache", "transformers quanto 4", "quanto 4"} and len(times) == 6
    losses = pd.DataFrame({"system": ["quanto 4"], "bits_8k_x1": 4.5, "kl_mean": 0.1, "kl_low": 0.05, "kl_high": 0.2})
    assert len(figures.in_place(times, losses).axes) == 3
