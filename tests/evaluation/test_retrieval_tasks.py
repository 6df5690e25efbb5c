"""Tasks whose answer stands in the context: that it does, that it is to be had nowhere else, and what chance is."""

import pytest

from vqkv import DataError
from vqkv.evaluation.harness import run_tasks
from vqkv.evaluation.harness.retrieval_data import copied, names, recall_pairs


@pytest.mark.parametrize("gap", [0, 12])
def test_a_key_is_listed_once_and_its_value_follows(gap):
    for row in recall_pairs(20, num_pairs=8, gap=gap)["test"]:
        *lines, key = row["context"].split("\n")
        listed = [line for line in lines[:8] if line.startswith(key + " ")]
        assert listed == [key + row["target"]] and len(lines) == 8 + gap
        assert len({line.split()[1] for line in lines[:8]}) == 8


def test_pairs_need_as_many_words(tokenizer):
    with pytest.raises(DataError, match="ask for fewer pairs"):
        recall_pairs(1, num_pairs=4000, tokenizer=tokenizer)


def test_what_is_copied_stood_there_and_is_left_out_of_the_control():
    rows, control = (copied(30, between_chars=300, seen=seen)["test"].to_list() for seen in (True, False))
    for row, guess in zip(rows, control, strict=True):
        function = row["context"][: len(row["context"]) - len(guess["context"])]
        again = row["context"][row["context"].rindex(function[: function.index("(") + 1]) :]
        assert row["target"] == guess["target"] == function[len(again) :].split("\n")[0] and function.startswith(again)


def test_only_the_right_name_is_defined_above_and_not_just_before():
    for row in names(40, context_chars=800)["test"]:
        right, context = row["choices"][row["answer"]], row["context"]
        assert len(context) - context.rindex(right) >= len(context) // 4
        assert len(set(row["choices"])) == 4 and not any(name in context for name in row["choices"] if name != right)


def test_the_suite_runs_and_states_its_standard_errors(llama, tokenizer):
    rows = run_tasks(llama, tokenizer, None, ["vqkv_recall_4_pairs", "vqkv_copy", "vqkv_names"], limit=8)
    assert [row["metric"] for row in rows] == ["acc"] * 3 and all(0 <= row["stderr"] < 0.25 for row in rows)
