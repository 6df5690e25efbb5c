"""Peak memory of a calibration does not depend on how much text it reads."""

import resource

import forked
import shared_job
import small_models
import torch

from vqkv import calibrate, load_model


def peaks(folder: str, name: str) -> list[float]:
    """MiB that this process has held at most, after a calibration on 48 sequences and after one on 192."""
    torch.set_num_threads(1)
    model, found = load_model(folder)[0], []
    for num_seqs in (48, 192):
        tokens = shared_job.text(num_seqs, 0, seq_len=256)
        calibrate(model, tokens, shared_job.PRESETS[name], batch_size=4, progress=False)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return found


def test_four_times_the_text_in_the_same_memory(tmp_path):
    """A tiny model's keys and values of 144 x 256 more tokens take 54 MiB in fp32: kept in memory, they would show.
    (Predictors, which pass over them more than once: ``test_spill``.)"""
    short, long = forked.call(peaks, str(small_models.make("llama", tmp_path / "model")), "vqllm")
    assert long - short < 10  # MiB: allocators keep some of what batches leave
