"""The claims audit: verdicts, what is read, and figures that are known from elsewhere."""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv import figures, presets, tables
from vqkv.errors import DataError
from vqkv.experiments import audit, audited_tables, claims_audit
from vqkv.experiments.audit import framework, shapes, streams
from vqkv.experiments.audit.rows import (
    MEASURED,
    NO,
    PARTLY,
    UNTESTED,
    YES,
    above,
    at_least,
    at_most,
    close,
    furthest,
    measured,
    row,
    untested,
)
from vqkv.figures.audit import VERDICTS, claim_dots

FACTORS = st.floats(0.01, 100)


@pytest.fixture(scope="module")
def claims():
    return claims_audit(audited_tables())


@pytest.fixture(scope="module")
def numbers(claims):
    return claims.set_index(["source", "claim"])["recomputed"]


@given(FACTORS, FACTORS)
def test_verdicts(published, recomputed):
    kept = row("c", published, recomputed, "x", "r", otherwise=PARTLY)
    assert kept["holds"] == (YES if abs(recomputed - published) <= 0.02 * published else PARTLY)
    assert row("c", published, recomputed, "x", "r", rule=at_least)["holds"] == (YES if recomputed >= published else NO)
    assert row("c", published, recomputed, "x", "r", rule=at_most)["holds"] == (YES if recomputed <= published else NO)
    assert row("c", published, recomputed, "x", "r", rule=above(1))["holds"] == (YES if recomputed > 1 else NO)


def test_what_has_no_number_is_not_tested():
    for found in (row("c", 5, math.nan, "x", "r", rule=close(9)), untested("c", 5, "x", "r", figures=3)):
        assert found["holds"] == UNTESTED and found["published"] == 5
    assert untested("c", 5, "x", "r", figures=3)["figures"] == 3


@given(st.lists(st.tuples(FACTORS, FACTORS), min_size=1, max_size=6))
def test_furthest_is_furthest_either_way(pairs):
    apart = [max(a / b, b / a) for a, b in pairs]
    found = furthest(pairs)
    assert found in pairs and max(found[0] / found[1], found[1] / found[0]) == pytest.approx(max(apart))


def test_a_measured_row_needs_its_table():
    table = pd.DataFrame({"kl": [1.0, 3.0]})
    settings = ("03_grouping", "c", 2, "x", lambda found: (found["kl"].mean(), "mean"))
    there = measured({"03_grouping": table}, *settings)
    assert (there["holds"], there["how"], there["recomputed"], there["reason"]) == (YES, MEASURED, 2, "mean")
    for others in ({}, {"03_grouping": table.iloc[:0]}):
        absent = measured(others, *settings)
        assert absent["holds"] == UNTESTED and "run page 03" in absent["reason"]


def test_every_row_is_whole(claims):
    assert not claims.duplicated(["source", "claim"]).any() and list(claims["source"].unique()) == list(audit.SOURCES)
    assert set(claims["holds"]) == {YES, PARTLY, NO, UNTESTED} and (claims["figures"] > 0).all()
    assert ((claims["holds"] == UNTESTED) == claims["recomputed"].isna()).all()
    assert claims["reason"].str.fullmatch(r"\S.*\.\S*\.|\S.*\.").all() and claims["reason"].str.len().max() < 160
    assert (claims.loc[claims["how"] == MEASURED, "recomputed"] > 0).all()  # the committed tables have what it needs


def test_every_stated_figure_is_tested_or_named():
    stated = tables.published("stated_figures")
    code = "".join(path.read_text() for path in Path(audit.__file__).parent.glob("*.py"))
    assert stated["key"].is_unique and stated["value"].notna().all() and set(stated["source"]) == set(audit.SOURCES)
    assert [key for key in stated["key"] if f'"{key}"' not in code and f'"{key[4:]}"' not in code] == []


def test_sizes_of_residual_vq(numbers):
    found = numbers["residual VQ"]
    assert found["smaller than fp16, 8 codebooks of 2,048"] == pytest.approx(16 / 2.875)
    for name, tokens in (("8K", 2**13), ("32K", 2**15), ("128K", 2**17)):
        bits = 2.875 + 8 * 64 * 2**20 / (tokens * 2 * 32 * 8 * 128)  # 64 codebooks of 8 x 2,048 x 32 in fp16
        assert found[f"... codebooks counted, one sequence of {name}"] == pytest.approx(16 / bits)


def test_bits_of_aqua(numbers):
    found = numbers["AQUA-KV"]
    norm = 16 / 1024
    assert found["AQUA-KV, HIGGS 2 bits, detailed table"] == pytest.approx((27 * (2 + norm) + 4 + norm) / 28)
    weights = 8 * found["linear predictors of a 3B model"] * 2**20 / (2 * 28 * 1024)
    for name, tokens in (("8K", 2**13), ("128K", 2**17)):
        bits = found["AQUA-KV, HIGGS 2 bits, detailed table"] + weights / tokens
        assert found[f"... predictors counted, one sequence of {name}"] == pytest.approx(bits)
    assert weights / 2**13 == pytest.approx(2.9, abs=0.01) and weights / 2**17 == pytest.approx(0.18, abs=0.002)


def test_a_first_layer_on_top_of_all_others_makes_the_detailed_table():
    """The reason that two rows give."""
    printed = tables.published("aqua_detailed").drop_duplicates("config").set_index("config")["bits"]
    higgs = {bits: shapes.stored("Llama-3.2-3B", presets.higgs(bits)).bits_per_value for bits in (2, 3, 4)} | {16: 16}
    for config, first in {"BF16": 16, "HIGGS 4 bit": 4, "HIGGS 3 bit": 3, "HIGGS 2 bit": 2}.items():
        assert printed[config] == pytest.approx(higgs[2] + higgs[first] / 28, abs=0.01)
    assert printed["AQUA-KV (Quanto)"] == pytest.approx(2.5 + higgs[4] / 28, abs=0.01)


def test_the_blogs_formula(numbers):
    found = numbers["transformers blog"]
    assert found["X_q = round(X/S) - Z fits 4 bits, as written"] < 0.1
    assert found["... with + Z"] == found["... as written, in whole numbers: restored within S/2"] == 1
    assert found["Llama-2-7B's cache of 10,000 tokens"] == 5.24288


def test_a_stream_is_what_arithmetic_says():
    report = streams.stream("4-bit deltas")
    assert (report["token_states"], report["keyframe_token_states"], report["delta_tokens"]) == (131328, 2304, 504)
    by_hand = 131328 / (2304 + 504 * 4.5 / 32)
    assert report["ratio_every_fp32"] == pytest.approx(by_hand, rel=0.005)
    assert report["ratio_live_fp16"] == pytest.approx(by_hand * 512 / 2 / 131328, rel=0.005)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1), (framework.ALL_CODES, 0)])
def test_bits_with_fallback_are_those_of_the_codec(threshold, share):
    scale = 32 / (64 * 64)
    assert shapes.bits_of(presets.vqq(threshold)) == pytest.approx(framework.fallback_bits(share) + scale)


def test_the_frameworks_arithmetic(numbers):
    found = numbers["VQ framework"]
    assert found["1034x: what its formula gives"] == pytest.approx(63 * (0.05 + 0.95 * 16))
    assert found["1034x: sizes added up instead of ratios"] == pytest.approx(576)
    assert found["mean KL at 429x: least that its extremes allow"] == pytest.approx((0.601 + 0.5 + 8 * 0.021) / 10)
    assert found["threshold 0.07 / the live fp16 cache"] < 1 < 100 < found["all blocks in fp16 / every fp32 snapshot"]


def test_other_contents_are_another_audit(tmp_path, monkeypatch):
    """Tables of the run at hand come before the repository's; one that changes in between is refused."""
    before = audited_tables()
    assert set(before) == {*audit.STORED, *(f"published/{name}" for name in audit.PUBLISHED)}
    (tmp_path / "results").mkdir()
    (tmp_path / "results/06_depth.csv").write_text("model\nx\n")
    monkeypatch.setenv("VQKV_OUT", str(tmp_path))
    after = audited_tables()
    assert [name for name in before if after[name] != before[name]] == ["06_depth"]
    with pytest.raises(DataError, match="table 06_depth"):
        claims_audit(before)


def test_the_figure_shows_zero_at_its_edge(claims):
    rows = claims[claims["source"] == "residual VQ"].copy()
    rows.loc[rows.index[0], "recomputed"] = 0.0
    fig = claim_dots(rows)
    try:
        ax = fig.axes[0]
        assert ax.lines[2].get_xdata()[0] == ax.get_xlim()[0] > 0
    finally:
        plt.close(fig)


def test_the_figure_has_a_row_for_every_number(claims):
    with plt.rc_context():
        figures.use_style()
        fig = claim_dots(claims)
    try:
        labels = [label.get_text() for ax in fig.axes for label in ax.get_yticklabels()]
        assert sorted(labels) == sorted(claims.loc[claims["recomputed"].notna(), "claim"])
        drawn = [line for ax in fig.axes for line in ax.lines if line.get_marker() in ("o", "D", "X")]
        colours = pd.Series([line.get_color() for line in drawn]).value_counts()
        for verdict, (colour, _) in VERDICTS.items():
            assert colours[colour] == (claims["holds"] == verdict).sum()
        hollow = [line for line in drawn if line.get_markerfacecolor() == "white"]
        assert len(hollow) == ((claims["how"] == MEASURED) & claims["recomputed"].notna()).sum()
    finally:
        plt.close(fig)
