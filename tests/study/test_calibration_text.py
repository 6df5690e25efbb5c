"""Calibration on other text and on little of it: what is made of the rows."""

import pandas as pd
import pytest

from vqkv.study.experiments import against_own

ROWS = [  # system, train_corpus, train_seqs, test_corpus, bits, KL of two windows
    ("a", "x", 4, "x", 1, "3 5"), ("a", "x", 4, "y", 2, "6 20"), ("a", "y", 4, "y", 1, "3 5"),
    ("a", "y", 4, "x", 2, "6 10"), ("a", "x", 1, "x", 1, "3 5"), ("b", "x", 4, "x", 1, "3 5"),
    ("b", "x", 1, "x", float("nan"), ""),
]  # fmt: skip


def test_other_calibrations_are_paired_window_by_window():
    names = ["system", "train_corpus", "train_seqs", "test_corpus", "bits_per_value", "kl_each"]
    table = pd.DataFrame(ROWS, columns=names).assign(model="m", nominal_bits=0)
    kl = table["kl_each"].str.split().map(lambda each: sum(map(float, each)) / len(each) if each else float("nan"))
    against = against_own(table.assign(kl_mean=kl), train_seqs=4)
    found = against.set_index(["system", "train_corpus", "train_seqs", "test_corpus"])[["ratio", "low", "high"]]
    assert found.loc["a", "y", 4, "x"].tolist() == [2, 2, 2]  # every window's is 2
    assert found.loc["a", "x", 4, "y"].tolist() == pytest.approx([3.25, 2, 4])
    assert found.loc["b", "x", 1, "x"].isna().all() and against["more_bits"].tolist()[:2] == [1, 1]
