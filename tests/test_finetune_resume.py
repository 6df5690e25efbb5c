"""A fine-tuning that is interrupted goes on with the same bits; shared by processes it ends with the same weights."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import finetune_job
import pytest
import small_models
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from vqkv import Compressor, FormatError, load_model, presets
from vqkv.cli import app
from vqkv.finetune import _Run, finetune

TOKENS, SETTINGS = finetune_job.TOKENS[:30], finetune_job.SETTINGS | {"progress": False}
PRESET, REVIVED = presets.vqllm(2, 16, 8), finetune_job.PRESET


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_models.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder))[0]


def job(*arguments, launcher=(sys.executable,)):
    command = [*launcher, "finetune_job.py", *map(str, arguments)]
    found = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.mark.parametrize(
    "preset", [REVIVED, PRESET, presets.higgs(2), None], ids=["revived", "vqllm", "higgs", "control"]
)
def test_interrupted_after_any_step_it_goes_on_and_repeats_none(model, tmp_path, monkeypatch, preset):
    whole = copy.deepcopy(model)
    expected = finetune(whole, TOKENS, preset, **SETTINGS)
    step, done, every = _Run._step, [], 1 if preset is PRESET else 2

    def interrupted(run, batch):
        if len(done) in (1, 4, 5):  # before the second step, the fourth and, every 2 steps saved, one of them again
            done.append(None)
            raise KeyboardInterrupt
        done.append(len(run.losses))
        return step(run, batch)

    monkeypatch.setattr(_Run, "_step", interrupted)
    settings = SETTINGS | {"checkpoint": tmp_path / "checkpoint", "checkpoint_every": every}
    for _ in range(3):
        twin = copy.deepcopy(model)
        with pytest.raises(KeyboardInterrupt):
            finetune(twin, TOKENS, preset, **settings)
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    result = finetune(twin, TOKENS, preset, **settings)
    assert [d for d in done if d is not None] == ([0, 1, 2, 3] if every == 1 else [0, 0, 1, 2, 3])
    again = copy.deepcopy(model)
    for tuned, made in ((twin, result), (again, finetune(again, TOKENS, preset, **settings))):
        assert all(torch.equal(a, b) for a, b in zip(tuned.parameters(), whole.parameters(), strict=True))
        assert made.losses == expected.losses
        assert preset is None or made.compressor.fingerprint == expected.compressor.fingerprint


def test_killed_at_random_moments_it_ends_with_the_same_bits(folder, tmp_path):
    printed = job(folder, tmp_path)
    whole, rounds = load_file(tmp_path / "whole"), list(tmp_path.glob("killed-*"))
    assert printed == f"killed {finetune_job.KILLS} times in {len(rounds)} rounds\n" and len(whole["losses"]) == 5
    for killed in map(load_file, rounds):
        assert whole.keys() == killed.keys()
        assert all(torch.equal(killed[name], tensor) for name, tensor in whole.items())


def test_two_processes_end_with_the_weights_of_one(folder, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    job(folder, tmp_path / "two", "once", launcher=torchrun)
    finetune_job.run(str(folder), tmp_path / "one")
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name].float(), tensor.float(), rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("tokens", {"tokens": TOKENS.flip(0)}),
        ("tokens", {"tokens": TOKENS[:, :-1]}),
        ("preset", {"preset": presets.vqllm(2, 16, 8, seed=1)}),
        ("preset", {"preset": None}),
        ("settings", {"lr": 2e-3}),
        ("settings", {"batch_size": 5}),
        ("settings", {"micro_batch": None}),
        ("model", {}),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_name(model, tmp_path, name, changed):
    arguments = {"tokens": TOKENS[:12], "preset": PRESET, **SETTINGS, "checkpoint": tmp_path / "checkpoint"}
    finetune(copy.deepcopy(model), **arguments)
    other = copy.deepcopy(model)
    if name == "model":  # which no sample of key and value weights would show
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight[3, 3] += 1
    with pytest.raises(FormatError, match=f"another job: its {name}.* is .*Name another folder"):
        finetune(other, **arguments | changed)


def test_a_damaged_checkpoint_is_refused(model, tmp_path):
    arguments = {"tokens": TOKENS[:12], "preset": PRESET, **SETTINGS, "checkpoint": tmp_path}
    finetune(copy.deepcopy(model), **arguments)
    path = tmp_path / "finetune.safetensors"
    data = bytearray(path.read_bytes())
    for bad in (data[:-100], data[:-50] + b"\1" + data[-49:], b""):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match="delete .* to begin anew"):
            finetune(copy.deepcopy(model), **arguments)


def test_the_command_writes_a_model_and_a_compressor_that_the_others_read(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of {i * i} words to read" for i in range(9000)))
    sizes = ["--corpus", text, "--seq-len", "64", "--num-seqs", "6"]
    small = ["-p", "codebook_size=16", "-p", "num_quantizers=2", "-p", "group_size=8"]

    def run(*arguments, code=0):
        found = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert found.exit_code == code, found.output
        return found.output

    out = tmp_path / "tuned"
    settings = ["--lr", "0.01", "--batch-size", "2", "--micro-batch", "1", "--gradient-checkpointing"]
    assert "2 steps" in run("finetune", folder, out, *sizes, *small, *settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tuned"]  # no checkpoint is left
    row = json.loads(run("evaluate", out / "model", out / "compressor", *sizes[:4], "--num-seqs", "2"))
    assert row["num_seqs"] == 2 and row["ppl"] > 1
    assert Compressor.from_pretrained(out / "compressor").notes["finetune"] == {"lr": 0.01, "steps": 2}
    assert "fitted to" in run("evaluate", folder, out / "compressor", *sizes[:4], "--num-seqs", "2", code=2)
    control = tmp_path / "control"
    run("finetune", folder, control, "--preset", "none", *sizes, *settings)
    assert (control / "model").is_dir() and not (control / "compressor").exists()
    assert "cannot fine-tune" in run("finetune", folder, out, "--preset", "kivi", *sizes, *settings, code=2)
