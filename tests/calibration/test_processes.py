"""Two processes against one: the same codebooks, predictors and metrics, to rounding."""

import os
import subprocess
import sys
from pathlib import Path

import finetune_job
import forked
import pytest
import shared_job
import torch
from safetensors.torch import load_file

from vqkv import Compressor, DataError, calibrate, load_model, presets
from vqkv.runtime.processes import ALONE, Processes, current, launched

# Without cards it is the flag for several of them that makes accelerate start several processes.
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip


def run(command, **environment):
    found = subprocess.run(
        list(map(str, command)), cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.fixture(scope="module")
def one(llama_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    shared_job.run(llama_folder, out)
    return out


@pytest.fixture(scope="module")
def two(llama_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    forked.share(2, shared_job.run, llama_folder, out)
    return out


@pytest.mark.parametrize("name", shared_job.PRESETS)
def test_two_processes_learn_and_measure_what_one_does(one, two, name):
    (learned, row), (also_learned, also_row) = shared_job.results(one, name), shared_job.results(two, name)
    assert learned.keys() == also_learned.keys() and row.keys() == also_row.keys()
    if name == "mlp":  # AdamW makes a step of full size out of a rounding error: the same training, other weights
        assert also_row["kl_mean"] == pytest.approx(row["kl_mean"], rel=0.02)
        return
    for key, tensor in learned.items():
        torch.testing.assert_close(also_learned[key].float(), tensor.float(), rtol=1e-3, atol=1e-6, msg=key)
    for key, number in row.items():
        assert number == also_row[key] or also_row[key] == pytest.approx(number, rel=1e-4, abs=1e-7), key


def test_accelerate_launches_the_commands(llama_folder, tmp_path):
    made, texts = tmp_path / "compressor", tmp_path / "text.txt"
    texts.write_text("\n".join(f"line {i} of {i * i} words to read" for i in range(9000)))
    command = ["calibrate", llama_folder, made, "--corpus", texts, "--num-seqs", "8", "--seq-len", "64"]
    settings = ["-p", "num_quantizers=2", "-p", "codebook_size=16", "-p", "group_size=8"]
    printed = run([*ACCELERATE, "-m", "vqkv.cli", *command, *settings])
    assert printed.count("Compressor(") == 1  # the first process alone prints, and saves
    assert Compressor.from_pretrained(made).name == "vqllm"


def test_a_process_of_its_own_is_alone():
    with launched() as processes:
        assert processes is ALONE is current()


def test_shares_are_the_batch():
    batch = torch.arange(11)
    assert torch.equal(torch.cat([Processes(rank, 3).share(batch) for rank in range(3)]), batch)


def test_a_batch_smaller_than_the_processes_is_refused_before_anything_runs(llama_folder, monkeypatch):
    llama, _ = load_model(llama_folder)
    monkeypatch.setattr("vqkv.runtime.processes._launched", lambda: Processes(0, 4))
    with launched(), pytest.raises(DataError, match="batch of 2 sequences.*4 processes"):
        calibrate(llama, shared_job.text(10, 0), presets.quanto(), progress=False)


def test_a_fine_tuning_under_torchrun_ends_with_the_weights_of_one_process(llama_folder, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run([*torchrun, "finetune_job.py", llama_folder, tmp_path / "two"])
    finetune_job.run(llama_folder, tmp_path / "one")
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name].float(), tensor.float(), rtol=1e-3, atol=1e-6, msg=name)
