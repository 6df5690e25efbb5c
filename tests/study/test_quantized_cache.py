"""Page 08's tables at a small size: residual lengths and greedy text."""

import pandas as pd
import pytest

from vqkv.study import experiments


def test_what_is_held_exact_costs_bits_and_spares_loss(llama_folder):
    systems = {"swept": ["transformers quanto 2"], "lengths": [0, 16], "systems": ["transformers hqq 8"]}
    subject = experiments.Subject(llama_folder, "python-stdlib", [1, 64], [3, 64])
    table = experiments.residual_lengths(subject=subject, **systems, length=16, prompt_len=32)
    assert table["length"].tolist() == [0, 16, 16]
    theirs, eight = (rows.set_index("length") for _, rows in table.groupby("system", sort=False))
    assert theirs.loc[0, "held"] == 0 and theirs.loc[16, "held"] == pytest.approx(sum([*range(16), *range(15)]) / 31)
    assert theirs.loc[16, "kl_mean"] < theirs.loc[0, "kl_mean"]
    assert theirs["bits_per_value"].between(2.5, 2.625).all()  # scales weighed in 16 bits, few groups of 64 padded
    expected = theirs["bits_per_value"] + (16 - theirs["bits_per_value"]) * theirs["held"] / 1024
    assert theirs["bits_1k"].tolist() == pytest.approx(expected.tolist())
    assert eight["kl_mean"].iloc[0] < 0.1 * theirs.loc[16, "kl_mean"]


def test_greedy_text_is_compared_with_the_exact_model_s_own(llama_folder):
    subject = experiments.Subject(llama_folder, "python-stdlib", [1, 64], [3, 40])
    systems = ["transformers quanto 2", "quanto 4"]
    table = experiments.greedy_text(subject=subject, systems=systems, new_tokens=12)
    assert list(dict.fromkeys(table["system"])) == ["exact", "fp16", *systems] and len(table) == 4 * 3
    assert (table[table["system"] == "exact"]["same"] == 12).all() and table["same"].between(1, 12).all()


def test_first_difference():
    rows = [("exact", 0, 4), ("small", 0, 1), ("exact", 1, 4), ("small", 1, 4)]
    greedy = pd.DataFrame(rows, columns=["system", "prompt", "same"]).assign(model="m", new_tokens=4)
    found = experiments.first_difference(greedy).loc["m"]
    assert found.loc["small", ["q1", "median", "q3", "never"]].tolist() == [1.75, 2.5, 3.25, 0.5]
    assert found.loc["exact", "never"] == 1
