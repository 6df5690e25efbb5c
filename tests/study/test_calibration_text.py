"""Calibration on other text and on little of it: which rows there are, and what is made of them."""

import sys

import pytest

from vqkv.errors import DataError
from vqkv.study import figures
from vqkv.study.experiments import against_own, calibration_text
from vqkv.study.subject import Subject

MODULE = sys.modules[calibration_text.__module__]
SETTINGS = {
    "subject": Subject("m", "x", (4, 16), (2, 16), seed=5), "other_corpus": "y", "sizes": [1, 4, 8],
    "systems": ["a", "b"], "designs": ["c"], "bits": 0.9, "vqllm": {"vqllm 1x4": [1, 4]}, "learning": {},
    "chunk_size": 4,
}  # fmt: skip


class MadeUp:
    """In place of models: windows have a KL of 3 and 5, on another corpus twice as much, and one bit more."""

    def __init__(self):
        self.fits, self.reads = [], 0

    def fitted_system(self, subject, system, bits, vqllm, learning):
        self.fits.append((subject.name, system, bits, subject.corpus, *subject.train_size, subject.seed))
        if subject.train_size[0] == 1 and system == "b":
            raise DataError("components of 8 channels from 4 tokens: calibrate on more")
        return subject

    def by_window(self, subject, compressor, tokens, **settings):
        self.reads += 1
        other = int(tokens != (subject.corpus, "test", (2, 16), 5))
        about = {"bits_per_value": 1.0 + other, "side_bytes": 10, "kl_floor": 1e-7, "top1": 0.5, "ppl": 3.0}
        kl = {"kl_mean": 4.0 + 4 * other, "kl_low": 3.0 + 3 * other, "kl_high": 5.0 + 5 * other}
        return about | kl | {"kl_each": "6 10" if other else "3 5"}


@pytest.fixture
def made_up(monkeypatch):
    found = MadeUp()
    for name in ("fitted_system", "by_window"):
        monkeypatch.setattr(MODULE, name, getattr(found, name))
    monkeypatch.setattr(Subject, "text", lambda subject, split, size, seed, corpus: (corpus, split, tuple(size), seed))
    return found


@pytest.fixture
def table(made_up):
    return calibration_text(**SETTINGS)


def test_one_calibration_is_read_on_all_its_texts(table, made_up):
    for _, mine in table.groupby("system"):
        calibrated = list(zip(mine["train_corpus"], mine["train_seqs"], mine["test_corpus"]))
        both = [("x", 4, "x"), ("x", 4, "y"), ("y", 4, "x"), ("y", 4, "y")]
        assert calibrated == [*both, ("x", 1, "x"), ("x", 8, "x")]
    assert table.groupby("system", sort=False)["nominal_bits"].first().to_dict() == {"a": 0, "b": 0, "c": 0.9}
    assert len(made_up.fits) == len(set(made_up.fits)) == 3 * 4 and made_up.reads == 3 * 6 - 1


def test_a_refusal_is_a_row(table):
    refused = table[table["refused"] != ""]
    assert refused[["system", "train_seqs"]].to_numpy().tolist() == [["b", 1]]
    assert refused["refused"].str.startswith("components of 8 channels").all()
    assert refused[list(MODULE.MEASURED)].replace("", None).isna().all(axis=None)
    assert table.drop(refused.index)[list(MODULE.MEASURED)].notna().all(axis=None)


def test_other_calibrations_are_paired_window_by_window(table):
    found = against_own(table, train_seqs=4)
    domain, size = found[found["train_corpus"] != found["test_corpus"]], found[found["train_seqs"] != 4]
    assert len(domain) == 3 * 2 and len(size) == 3 * 2 and len(found) == 12
    assert (domain["kl_mean_own"] == 4).all() and (domain["kl_mean"] == 8).all() and (domain["more_bits"] == 1).all()
    assert domain[["ratio", "low", "high"]].to_numpy().tolist() == [[2, 2, 2]] * 6  # every window's is 2
    assert size.loc[size["ratio"].isna(), ["system", "train_seqs"]].to_numpy().tolist() == [["b", 1]]
    worse = table.assign(kl_each=table["kl_each"].where(table["train_corpus"] == table["test_corpus"], "6 20"))
    low, high = against_own(worse, train_seqs=4)[["low", "high"]].iloc[0]
    assert (low, high) == (pytest.approx(2), pytest.approx(4))


def test_the_figure_names_every_system_and_says_who_refuses(table):
    against = against_own(table[table["train_seqs"] < 8], train_seqs=4)
    fig = figures.other_calibrations(against, {"c": "ours"})
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["a", "b", "ours"]
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    assert legend == ["4 of x, reads y", "4 of y, reads x", "1 of x, reads x"]
    assert [(text.get_text().strip(), text.get_position()[1]) for text in fig.axes[0].texts] == [("refuses", 1.25)]
