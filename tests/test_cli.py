"""The commands, as a shell calls them."""

import json
import re

import pytest
import torch
import yaml
from typer.testing import CliRunner

import vqkv.cli
from vqkv import Compressor, FormatError, load_model
from vqkv.cli import app

SMALL = ["-p", "codebook_size=16", "-p", "num_quantizers=2", "--num-seqs", "2", "--seq-len", "128"]


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "compressor"
    assert "codebook" not in run("calibrate", "vqkv/llama-mini", folder, *SMALL)
    return folder


def test_inspect_names_model_and_codec(saved):
    out = run("inspect", saved)
    assert "vqkv/llama-mini" in out and "part: ResidualVQ" in out and "kind: strided" in out


def test_inspect_reports_a_saved_cache_with_no_model_or_compressor_at_hand(saved, tmp_path, monkeypatch):
    model = load_model("vqkv/llama-mini")[0]
    cache = Compressor.from_pretrained(saved).new_cache(model)
    with torch.inference_mode():
        model(torch.arange(40).view(2, 20), past_key_values=cache)
    cache.save(tmp_path / "cache")
    monkeypatch.setattr(vqkv, "load_model", None)
    about = yaml.safe_load(run("inspect", tmp_path / "cache").split("\n", 1)[1])
    report = cache.report()
    assert about["compressor"]["name"] == "vqllm" and about["model"]["name"] == "vqkv/llama-mini"
    assert about["kinds"] == report.kinds and about["bits_per_value"] == report.bits_per_value
    assert about["ratio"] == report.ratio and about["file_bytes"] == (tmp_path / "cache").stat().st_size


@pytest.mark.parametrize("data", [b"", b"text", b"vqkvsnap", bytes(100), b"\x02" + bytes(7) + b"{}"])
def test_inspect_names_what_it_reads(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    for path in (tmp_path / "file", tmp_path, tmp_path / "none"):
        out = " ".join(run("inspect", path, code=2).split())
        assert all(kind in out for kind in ("compressor's folder", "saved cache"))


def test_evaluate_prints_one_json_row(saved):
    row = json.loads(
        run("evaluate", "vqkv/llama-mini", saved, "--num-seqs", 1, "--seq-len", 64, "--protocol", "in_place")
    )
    assert row["bits_per_value"] == 2 * 4 / 32 + 16 / 64 and row["kl_mean"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "vqkv/llama-mni", "x"], "Did you mean 'vqkv/llama-mini'"),
        (["calibrate", "vqkv/llama-mini", "x", "--preset", "vqlm"], "Did you mean 'vqllm'"),
        (["calibrate", "vqkv/llama-mini", "x", "-p", "codebooksize=2"], "codebook_size"),
        (["calibrate", "vqkv/llama-mini", "x", "-p", "codebook_size"], "name=value"),
        (["calibrate", "vqkv/llama-mini", __file__], "is a file"),
        (["inspect", "nowhere"], "nowhere is missing"),
        (["inspect", "."], "compressor.safetensors is missing"),
    ],
)
def test_bad_input_ends_with_its_message(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run(*arguments, code=2)
    assert message in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())


def test_calibrate_says_how_long_before_it_begins(tmp_path):
    arguments = ["calibrate", "vqkv/llama-mini", str(tmp_path / "out"), "--preset", "higgs", "--num-seqs", "4"]
    found = CliRunner().invoke(app, [*arguments, "--seq-len", "64"])
    assert found.exit_code == 0, found.stderr
    line = next(line for line in found.stderr.splitlines() if line.startswith("calibrating"))
    assert re.fullmatch(r"calibrating higgs on 256 tokens of python: about \S+ minutes", line)


def test_chat_answers_until_an_empty_line():
    arguments = ["chat", "vqkv/gpt2-mini", "--preset", "none", "--max-new-tokens", "4"]
    found = CliRunner().invoke(app, arguments, input="def main\n\n")
    assert found.exit_code == 0 and "uncompressed in 16 bits" in found.stdout


def test_debug_shows_where_an_error_was_raised(tmp_path):
    found = CliRunner().invoke(app, ["--debug", "inspect", str(tmp_path / "nothing")])
    assert isinstance(found.exception, FormatError)
