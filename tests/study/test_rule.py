"""The rule of page 11: what validation text prefers, by bits and tokens."""

import pandas as pd

from vqkv.study.experiments.rule import chosen

ROWS = [  # system, nominal bits, bits at 8k and at 128k, KL
    ("kvtc 1", 0, 4, 1.1, 0.03), ("kvtc 1, rank 480", 0, 1.9, 0.9, 0.1), ("kvtc 2", 0, 8, 2.2, 0.01),
    ("kvtc 2, rank 480", 0, 2.8, 1.9, 0.1), ("short", 0.9, 1.1, 0.9, 0.1), ("long", 0.9, 1.9, 1.0, 0.02),
    ("joint", 0.9, 1.5, 0.95, 0.06),
]  # fmt: skip
SEARCHED = pd.DataFrame(ROWS, columns=["system", "nominal_bits", "bits_8k_x1", "bits_128k_x1", "kl_mean"])


def test_what_lies_above_a_line_between_others_is_not_chosen():
    found = {name: chosen(SEARCHED, name) for name in ("8k", "128k")}
    assert found["8k"]["system"].tolist() == ["short", "long", "kvtc 1, rank 480", "kvtc 1", "kvtc 2"]
    assert found["8k"]["rate"].tolist() == [0.9, 0.9, 1, 1, 2]
    assert found["128k"]["bits"].tolist() == [0.9, 1.0, 0.9, 1.1, 2.2]
