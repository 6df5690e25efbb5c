"""The rule of page 11: what validation text prefers, by bits and tokens, and what test text says of it."""

import numpy as np
import pandas as pd
import pytest

from vqkv.study.experiments.rule import against_best, by_rule, chosen, pays_from, share_of_bits

ROWS = [  # system, nominal bits, bits at 8k and at 128k, KL
    ("kvtc 1", 0, 4, 1.1, 0.03), ("kvtc 1, rank 480", 0, 1.9, 0.9, 0.1), ("kvtc 2", 0, 8, 2.2, 0.01),
    ("kvtc 2, rank 480", 0, 2.8, 1.9, 0.1), ("short", 0.9, 1.1, 0.9, 0.1), ("long", 0.9, 1.9, 1.0, 0.02),
    ("joint", 0.9, 1.5, 0.95, 0.06),
]  # fmt: skip
SEARCHED = pd.DataFrame(ROWS, columns=["system", "nominal_bits", "bits_8k_x1", "bits_128k_x1", "kl_mean"])


def test_what_lies_above_a_line_between_others_is_not_chosen():
    found = {name: chosen(SEARCHED, name) for name in ("8k", "128k")}
    assert found["8k"]["system"].tolist() == ["short", "long", "kvtc 1, rank 480", "kvtc 1", "kvtc 2"]
    assert found["128k"]["bits"].tolist() == [0.9, 1.0, 0.9, 1.1, 2.2]


def table(*given):
    """(system, nominal bits, bits, KL), with 1 MB of side information in ``mid``."""
    rows = pd.DataFrame(given, columns=["system", "nominal_bits", "bits_per_value", "kl_mean"]).assign(
        model="m", seed=0
    )
    rows = rows.assign(side_bytes=1e6 * rows["system"].isin(["best-mid"]))
    for name in ("8k", "128k"):
        rows[f"bits_{name}_x1"] = rows["bits_per_value"]
    return rows.assign(kl_each=[f"{kl} {1.5 * kl}" for kl in rows["kl_mean"]])


CURVE = [("best-long", b, b, 4.0**-b) for b in (1, 3)] + [("kvtc 4", 0, 4, 4.0**-2), ("kvtc 2", 0, 2, 4.0**-1)]


def test_a_design_has_bits_where_the_rule_takes_it_and_kvtc_where_it_is_on_its_hull():
    rows = table(*CURVE, ("best-mid", 1, 1, 0.1), ("kvtc 3, rank 480", 0, 3, 0.2), ("kivi 2", 0, 2, 0.1))
    found = by_rule(rows, ["8k", "128k"], 192).set_index("system")
    assert found["family"].tolist() == ["best"] * 2 + ["kvtc"] * 2 + ["best", "kvtc", "kivi"]
    gone = {name: set(found.index[found[f"bits_{name}_x1"].isna()]) for name in ("8k", "128k")}
    assert gone == {"8k": {"best-long", "kvtc 3, rank 480"}, "128k": {"best-mid", "kvtc 3, rank 480"}}


def test_shares_of_bits_are_those_of_straight_lines_in_the_logarithm():
    seen = by_rule(table(*CURVE), ["128k"], 192)
    found = share_of_bits(seen, "128k")
    assert found["lowest"] == pytest.approx(0.5) == found["highest"]
    assert found["lowest_low"] == pytest.approx(0.5) == found["highest_high"]  # windows are as far apart for both
    assert np.isnan(share_of_bits(seen, "128k", most=1)["lowest"])
    single = share_of_bits(seen.assign(kl_each=seen["kl_mean"]), "128k")  # one window: a number, once read from a file
    assert single["lowest"] == pytest.approx(0.5)
    assert np.isnan(list(share_of_bits(seen[seen["family"] == "best"], "128k").values())).all()
    broken = pd.concat([table(*CURVE), table(("kvtc 1", 0, 1, np.nan), ("kvtc 8", 0, 8, np.nan))], ignore_index=True)
    assert share_of_bits(by_rule(broken, ["128k"], 192), "128k") == found


def test_others_are_set_beside_the_rule_at_their_own_bits():
    seen = by_rule(table(*CURVE, ("kivi 2", 0, 2, 4.0**-1), ("int1", 0, 0.5, 1.0)), ["128k"], 192)
    found = against_best(seen, ["128k"]).loc["128k"]
    assert found.loc["kivi 2", "ratio"] == pytest.approx(1 / 4) and found.loc["int1", "better"] == "no rate"


def test_side_information_pays_from_where_the_bits_that_it_saves_outweigh_it():
    rows = table(
        ("best-short", 1, 2, 0.1), ("best-short", 2, 4, 0.001), ("best-mid", 1, 1, 0.2), ("best-mid", 2, 2, 0.01)
    )
    found = pays_from(rows, "best-short", "best-mid", 1000)
    at = 1 + np.log(0.2 / 0.1) / np.log(0.2 / 0.01)
    assert found.index.tolist() == [1] and found.item() == pytest.approx(8e6 / 1000 / (2 - at))
