"""The claims audit: the committed rows again, verdicts, and figures that are known from elsewhere."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vqkv import presets
from vqkv.errors import DataError
from vqkv.study import tables
from vqkv.study.experiments import audit, audited_tables, claims_audit
from vqkv.study.experiments.audit import aqua, framework, residual_vq, shapes
from vqkv.study.experiments.audit.rows import MEASURED, UNTESTED, YES, furthest, row

FACTORS = st.floats(0.01, 100)
CLAIM = audit.listed().iloc[0].to_dict() | {"published": "2", "table": "03_grouping", "reason": "mean {n}."}


@pytest.fixture(scope="module")
def claims():
    return claims_audit(audited_tables())


def test_the_committed_rows_come_out_again(claims):
    """All columns; the committed table was made when the claims were code."""
    committed = (tables.repository_root() / "results/12_claims.csv").read_text()
    assert claims.to_csv(index=False, float_format="%.6g", lineterminator="\n") == committed
    assert list(claims["source"].unique()) == list(audit.SOURCES)
    assert (claims.loc[claims["how"] == MEASURED, "recomputed"] > 0).all()  # the committed tables have what it needs


@given(st.lists(st.tuples(FACTORS, FACTORS), min_size=1, max_size=6))
def test_furthest_is_furthest_either_way(pairs):
    found = furthest(pairs)
    ratio = found["published"] / found["recomputed"]
    assert max(ratio, 1 / ratio) == pytest.approx(max(max(a / b, b / a) for a, b in pairs))
    assert tuple(found.values()) in pairs


def test_a_measured_row_needs_its_table():
    there = row(CLAIM, {"recomputed": 2.0, "n": 3})
    assert (there["holds"], there["how"], there["recomputed"], there["reason"]) == (YES, MEASURED, 2, "mean 3.")
    for found in (None, {"recomputed": math.nan}):
        absent = row(CLAIM, found)
        assert absent["holds"] == UNTESTED and absent["published"] == 2 and "run page 03" in absent["reason"]


def test_every_stated_figure_is_tested_or_named():
    known = tables.published("stated_figures")
    text = "".join(path.read_text() for path in Path(audit.__file__).parent.iterdir() if path.is_file())
    assert known["key"].is_unique and known["value"].notna().all() and set(known["source"]) == set(audit.SOURCES)
    built = ("rvq_gsm8k", "rvq_mmlu")  # keys that code puts together, as it does where only the source is left out
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
    (tmp_path / "results/06_depth.csv").write_text("model\nx\n")
    monkeypatch.setenv("VQKV_OUT", str(tmp_path))
    after = audited_tables()
    assert [name for name in before if after[name] != before[name]] == ["06_depth"]
    with pytest.raises(DataError, match="table 06_depth"):
        claims_audit(before)
