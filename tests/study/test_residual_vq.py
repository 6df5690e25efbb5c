"""What pages 03 and 10 ask of residual VQ: whose codebooks, which task, which training."""

import pandas as pd
import pytest

from vqkv.study import figures
from vqkv.study.experiments import given_back, group_sizes
from vqkv.study.experiments.finetuning import BOTH, TUNED
from vqkv.study.subject import Subject


def test_codebooks_of_their_own_cost_side_information_and_no_bits():
    subject = Subject("vqkv/llama-mini", "python-stdlib", [4, 128], [2, 128])
    quantizer = {"codebook_size": 16, "num_quantizers": 2, "group_size": 32}
    table = group_sizes(subject=subject, seeds=[0], sizes=[16, 32], quantizer=quantizer, chunk_size=32)
    own = table[table["group_size"] == 32].set_index("codebooks")
    codebooks = own["side_bytes"] / own["side_bytes"]["shared"]  # 2 KV heads of 2 groups each
    assert codebooks.to_dict() == {"shared": 1, "by group": 2, "by head and group": 4}
    assert own["bits_per_value"].nunique() == 1 and own["key_mse"]["by head and group"] < own["key_mse"]["shared"]
    assert (own["bits_8k"] - own["bits_per_value"]).is_monotonic_increasing
    halves = table[table["group_size"] == 16].set_index("num_quantizers")["bits_per_value"]
    assert halves[1] == own["bits_per_value"]["shared"] < halves[2]
    assert len(figures.group_size_lines(table, 2).axes) == 1


def test_what_training_gives_back_is_a_share_of_what_codes_cost():
    rows = [(0, BOTH, 0, 30, 20), (0, TUNED, 1e-4, 25, 19), (1, BOTH, 0, 40, 20), (1, TUNED, 1e-4, 45, 21)]
    columns = ["seed", "label", "learning_rate", "ppl", "ppl_exact"]
    found = given_back(pd.DataFrame(rows, columns=columns).assign(num_quantizers=2))
    assert dict(zip(zip(found["seed"], found["learning_rate"]), found["given_back"])) == {
        (0, 1e-4): pytest.approx(50), (1, 1e-4): pytest.approx(-25),
    }  # fmt: skip
    assert len(figures.tuning_dots(found).axes) == 1
