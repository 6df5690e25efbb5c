"""The commands, as a shell calls them."""

import json
import re
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from vqkv import FormatError
from vqkv.cli import app
from vqkv.study.chat import chat

SMALL = ["-p", "codebook_size=16", "-p", "num_quantizers=2", "--num-seqs", "2", "--seq-len", "128"]


def run(*arguments, code=0, **options):
    result = CliRunner().invoke(app, [str(a) for a in arguments], **options)
    assert result.exit_code == code, result.output
    return result.output


def test_calibrate_says_how_long_before_it_begins_and_evaluate_prints_one_json_row(tmp_path):
    line, *_ = run("calibrate", "vqkv/llama-mini", tmp_path / "out", *SMALL).splitlines()
    assert re.fullmatch(r"calibrating vqllm on 256 tokens of python: about \S+ minutes", line)
    small = ["--num-seqs", 1, "--seq-len", 64, "--protocol", "in_place"]
    row = json.loads(run("evaluate", "vqkv/llama-mini", tmp_path / "out", *small))
    assert row["bits_per_value"] == 2 * 4 / 32 + 16 / 64 and row["kl_mean"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "vqkv/llama-mini", "x", "--preset", "vqlm"], "Did you mean 'vqllm'"),
        (["calibrate", "vqkv/llama-mini", "x", "-p", "codebook_size"], "name=value"),
        (["calibrate", "vqkv/llama-mini", __file__], "is a file"),
        (["evaluate", "vqkv/llama-mini", "nowhere"], "nowhere is no folder, and not on the hub"),
    ],
)
def test_bad_input_ends_with_its_message(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run(*arguments, code=2)
    assert message in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())


def test_chat_answers_until_an_empty_line_and_reads_in_place(monkeypatch):
    monkeypatch.setattr("vqkv.study.chat.chat", talked := Mock(side_effect=chat))
    out = run("chat", "vqkv/gpt2-mini", "--preset", "none", "--max-new-tokens", "4", input="def main\n\n")
    assert "uncompressed in 16 bits" in out and talked.call_args.args[0].config._attn_implementation == "vqkv_packed"


def test_debug_shows_where_an_error_was_raised(tmp_path):
    result = CliRunner().invoke(app, ["--debug", "evaluate", "vqkv/llama-mini", str(tmp_path / "nothing")])
    assert isinstance(result.exception, FormatError)
