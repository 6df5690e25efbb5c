"""What page 07 makes of its rows: what HIGGS alone would need, who wins within a budget, what the source printed."""

import math

import pandas as pd
import pytest

from vqkv.study import experiments, tables
from vqkv.study.experiments.common import all_told
from vqkv.study.experiments.predictors import CONTEXTS, PUBLISHED, WITHOUT, _against_plain, _table

ABOUT = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 64}


def row(label, bits, kl, side_bytes=0, predicted=False):
    found = {"model": "m", "label": label, "bits_per_value": bits, "kl_mean": kl, "side_bytes": side_bytes}
    found |= {"predicted": predicted, "width": 64, "ppl_increase": 1.0}
    return found | {name: all_told(found, ABOUT, tokens) for name, tokens in CONTEXTS.items()}


PLAIN = [row(label, bits, kl) for label, bits, kl in zip(WITHOUT, (2.0, 3.0, 4.0), (1e-1, 1e-2, 1e-3), strict=True)]


@pytest.mark.parametrize(
    ("bits", "kl", "plain_bits", "saved"),
    [
        (2.0, math.sqrt(1e-2 * 1e-3), 3.5, 1.5),
        (2.0, 1e-5, 4.0, 2.0),  # better than HIGGS of 4 bits: cut off there
        (2.0, 0.5, math.nan, math.nan),  # worse than HIGGS of 2 bits
        (3.2, 1e-2, 3.0, math.nan),  # nothing saved
    ],
)
def test_predictors_pay_where_their_bytes_equal_the_bits_they_save(bits, kl, plain_bits, saved):
    aqua = row("aqua", bits, kl, side_bytes=1000, predicted=True)
    found = _against_plain(aqua, [*PLAIN, aqua], 2)
    assert found["plain_bits"] == pytest.approx(plain_bits, nan_ok=True)
    assert 8 * 1000 / (found["pays_from"] * 2 * 2 * 64) == pytest.approx(saved, nan_ok=True)


def test_the_winner_within_a_budget_changes_with_the_context():
    aqua = row("aqua", 2.0, 1e-3, side_bytes=4096 * 2 * 64, predicted=True)
    found = experiments.within_budget(pd.DataFrame([*PLAIN, aqua]), 3.0)
    assert found.loc["m"].tolist() == [WITHOUT[1], WITHOUT[1], "aqua", "aqua"]
    assert experiments.within_budget(pd.DataFrame(PLAIN), 1.0).loc["m"].tolist() == ["none"] * 4


def test_every_published_row_is_one_of_ours_and_the_sources():
    ours = {label for block in _table(16, [2], 4, 8, 0.5, 4, 0).values() for label in block}
    published = tables.published("aqua_detailed")
    assert set(PUBLISHED) <= ours and set(PUBLISHED.values()) <= set(published["config"])
    joined = experiments.beside_published(pd.DataFrame([row("higgs 2", 2.0, 0.1)]), published)
    assert joined.loc["higgs 2", "m kl_mean"] == 0.1
    assert joined.loc["aqua higgs 2", "published ppl_increase"] == pytest.approx(100 * (7.03 / 6.98 - 1))
