"""Calibration on other text and on little of it: which rows there are, and what is made of them."""

import pandas as pd
import pytest

from vqkv.study import figures
from vqkv.study.experiments import against_own, calibration_text
from vqkv.study.subject import Subject

ROWS = [  # system, train_corpus, train_seqs, test_corpus, bits, KL of two windows
    ("a", "x", 4, "x", 1, "3 5"), ("a", "x", 4, "y", 2, "6 20"), ("a", "y", 4, "y", 1, "3 5"),
    ("a", "y", 4, "x", 2, "6 10"), ("a", "x", 1, "x", 1, "3 5"), ("b", "x", 4, "x", 1, "3 5"),
    ("b", "x", 1, "x", float("nan"), ""),
]  # fmt: skip


@pytest.fixture
def against():
    names = ["system", "train_corpus", "train_seqs", "test_corpus", "bits_per_value", "kl_each"]
    table = pd.DataFrame(ROWS, columns=names).assign(model="m", nominal_bits=0)
    kl = table["kl_each"].str.split().map(lambda each: sum(map(float, each)) / len(each) if each else float("nan"))
    return against_own(table.assign(kl_mean=kl), train_seqs=4)


def test_one_calibration_is_read_on_all_its_texts():
    subject = Subject("m", "x", (4, 16), (2, 16), seed=5)
    cases = calibration_text.cases(
        subject=subject, other_corpus="y", sizes=[1, 4], systems=["a", "b"], designs=["c"], bits=0.9
    )
    listed = [(case.arguments["subject"], case.arguments) for case in cases]
    fits = [(about["corpus"], about["train_size"][0], given["texts"]) for about, given in listed]
    assert fits == [each for each in (("x", 4, ["x", "y"]), ("y", 4, ["x", "y"]), ("x", 1, ["x"])) for _ in range(3)]
    assert [given["bits"] for _, given in listed] == [0, 0, 0.9] * 3


def test_other_calibrations_are_paired_window_by_window(against):
    found = against.set_index(["system", "train_corpus", "train_seqs", "test_corpus"])[["ratio", "low", "high"]]
    assert found.loc["a", "y", 4, "x"].tolist() == [2, 2, 2]  # every window's is 2
    assert found.loc["a", "x", 4, "y"].tolist() == pytest.approx([3.25, 2, 4])
    assert found.loc["b", "x", 1, "x"].isna().all() and against["more_bits"].tolist()[:2] == [1, 1]


def test_the_figure_names_every_system_and_says_who_refuses(against):
    fig = figures.other_calibrations(against, {"b": "ours"})
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["a", "ours"]
    assert [text.get_text().strip() for text in fig.axes[0].texts] == ["refuses"]
