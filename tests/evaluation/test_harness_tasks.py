"""Suites, this package's own tasks, and lm_eval's real task definitions on data of the real layout."""

import json

import datasets
import leaderboard_data
import pytest
from small_models import COMMON, load
from transformers import LlamaConfig
from typer.testing import CliRunner

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.cli import app
from vqkv.data.corpus import load_corpus
from vqkv.data.recall import RecallTask
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.harness import SUITES, Entry, entries, local_data, run_tasks
from vqkv.evaluation.harness.tasks import known_names
from vqkv.models.load import load_model

MMLU_ONE = Entry("mmlu_anatomy", 5, ("acc,none",))  # the group has 57 of these


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model with room for 25 examples, its tokenizer and a compressor."""
    config = LlamaConfig(**COMMON | {"max_position_embeddings": 4096})
    folder = tmp_path_factory.mktemp("llama")
    model, (_, tokenizer) = load("llama", folder, config=config), load_model(str(folder))
    calibration = load_corpus("python-stdlib", tokenizer, seq_len=64, num_seqs=16)
    preset = presets.vqllm(num_quantizers=2, codebook_size=16, group_size=16)
    return model, tokenizer, calibrate(model, calibration, preset, progress=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    leaderboard_data.write(folder)
    return folder


@pytest.fixture
def offline(data, monkeypatch):
    monkeypatch.chdir(data)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", data / ".cache")


def test_lm_eval_knows_every_name():
    assert {entry.task for suite in SUITES.values() for entry in suite} <= set(known_names())
    assert len(SUITES["longbench"]) == 14 and len(SUITES["old-leaderboard"]) == 6
    assert entries(["wikitext", "boolq", MMLU_ONE])[1:] == [Entry("boolq"), MMLU_ONE]
    with pytest.raises(UnknownNameError, match="'arc_chalenge'. Did you mean 'arc_challenge'") as error:
        entries("arc_chalenge")
    assert len(str(error.value)) < 400


SHOTS = {"arc_challenge": 25, "hellaswag": 10, "mmlu_anatomy": 5, "truthfulqa_mc2": 0, "winogrande": 5, "gsm8k": 5}


def test_the_real_leaderboard_tasks(small, offline):
    wanted = [MMLU_ONE if entry.task == "mmlu" else entry for entry in SUITES["old-leaderboard"]]
    rows = run_tasks(*small, wanted[:3], limit=1, protocol="in_place", max_length=1300)
    rows += run_tasks(*small, [*wanted[3:], "wikitext"], limit=1, max_length=1300)
    first = {row["task"]: row for row in reversed(rows)}
    assert {task: first[task]["num_fewshot"] for task in SHOTS} == SHOTS
    assert [first[task]["metric"] for task in SHOTS] == ["acc_norm", "acc_norm", "acc", "acc", "acc", "exact_match"]
    assert first["gsm8k"]["filter"] == "strict-match" and first["wikitext"]["metric"] == "word_perplexity"
    assert all(row["n"] == 1 for row in rows)
    assert all(row["bits_per_value"] == pytest.approx(1) and row["packed_share"] > 0.4 for row in rows)


def test_data_out_of_reach_is_named_with_a_remedy(small):
    with pytest.raises(DataError, match=r"'hellaswag': Rowan/hellaswag cannot be reached.*hf download Rowan/hellaswag"):
        run_tasks(*small, "hellaswag", limit=1)


def test_local_tasks_are_quiet_and_the_same_each_time(small, capfd):
    first = run_tasks(*small, limit=2)
    assert capfd.readouterr() == ("", "")
    assert run_tasks(*small, limit=2) == first
    assert {row["task"] for row in first} == {entry.task for entry in SUITES["local"]}
    assert all(row["n"] == 2 and 0 <= row["value"] <= 1 and row["num_fewshot"] == 0 for row in first)


@pytest.mark.parametrize("distance", [16, 64, 256])
def test_recall_documents(distance):
    tokenizer = load_model("vqkv/llama-mini")[1]
    for row in local_data.recall(20, distance, tokenizer=tokenizer.name_or_path)["test"]:
        ids = tokenizer(row["context"] + row["choices"][row["answer"]])["input_ids"]
        assert abs(row["distance"] - distance) <= 1 and ids[-1] == ids[-1 - row["distance"]]
        assert ids[-2] == ids[-2 - row["distance"]] and ids[:-1].count(ids[-1]) - ids[:-1:3].count(ids[-1]) == 1
        assert len(set(row["choices"])) == 4 and all(row["context"].count(f"{x}\n") == 1 for x in row["choices"])
        assert len(ids) <= 1024


def test_a_distance_that_no_list_has():
    last = 3 * (len(RecallTask(load_model("vqkv/llama-mini")[1]).keys) - local_data.EARLIER)
    assert local_data.recall(1, last)["test"]
    for distance in (2, last + 3):
        with pytest.raises(DataError, match="is possible"):
            local_data.recall(1, distance)


def test_tasks_command(small, tmp_path):
    model, _, fitted = small
    fitted.save_pretrained(tmp_path)
    arguments = ["tasks", model.vqkv_name, "--compressor", str(tmp_path), "-t", "vqkv_recall_16", "--limit", "2"]
    found = CliRunner().invoke(app, arguments)
    (row,) = json.loads(found.stdout)
    assert row["task"] == "vqkv_recall_16" and row["n"] == 2 and row["bits_per_value"] == pytest.approx(1)
    found = CliRunner().invoke(app, [*arguments, "--protocol", "snapshot"])
    assert found.exit_code == 2 and "in_place" in found.stderr and "Traceback" not in found.stderr
