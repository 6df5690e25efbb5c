"""Calibration on other text and on little of it: which rows there are, and what is made of them."""

import math
import sys

import pytest

from vqkv.errors import DataError
from vqkv.study.experiments import across_domains, calibration_text, seed_spread

MODULE = sys.modules[calibration_text.__module__]
SETTINGS = {
    "systems": [["a", 0], ["b", 0.9]], "train_seqs": 4, "sizes": [1, 4, 8], "fit_seeds": [0, 1, 2],
    "text_seeds": [5, 6, 7], "seq_len": 16, "num_seqs": 2, "chunk_size": 4, "vqllm": {"vqllm 1x4": [1, 4]},
    "codebook_size": 4, "kmeans_iterations": 1, "sink_tokens": 0, "tuned": {}, "larger": {"a": [16]},
    "dtype": "", "device": "cpu",
}  # fmt: skip


class MadeUp:
    """In place of models: KL is 8 on another domain, else 4, times 2^(calibration seed) and 4^(text seed - 5)."""

    def __init__(self):
        self.fits, self.reads, self.sources, self.model = [], 0, {}, "model"

    def subject(self, **who):
        return self

    def fitted_system(self, found, system, bits, who, vqllm, learning, tuned):
        self.fits.append((who["name"], system, bits, who["corpus"], *who["train"], who["seed"]))
        if who["train"][0] == 1 and system == "b":
            raise DataError("components of 8 channels from 4 tokens: calibrate on more")
        return who

    def held_out(self, corpus, size, seed, **how):
        return (corpus, seed), {f"{corpus} {seed}": "hash"}, self

    def evaluate(self, model, who, tokens, **settings):
        self.reads += 1
        corpus, seed = tokens
        kl = (4.0 if corpus == who["corpus"] else 8.0) * 2.0 ** who["seed"] * 4.0 ** (seed - 5)
        about = {"bits_per_value": 1.0 + (corpus != who["corpus"]), "side_bytes": 10, "kl_floor": 1e-7, "top1": 0.5}
        return about | {"kl_mean": kl, "kl_low": kl, "kl_high": kl, "ppl": 3.0}


@pytest.fixture
def made_up(monkeypatch):
    found = MadeUp()
    for name in ("subject", "fitted_system", "evaluate"):
        monkeypatch.setattr(MODULE, name, getattr(found, name))
    monkeypatch.setattr(MODULE, "_held_out", found.held_out)
    return found


@pytest.fixture
def table(made_up):
    return calibration_text(["m", "n"], ["x", "y"], **SETTINGS)


def test_every_part_has_its_rows_and_a_calibration_serves_all(table, made_up):
    for (_, _), mine in table.groupby(["model", "system"]):
        larger = mine["system"].iloc[0] == "a"
        assert mine["part"].value_counts().to_dict() == {"domain": 4, "size": 3 + larger, "seeds": 9}
        domain, size, seeds = (mine[mine["part"] == part] for part in ("domain", "size", "seeds"))
        assert set(zip(domain["train_corpus"], domain["test_corpus"])) == {(a, b) for a in "xy" for b in "xy"}
        assert set(zip(seeds["fit_seed"], seeds["text_seed"])) == {(a, b) for a in (0, 1, 2) for b in (5, 6, 7)}
        assert sorted(size["train_seqs"]) == [1, 4, 8, *[16] * larger]
        assert (size[["train_corpus", "test_corpus"]] == "x").all(axis=None)
        assert (
            (domain["train_seqs"] == 4).all() and (domain["text_seed"] == 5).all() and (domain["fit_seed"] == 0).all()
        )
    assert len(made_up.fits) == len(set(made_up.fits)) == 2 * (7 + 6)  # x, y, 1, 8, two seeds, and 16 of "a"
    assert made_up.reads == 2 * (15 + 13)  # a text is read once for all parts
    assert table.attrs["sources"].keys() == {"x 5", "x 6", "x 7", "y 5"}


def test_a_refusal_is_a_row(table):
    refused = table[table["refused"] != ""]
    assert (refused["system"] == "b").all() and (refused["train_seqs"] == 1).all() and len(refused) == 2
    assert set(refused["refused"]) == {"components of 8 channels from 4 tokens"}
    assert refused[list(MODULE.MEASURED)].isna().all(axis=None)
    assert table.drop(refused.index)[list(MODULE.MEASURED)].notna().all(axis=None)


def test_what_another_domain_costs(table):
    found = across_domains(table)
    assert len(found) == 2 * 2 * 2
    assert (found["kl_own"] == 4).all() and (found["kl_other"] == 8).all() and (found["kl_ratio"] == 2).all()
    assert (found["bits_ratio"] == 2).all() and (found["lost_bits"] == 1.5).all()  # a bit, and half of one by the KL


def test_which_seeds_matter(table):
    found = seed_spread(table)
    assert list(found["system"]) == ["a", "b"] * 2
    assert found["log2_kl_fit"].tolist() == pytest.approx([1.0] * 4)  # of 0, 1, 2
    assert found["log2_kl_text"].tolist() == pytest.approx([2.0] * 4)
    assert (found[["bits_fit", "bits_text"]] == 0).all(axis=None)
    broken = table.assign(kl_mean=table["kl_mean"].where((table["fit_seed"] != 1) | (table["system"] != "a")))
    assert math.isnan(seed_spread(broken)["log2_kl_fit"][0]) and seed_spread(broken)["log2_kl_fit"][1] == 1
