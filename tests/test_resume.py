"""Jobs that are killed go on from their last finished step, and end with the same bits."""

import copy
import dataclasses
import random
import sys
import time
from pathlib import Path

import forked
import pytest
import shared_job
import small_models
import torch

from vqkv import DataError, FormatError, calibrate, evaluate, load_model, presets
from vqkv.checkpoint import Checkpoint

RESUMED = ("vqllm", "kvquant", "entropy", "reduced", "kvsharer", "split")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(small_models.make("llama", tmp_path_factory.mktemp("model"))))[0]


def interrupted(monkeypatch, after: int):
    """Let a job's checkpoint take ``after`` steps, then stop the job as it writes the next."""
    save, count = Checkpoint.save, iter(range(1_000_000))

    def failing(self, *args, **notes):
        if next(count) >= after:
            raise KeyboardInterrupt
        save(self, *args, **notes)

    monkeypatch.setattr(Checkpoint, "save", failing)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_calibration_goes_on_to_the_same_bits(model, tmp_path, monkeypatch, name, after):
    tokens, preset = shared_job.text(24, 0), shared_job.PRESETS[name]
    whole = calibrate(model, tokens, preset, batch_size=4, progress=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, after)
        calibrate(model, tokens, preset, batch_size=4, progress=False, checkpoint=tmp_path / "steps")
    resumed = calibrate(model, tokens, preset, batch_size=4, progress=False, checkpoint=tmp_path / "steps")
    assert resumed.fingerprint == whole.fingerprint and resumed.notes == whole.notes
    assert not list((tmp_path / "steps").rglob("process-*"))  # keys and values are gone


def test_finished_work_is_not_done_again(model, tmp_path, monkeypatch):
    tokens, preset = shared_job.text(8, 0), shared_job.PRESETS["vqllm"]
    first = calibrate(model, tokens, preset, batch_size=4, progress=False, checkpoint=tmp_path / "steps")
    monkeypatch.setattr(sys.modules["vqkv.calibrate"], "capture", lambda *args, **kwargs: pytest.fail("captured again"))
    again = calibrate(model, tokens, preset, batch_size=4, progress=False, checkpoint=tmp_path / "steps")
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("after", [1, 2])
def test_an_evaluation_goes_on_to_the_same_row(model, tmp_path, monkeypatch, after):
    compressor = calibrate(model, shared_job.text(8, 0), shared_job.PRESETS["vqllm"], progress=False)
    arguments = (model, compressor, shared_job.text(6, 1), "chunked")
    whole = evaluate(*arguments, batch_size=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, after)
        evaluate(*arguments, batch_size=2, checkpoint=tmp_path / "steps")
    assert len(list((tmp_path / "steps").glob("batch-*"))) == after
    assert evaluate(*arguments, batch_size=2, checkpoint=tmp_path / "steps") == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": shared_job.text(8, 1)}, "tokens"),
        ({"preset": presets.vqllm(3, 16, 8)}, "preset"),
        ({"preset": presets.vqllm(2, 16, 8, seed=1)}, "preset"),
        ({"preset": dataclasses.replace(shared_job.PRESETS["vqllm"], sink_tokens=1)}, "preset"),
        ({"batch_size": 2}, "batch_size"),
    ],
)
def test_another_jobs_checkpoint_is_refused(model, tmp_path, change, named):
    job = {"tokens": shared_job.text(8, 0), "preset": shared_job.PRESETS["vqllm"], "batch_size": 4}
    calibrate(model, **job, progress=False, checkpoint=tmp_path)
    with pytest.raises(FormatError, match=rf"another job: its {named}.* is .*delete"):
        calibrate(model, **job | change, progress=False, checkpoint=tmp_path)


def test_plans_and_weights_tell_jobs_apart(model, tmp_path):
    job = {"tokens": shared_job.text(8, 0), "batch_size": 4, "progress": False, "checkpoint": tmp_path}
    calibrate(model, preset=presets.aqua("higgs", recent_window=0), **job)
    for other in ({"key_from": "none"}, {"predictor": "gptq"}, {"first_layer_bits": 2}, {"strength": 0.1}):
        with pytest.raises(FormatError, match="another job: its preset"):
            calibrate(model, preset=presets.aqua("higgs", recent_window=0, **other), **job)
    changed = copy.deepcopy(model)
    with torch.no_grad():  # leaves the first layer's keys and values as they are
        changed.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(FormatError, match="another job: its model"):
        calibrate(changed, preset=presets.aqua("higgs", recent_window=0), **job)


def test_an_altered_step_is_refused(model, tmp_path, monkeypatch):
    tokens, preset = shared_job.text(12, 0), shared_job.PRESETS["vqllm"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, 2)
        calibrate(model, tokens, preset, batch_size=4, progress=False, checkpoint=tmp_path)
    path = tmp_path / "codecs.safetensors"
    data = bytearray(path.read_bytes())
    for end, altered in ((len(data), -3), (len(data) // 2, None), (4, None)):
        damaged = data[:end] if altered is None else data[:altered] + bytes([data[altered] ^ 1]) + data[altered + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"codecs.safetensors.*delete"):
            calibrate(model, tokens, preset, batch_size=4, progress=False, checkpoint=tmp_path)


def test_a_damaged_spill_is_refused(model, tmp_path, monkeypatch):
    arguments = {"tokens": shared_job.text(8, 0), "batch_size": 4, "progress": False, "checkpoint": tmp_path}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, 1)
        calibrate(model, preset=shared_job.PRESETS["reduced"], **arguments)
    path = tmp_path / "process-0/captured/key-2-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    for damaged in (data, data[:-9]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"key-2-1.safetensors .*delete"):
            calibrate(model, preset=shared_job.PRESETS["reduced"], **arguments)


def test_one_job_at_a_time_in_a_folder(model, tmp_path):
    job = {"preset": shared_job.PRESETS["vqllm"], "batch_size": 4, "progress": False, "checkpoint": tmp_path}
    with Checkpoint(tmp_path, {}).alone(), pytest.raises(DataError, match="in use by another process"):
        calibrate(model, shared_job.text(8, 0), **job)
    calibrate(model, shared_job.text(8, 0), **job)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="is a file"):
        Checkpoint(tmp_path / "file", {})


def test_killed_at_twenty_random_moments(model, tmp_path):
    """SIGKILL, wherever it strikes: in a forward pass, while a step is written, between two jobs."""
    folder = small_models.make("llama", tmp_path / "model")
    processes = forked.context()

    def start(out: Path):
        out.mkdir(exist_ok=True)
        job = processes.Process(target=shared_job.resumable, args=(str(folder), out))
        job.start()
        return job

    start(tmp_path / "warm").join()
    began = time.monotonic()
    start(tmp_path / "whole").join()
    duration, moments, kills, rounds = time.monotonic() - began, random.Random(0), 0, 0
    expected = (tmp_path / "whole" / "results.json").read_text()
    while kills < 20:
        rounds, ended = rounds + 1, False
        while not ended:
            job = start(tmp_path / f"round-{rounds}")
            job.join(moments.uniform(0, duration) if kills < 20 else None)
            ended = not job.is_alive()
            kills += not ended
            duration *= 0.7 if ended else 1  # the first run was slow: strike earlier
            job.kill()
            job.join()
        assert (tmp_path / f"round-{rounds}" / "results.json").read_text() == expected
