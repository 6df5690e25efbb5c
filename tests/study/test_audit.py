"""The claims audit: the committed rows again, the one rule of verdicts, and figures that are known from elsewhere."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv import presets
from vqkv.errors import DataError
from vqkv.study import tables
from vqkv.study.experiments import audit, audited_tables, claims_audit
from vqkv.study.experiments.audit import aqua, framework, residual_vq, shapes
from vqkv.study.experiments.audit.rows import (
    DOES_NOT,
    HOLDS,
    IN_PART,
    MEASURED,
    NEITHER,
    OURS,
    VERDICTS,
    agrees,
    row,
    verdict,
)

CLAIM = audit.listed().iloc[0].to_dict() | {"published": "2", "table": "03_grouping", "rule": "", "reason": "mean {n}."}
RULES = st.sampled_from(["", "about", "at least", "at most", "above: 1", "below: 1"])
CASES = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=6)
KEYS = {  # columns of published tables that say what a row is about
    "rvq_table2_codebook_size": ["group_size", "codebook_size", "num_quantizers"],
    "kv_size_by_context": ["batch"],
    "aqua_quantizer_evr": ["bits"],
    "vqq_threshold_sweep_gpt2": ["threshold"],
    "stated_figures": ["key", "source", "unit", "section", "says"],
}
ELSEWHERE = 4  # sizes of predictors, in names of rows


@pytest.fixture(scope="module")
def claims():
    return claims_audit(audited_tables())


def test_the_committed_rows_come_out_again(claims):
    committed = (tables.repository_root() / "results/12_claims.csv").read_text()
    assert claims.to_csv(index=False, float_format="%.6g", lineterminator="\n") == committed
    assert list(claims["source"].unique()) == list(audit.SOURCES)


def test_verdicts_are_those_of_their_figures():
    """In the committed table: what a row shows is its case that agrees least, so that it agrees where all do."""
    claims = pd.read_csv(tables.repository_root() / "results/12_claims.csv", keep_default_na=False)
    assert set(claims["verdict"]) == set(VERDICTS)
    for claim in claims.to_dict("records"):
        if claim["rule"] == "ours":
            expected = OURS
        elif claim["of"] == 0:
            expected = NEITHER
            assert claim["recomputed"] == "" and claim["reason"], claim["claim"]
        else:
            expected = {0: DOES_NOT, claim["of"]: HOLDS}.get(claim["agree"], IN_PART)
            end = claim[{"above": "low", "below": "high"}.get(claim["rule"].partition(":")[0], "recomputed")]
            shown = agrees(claim["rule"], float(claim["published"]), float(end or claim["recomputed"]))
            assert shown == (expected == HOLDS), claim["claim"]
        assert claim["verdict"] == expected, claim["claim"]


@given(RULES, CASES)
def test_a_row_shows_the_case_that_agrees_least(rule, cases):
    found = row(CLAIM | {"rule": rule, "reason": ""}, {"cases": cases})
    shown = found["published"], found["recomputed"]
    assert shown in cases and agrees(rule, *shown) == all(agrees(rule, *case) for case in cases)
    assert found["verdict"] == verdict(rule, cases) and found["of"] == len(cases)


@pytest.mark.parametrize(
    ("rule", "said", "found", "holds"),
    [
        ("", 482, 601, False), ("", 3.05, 3.25, False), ("", 2.02, 2.0156, True), ("", 49, 48.75, True),
        ("", 1, 0.66, False), ("", 5, 5.24, False), ("about", 5, 5.24, True), ("about", 63, 55.2, False),
        ("at least", 2.5, 1.97, False), ("at most", 0.0078, 0.07, False), ("above: 1", 6.5, 0.73, False),
        ("above: 1", 9.8, 1.5, True), ("below: 1", 1, 0.82, True),
    ],
)  # fmt: skip
def test_one_rule(rule, said, found, holds):
    assert agrees(rule, said, found) == holds


def test_a_figure_of_unstated_size_is_where_it_can_be():
    sized = [row(CLAIM | {"reason": ""}, {"ranges": ranges})["recomputed"] for ranges in ([(1, 3)], [(3, 4)], [(0, 1)])]
    assert sized == [2, 3, 1]


def test_a_measured_row_needs_its_table():
    there = row(CLAIM, {"recomputed": 2.0, "n": 3})
    assert (there["verdict"], there["how"], there["recomputed"], there["reason"]) == (HOLDS, MEASURED, 2, "mean 3.")
    for found in (None, {"recomputed": math.nan}):
        absent = row(CLAIM, found)
        assert absent["verdict"] == NEITHER and absent["published"] == 2 and "run page 03" in absent["reason"]


def test_every_published_figure_is_counted_once():
    """In all rows but our own re-baselinings."""
    printed = ELSEWHERE
    for path in (tables.repository_root() / "results/published").glob("*.csv"):
        if path.stem != "claims":
            words = pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns=KEYS.get(path.stem, []))
            printed += int(words.map(lambda x: bool(re.fullmatch(r"[<>]?[\d.]+(e-?\d+)?", x))).to_numpy().sum())
    listed = audit.listed()
    assert listed["figures"].sum() == printed
    assert (listed.loc[listed["rule"] == "ours", "figures"] == 0).all()


def test_claims_are_quoted():
    listed = audit.listed()
    tested = listed[(listed["find"] != "") & (listed["rule"] != "ours")]
    assert (tested["quote"].str.split().str.len().between(1, 15)).all() and (listed["section"] != "").all()
    assert listed["claim"].is_unique


def test_every_stated_figure_is_tested_or_named():
    known = tables.published("stated_figures")
    text = "".join(path.read_text() for path in Path(audit.__file__).parent.iterdir() if path.is_file())
    text += (tables.repository_root() / "results/published/claims.csv").read_text()
    assert (
        known["key"].is_unique
        and known["value"].notna().all()
        and set(known["source"]) == set(audit.SOURCES) - {"KVQuant"}
    )
    # Keys that code puts together, as it does where only the source is left out.
    built = ("rvq_gsm8k", "rvq_mmlu", "vqq_over_quip_")
    keys = [key for key in known["key"] if not key.startswith(built) and key not in text]
    assert [key for key in keys if f'"{key.partition("_")[2]}"' not in text] == []


def test_published_ratios_of_two_figures_are_those_of_the_sources_tables():
    said = audit.listed().set_index("claim")["published"]
    first = tables.published("rvq_table1_key_value")[residual_vq.TASKS]
    contiguous, strided, value = (first.iloc[0] - first.iloc[1:4]).sum(axis=1)
    ppl = aqua._detailed()["wiki2_ppl"]
    increase = ppl - ppl["uncompressed"]
    for claim, ratio in {
        "contiguous key groups lose more than strided ones": contiguous / strided,
        "keys lose more than values": strided / value,
        "2-bit HIGGS loses more than with predictors": increase["HIGGS-2b-gs1024"] / increase[aqua.OURS],
        "no key predictor loses more than no value predictor": increase["w/o K predictor"]
        / increase["w/o V predictor"],
        "GPTQ's predictors lose as much as linear ones": increase["GPTQ (41 MiB)"] / increase[aqua.OURS],
    }.items():
        assert float(said[claim]) == pytest.approx(ratio, rel=1e-5), claim


def test_sizes_are_those_of_arithmetic(claims):
    numbers = claims.set_index("claim")["recomputed"]
    assert numbers["smaller than fp16, 8 codebooks of 2,048"] == pytest.approx(16 / 2.875)
    codebooks = 2.875 + 8 * 64 * 2**20 / (2**13 * 2 * 32 * 8 * 128)  # 64 of 8 x 2,048 x 32 in fp16, 8K tokens
    assert numbers["... codebooks counted, one sequence of 8K"] == pytest.approx(16 / codebooks)
    bits = (27 * (2 + 16 / 1024) + 4 + 16 / 1024) / 28  # the first layer has 4
    assert numbers["AQUA-KV, HIGGS 2 bits, detailed table"] == pytest.approx(bits)
    predictors = 8 * numbers["linear predictors of a 3B model"] * 2**20 / (2 * 28 * 1024)
    assert numbers["... predictors counted, one sequence of 8K"] == pytest.approx(bits + predictors / 2**13)


def test_a_longer_stream_is_that_which_would_be_written():
    """Of 4-bit deltas, whose bytes do not depend on the data: 512 steps from a file of 512."""
    report = framework.stream("4-bit deltas")
    assert framework._ratio_at(report, framework.STEPS) == pytest.approx(report["ratio_every_fp32"], rel=2e-3)
    states = framework._states(4096)
    assert states == (133120, 4032, 4096 * 4097 // 2)
    assert framework._ratio_at(report, 4096) == pytest.approx(states[2] / (states[0] + states[1] / 8), rel=2e-2)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1), (framework.ALL_CODES, 0)])
def test_bits_with_fallback_are_those_of_the_codec(threshold, share):
    scale = 32 / (64 * 64)
    assert shapes.bits_of(presets.vqq(threshold)) == pytest.approx(framework.fallback_bits(share) + scale)


def test_other_contents_are_another_audit(tmp_path, monkeypatch):
    """Tables of the run at hand come before the repository's; one that changes in between is refused."""
    before = audited_tables()
    assert (
        before == json.loads((tables.repository_root() / "results/12_claims.json").read_text())["parameters"]["tables"]
    )
    (tmp_path / "results").mkdir()
    (tmp_path / "results/03_depth.csv").write_text("model\nx\n")
    monkeypatch.setenv("VQKV_OUT", str(tmp_path))
    after = audited_tables()
    assert [name for name in before if after[name] != before[name]] == ["03_depth"]
    with pytest.raises(DataError, match="table 03_depth"):
        claims_audit(before)
