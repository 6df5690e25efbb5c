"""The claims audit: the committed rows again, the one rule of verdicts, and figures that are known from elsewhere."""

import json
import re

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv import presets
from vqkv.errors import DataError
from vqkv.study import steering, tables
from vqkv.study.experiments import audit, audited_tables, claims_audit
from vqkv.study.experiments.audit import DOES_NOT, HOLDS, IN_PART, VERDICTS, agrees, row
from vqkv.study.experiments.audit_algorithms import fallback_bits
from vqkv.study.experiments.audit_shapes import encoded_bits

CLAIM = dict.fromkeys(audit.listed().columns, "") | {"published": "2", "table": "03_grouping", "figures": 0}
RULES = st.sampled_from(["", "about", "at least", "at most", "above: 1", "below: 1"])
CASES = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=6)
KEYS = {  # columns of published tables that say what a row is about
    "rvq_table2_codebook_size": ["group_size", "codebook_size", "num_quantizers"],
    "kv_size_by_context": ["batch"],
    "aqua_quantizer_evr": ["bits"],
    "vqq_threshold_sweep_gpt2": ["threshold"],
    "stated_figures": ["key", "source", "unit", "section", "says"],
}


def test_the_committed_rows_come_out_again():
    committed = (tables.repository_root() / "results/12_claims.csv").read_text()
    claims = claims_audit(audited_tables())
    assert claims.to_csv(index=False, float_format="%.6g", lineterminator="\n") == committed
    assert set(claims["verdict"]) == set(VERDICTS)


@given(RULES, CASES)
def test_a_row_shows_the_case_that_agrees_least(rule, cases):
    audited = row(CLAIM | {"rule": rule}, cases, {})
    shown = audited["published"], audited["recomputed"]
    assert shown in cases and agrees(rule, *shown) == all(agrees(rule, *case) for case in cases)
    agree = sum(agrees(rule, *case) for case in cases)
    assert audited["verdict"] == {0: DOES_NOT, len(cases): HOLDS}.get(agree, IN_PART)
    assert (audited["agree"], audited["of"]) == (agree, len(cases))


@pytest.mark.parametrize(
    ("rule", "published", "recomputed", "holds"),
    [
        ("", 482, 601, False), ("", 3.05, 3.25, False), ("", 2.02, 2.0156, True), ("", 49, 48.75, True),
        ("", 1, 0.66, False), ("", 5, 5.24, False), ("about", 5, 5.24, True), ("about", 63, 55.2, False),
        ("at least", 2.5, 1.97, False), ("at most", 0.0078, 0.07, False), ("above: 1", 6.5, 0.73, False),
        ("above: 1", 9.8, 1.5, True), ("below: 1", 1, 0.82, True),
    ],
)  # fmt: skip
def test_one_rule(rule, published, recomputed, holds):
    assert agrees(rule, published, recomputed) == holds


def test_every_published_figure_is_counted_once():
    """In all rows but our own re-baselinings."""
    printed = 4  # sizes of predictors, in names of rows
    for path in (tables.repository_root() / "results/published").glob("*.csv"):
        if path.stem != "claims":
            words = pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns=KEYS.get(path.stem, []))
            printed += int(words.map(lambda x: bool(re.fullmatch(r"[<>]?[\d.]+(e-?\d+)?", x))).to_numpy().sum())
    listed = audit.listed()
    assert listed["figures"].sum() == printed
    assert (listed.loc[listed["rule"] == "ours", "figures"] == 0).all()


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1), (1e9, 0)])
def test_bits_with_fallback_are_those_of_the_codec(threshold, share):
    scale = 32 / (64 * 64)
    assert encoded_bits(presets.vqq(threshold)) == pytest.approx(fallback_bits(share) + scale)


def test_other_contents_are_another_audit(tmp_path, monkeypatch):
    """Tables of the run at hand come before the repository's; one that changes in between is refused."""
    before = audited_tables()
    recorded = json.loads((tables.repository_root() / "results/12_claims.json").read_text())
    assert before == recorded["parameters"]["tables"]
    (tmp_path / "results").mkdir()
    (tmp_path / "results/03_depth.csv").write_text("model\nx\n")
    monkeypatch.setattr(steering, "current", steering.Steering(str(tmp_path)))
    after = audited_tables()
    assert [name for name in before if after[name] != before[name]] == ["03_depth"]
    with pytest.raises(DataError, match="table 03_depth"):
        claims_audit(before)
