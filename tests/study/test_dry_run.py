"""A dry run: what it shows, what it looks for, and that a network that is not there is tried once."""

import socket
from unittest.mock import Mock

import corpus_folders as folders
import datasets
import pytest
import small_models
from huggingface_hub import constants
from typer.testing import CliRunner

from vqkv.errors import DataError
from vqkv.study import driver as study
from vqkv.study import dry_run as dry
from vqkv.study.dry_run import dry_run


def test_the_network_is_tried_once_and_not_for_each_model_and_text(monkeypatch):
    tried = []

    def nowhere(*address, **more):
        tried.append(address[0])
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, nowhere)
    models = {"a": "nobody/a", "b": "meta-llama/Meta-Llama-3-8B"}
    lines, missing = dry_run(
        {page: {"model": models[page], "second_model": "nobody/else", "corpus": "pg19"} for page in "ab"}
    )
    assert len(tried) <= 1
    assert missing[0].startswith("https://huggingface.co does not answer")
    assert [line.partition(":")[0] for line in missing[1:]] == [
        "model nobody/a", "model nobody/else", "model meta-llama/Meta-Llama-3-8B",
        "corpus pg19 (train)", "corpus pg19 (validation)", "corpus pg19 (test)",
    ]  # fmt: skip
    assert "  model meta-llama/Meta-Llama-3-8B: weights of 16.1 GB in float16" in lines  # known without a network
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_what_keeps_a_model_away_is_told_apart(monkeypatch):
    for variable in dry.OFFLINE:
        monkeypatch.delenv(variable, raising=False)
    for message, remedy in {
        "You are trying to access a gated repo.\nMake sure": "ask for access on https://huggingface.co/a/b",
        "a/b is not a local folder and is not a valid model identifier listed on": "check the spelling",
        "Connection timed out": "check the network",
    }.items():
        monkeypatch.setattr(dry.AutoConfig, "from_pretrained", Mock(side_effect=OSError(message)))
        with pytest.raises(DataError, match=remedy):
            dry.check_model("a/b")


def test_the_command_says_what_would_be_run_and_whether_it_can(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    model = str(small_models.make("mistral", tmp_path / "model"))
    corpus = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    asked = ["--dry-run", "--only", "03", "--profile", "llama3-8b", "-p", f"model={model}", "-p", "device=cpu"]
    run = CliRunner().invoke(study.app, [*asked, "-p", f"corpus={corpus}"])
    assert run.exit_code == 0, run.output
    for shown in ("train_seqs = 1248", f"model {model}: weights of ", f"corpus {corpus} (test)"):
        assert shown in run.output
    assert not (tmp_path / "cache").exists()  # nothing was tokenised
    run = CliRunner().invoke(study.app, [*asked, "-p", f"corpus=slimpajama@{tmp_path}/nowhere"])
    assert run.exit_code == 1 and "cannot be reached: corpus" in run.output and "there is no folder" in run.output
