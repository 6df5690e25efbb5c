"""The rule of page 11: chosen on one text by bits and tokens, seen on another."""

import numpy as np
import pandas as pd
import pytest

from vqkv.study.experiments.rule import by_rule, chosen, share_of_bits


def rows(*given):
    """(system, nominal bits, bits at 8k, bits at 128k, KL)."""
    table = pd.DataFrame(given, columns=["system", "nominal_bits", "bits_8k_x1", "bits_128k_x1", "kl_mean"])
    return table.assign(kl_each=[f"{kl} {1.5 * kl}" for kl in table["kl_mean"]])


SEARCHED = rows(
    ("kvtc 1", 0, 4, 1.1, 0.03), ("kvtc 1, rank 480", 0, 1.9, 0.9, 0.1), ("kvtc 2", 0, 8, 2.2, 0.01),
    ("kvtc 2, rank 480", 0, 2.8, 1.9, 0.1), ("steps, short", 0.9, 1.1, 0.9, 0.1), ("steps, long", 0.9, 1.9, 1.0, 0.02),
)  # fmt: skip
TABLE = rows(
    ("kvtc 1", 0, 4, 1.1, 0.04), ("kvtc 1, rank 480", 0, 1.9, 0.9, 0.2), ("kvtc 2", 0, 8, 2.2, 0.01),
    ("kvtc 0.5, rank 480", 0, 1.4, 0.4, 0.4), ("kvtc 2, rank 480", 0, 2.9, 1.9, 0.2), 
    ("trellis, short", 0.5, 0.7, 0.5, 0.3),
    ("trellis, long", 0.5, 1.5, 0.6, 0.04), ("trellis, long", 1.8, 2.8, 1.9, 0.001), ("higgs 2", 0, 2.3, 2.2, 0.1),
)  # fmt: skip


def test_what_lies_above_a_line_between_others_is_not_chosen():
    assert chosen(SEARCHED, "8k")["system"].tolist() == [
        "steps, short",
        "steps, long",
        "kvtc 1, rank 480",
        "kvtc 1",
        "kvtc 2",
    ]
    between = rows(("steps, joint", 0.9, 1.5, 0.95, 0.06))  # on the line's other side of what lies on it
    assert "steps, joint" not in set(chosen(pd.concat([SEARCHED, between], ignore_index=True), "8k")["system"])
    assert chosen(SEARCHED, "128k")["bits"].tolist() == [0.9, 1.0, 0.9, 1.1, 2.2]


def test_other_text_shows_what_was_chosen_at_the_nearest_rate():
    found = by_rule(TABLE, SEARCHED, ["8k", "128k"]).set_index(["system", "nominal_bits"])
    assert found["family"].tolist() == ["kvtc"] * 5 + ["best"] * 3 + ["higgs"]
    gone = [found.index[found[f"bits_{name}_x1"].isna()].get_level_values(0).tolist() for name in ("8k", "128k")]
    assert gone == [["kvtc 2, rank 480"]] * 2


def test_shares_of_bits_are_those_of_straight_lines_in_the_logarithm():
    ours, theirs = [("trellis, long", b, b, b, 4.0**-b) for b in (1, 3)], [("kvtc 4", 0, 4, 4, 4.0**-2)]
    theirs += [("kvtc 2", 0, 2, 2, 4.0**-1)]
    searched = rows(*theirs, ("steps, long", 1, 1, 1, 0.1))
    found = share_of_bits(by_rule(rows(*ours, *theirs), searched, ["8k"]), "8k")
    assert found["least"] == pytest.approx(0.5) and found["largest"] == pytest.approx(0.5)
    assert found["least_low"] == pytest.approx(0.5) == found["largest_high"]  # windows are as far apart for both
    assert np.isnan(share_of_bits(by_rule(rows(*ours, *theirs), searched, ["8k"]), "8k", most=1)["least"])
