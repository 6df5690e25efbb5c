"""The commands, as a shell calls them."""

import json

import pytest
from typer.testing import CliRunner

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
        (["calibrate", "vqkv/llama-mini", "x", "-p", "codebook_size"], "write name=value"),
        (["inspect", "nowhere"], "no config.json"),
    ],
)
def test_bad_input_ends_with_its_message(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run(*arguments, code=2)
    assert message in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())
