"""The claims audit: the committed rows again, the one rule of verdicts, and figures that are known from elsewhere."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv import presets
from vqkv.errors import DataError
from vqkv.study import steering, tables
from vqkv.study.experiments import audit, audited_tables, claims_audit
from vqkv.study.experiments.audit import framework, shapes
from vqkv.study.experiments.audit.expressions import evaluate, filled
from vqkv.study.experiments.audit.rows import DOES_NOT, HOLDS, IN_PART, NEITHER, VERDICTS, agrees, row
from vqkv.study.experiments.audit.vocabulary import TASKS

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
ELSEWHERE = 4  # sizes of predictors, in names of rows


def test_the_committed_rows_come_out_again():
    committed = (tables.repository_root() / "results/12_claims.csv").read_text()
    claims = claims_audit(audited_tables())
    assert claims.to_csv(index=False, float_format="%.6g", lineterminator="\n") == committed
    assert set(claims["verdict"]) == set(VERDICTS)


@pytest.mark.parametrize(
    "text",
    ["kl.max()", "(lambda: 1)()", "[x for x in kl]", "kl if 1 else 2", "f'{kl}'", "mean(*kl)", "1 < 2 < 3", "kl[0:1]"],
)
def test_expressions_are_nothing_else(text):
    kl = pd.Series([1.0, 2.0])
    with pytest.raises(SyntaxError, match="cannot stand in an expression"):
        evaluate(text, {"kl": kl, "table": {"kl": kl}, "mean": np.mean})


def test_names_are_columns_never_attributes():
    table = pd.DataFrame({"kl": [1.0, 2.0, 4.0], "tier": ["a", "b", "b"]})
    names = dict(table.items()) | {"table": table, "mean": np.mean}
    assert evaluate("mean(kl[tier == 'b' and kl < 4])", names) == 2
    assert evaluate("[table.kl, -1] / 4 ** (3 - 2)", names).tolist() == [0.25, 0.5, 1, -0.25]
    assert filled("{mean(kl):.2f} of {2 * 3}", names) == "2.33 of 6"
    for missing in ("table.shape", "table.__class__", "kl.__class__", "open('x')", "other"):
        with pytest.raises(KeyError):
            evaluate(missing, names)


@given(RULES, CASES)
def test_a_row_shows_the_case_that_agrees_least(rule, cases):
    found = row(CLAIM | {"rule": rule}, cases, {})
    shown = found["published"], found["recomputed"]
    assert shown in cases and agrees(rule, *shown) == all(agrees(rule, *case) for case in cases)
    agree = sum(agrees(rule, *case) for case in cases)
    assert found["verdict"] == {0: DOES_NOT, len(cases): HOLDS}.get(agree, IN_PART)
    assert (found["agree"], found["of"]) == (agree, len(cases))


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


def audited(table: pd.DataFrame, **columns: str) -> dict:
    claim = CLAIM | columns
    return row(claim, *audit._found(claim, {"03_grouping": table}))


def test_a_direction_needs_its_interval():
    each = pd.Series(["3 3 3", "2 2 2", "0.1 0.1 6"], index=["a", "b", "c"])
    table = pd.DataFrame({"model": "m", "system": each.index, "kl_mean": [3, 2, 6.2 / 3], "kl_each": each})
    claim = {"measured": "mean(kl_mean)", "rows": "system == 'a'", "rule": "above: 1"}
    sure, unsure = (audited(table, **claim, over=f"system == '{other}'") for other in "bc")
    assert (sure["verdict"], sure["low"], sure["high"]) == (HOLDS, 1.5, 1.5)
    assert unsure["recomputed"] > 1 > unsure["low"] and unsure["verdict"] == DOES_NOT


def test_an_open_figure_is_where_it_can_be():
    table = pd.DataFrame({"x": [2.0, 5.0]})
    shown = [audited(table, measured=f"between({ends})")["recomputed"] for ends in ("1, 3", "3, 4", "0, 1")]
    assert shown == [2, 3, 1]
    assert audited(table, measured="x", published="between(1, 3)")["published"] == 3


def test_each_model_of_a_measured_table_is_a_case():
    claim = {"measured": "mean(kl)", "rows": "x == 1", "reason": "{least:g} to {most:g} on {models}"}
    table = pd.DataFrame({"model": ["m", "m", "folder/n"], "x": 1, "kl": [1.0, 3.0, 5.0]})
    found = audited(table, **claim)
    assert (found["agree"], found["of"], found["recomputed"], found["how"]) == (1, 2, 5, "measured here")
    assert found["reason"] == "2 to 5 on m and n"
    for lacking in (table.assign(x=2), table[["model", "x"]]):
        absent = audited(lacking, **claim)
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


def test_claims_are_quoted_and_stated_figures_named():
    listed = audit.listed()
    assert not ((listed["arithmetic"] != "") & (listed["measured"] != "")).any() and listed["claim"].is_unique
    tested = listed[(listed["arithmetic"] + listed["measured"] != "") & (listed["rule"] != "ours")]
    assert (tested["quote"].str.split().str.len().between(1, 15)).all() and (listed["section"] != "").all()
    known = tables.published("stated_figures")
    assert known["key"].is_unique and set(known["source"]) == set(listed["source"]) - {"KVQuant"}
    expressions = " ".join(listed[["published", "arithmetic", "measured", "rows", "reason"]].to_numpy().ravel())
    assert set(known["key"]) <= set(re.findall(r"\w+", expressions))


def test_published_ratios_are_those_of_the_sources_tables():
    said = audit.listed().set_index("claim")["published"]
    first = tables.published("rvq_table1_key_value")[list(TASKS)]
    contiguous, strided, value = (first.iloc[0] - first.iloc[1:4]).sum(axis=1)
    assert said["contiguous key groups lose more than strided ones"] == f"{contiguous:.2f} / {strided:.2f}"
    assert said["keys lose more than values"] == f"{strided:.2f} / {value:.2f}"
    ppl = tables.published("aqua_detailed").set_index("config")["wiki2_ppl"]
    for claim, over, under in [
        ("2-bit HIGGS loses more than with predictors", "HIGGS-2b-gs1024", "AQUA-KV (HIGGS)"),
        ("no key predictor loses more than no value predictor", "w/o K predictor", "w/o V predictor"),
        ("GPTQ's predictors lose as much as linear ones", "GPTQ (41 MiB)", "AQUA-KV (HIGGS)"),
        ("sinks in 16 bits matter", "w/o 16-bit attention sink", "AQUA-KV (HIGGS)"),
    ]:
        assert said[claim] == f"({ppl[over]:g} - 6.98) / ({ppl[under]:g} - 6.98)" and ppl["uncompressed"] == 6.98


def test_sizes_are_those_of_arithmetic():
    numbers = tables.stored("12_claims")[0].set_index("claim")["recomputed"]
    assert numbers["smaller than fp16, 8 codebooks of 2,048"] == pytest.approx(16 / 2.875, rel=5e-6)
    codebooks = 2.875 + 8 * 64 * 2**20 / (2**13 * 2 * 32 * 8 * 128)  # 64 of 8 x 2,048 x 32 in fp16, 8K tokens
    assert numbers["... codebooks counted, one sequence of 8K"] == pytest.approx(16 / codebooks, rel=5e-6)
    bits = (27 * (2 + 16 / 1024) + 4 + 16 / 1024) / 28  # the first layer has 4
    assert numbers["AQUA-KV, HIGGS 2 bits, detailed table"] == pytest.approx(bits, rel=5e-6)
    predictors = 8 * numbers["linear predictors of a 3B model"] * 2**20 / (2 * 28 * 1024)
    assert numbers["... predictors counted, one sequence of 8K"] == pytest.approx(bits + predictors / 2**13, rel=5e-6)


def test_a_longer_stream_is_that_which_would_be_written():
    """Of 4-bit deltas, whose bytes do not depend on the data: 512 steps from a file of 512."""
    report = framework.stream("fp32", "int4")
    assert framework.longer_ratio(report, framework.STEPS)[0] == pytest.approx(report["ratio_every_fp32"][0], rel=2e-3)
    states = framework.states(4096)
    assert states == (133120, 4032, 4096 * 4097 // 2)
    assert framework.longer_ratio(report)[0] == pytest.approx(states[2] / (states[0] + states[1] / 8), rel=2e-2)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1), (1e9, 0)])
def test_bits_with_fallback_are_those_of_the_codec(threshold, share):
    scale = 32 / (64 * 64)
    assert shapes.encoded_bits(presets.vqq(threshold)) == pytest.approx(framework.fallback_bits(share) + scale)


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
