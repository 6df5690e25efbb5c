"""Peak memory of a calibration does not depend on how much text it reads."""

import subprocess
import sys
from pathlib import Path

import shared_job
import small_models

MEASURE = """
import resource, sys, torch
import shared_job, vqkv
torch.set_num_threads(1)
model, _ = vqkv.load_model(sys.argv[1])
peaks = []
for num_seqs in (48, 192):
    tokens = shared_job.text(num_seqs, 0, seq_len=256)
    vqkv.calibrate(model, tokens, shared_job.PRESETS[sys.argv[2]], batch_size=4, progress=False)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(*peaks)
"""


def test_four_times_the_text_in_the_same_memory(tmp_path):
    """A tiny model's keys and values of 144 x 256 more tokens take 54 MiB in fp32: kept in memory, they would show.
    (Predictors, which pass over them more than once: ``test_spill``.)"""
    folder = small_models.make("llama", tmp_path / "model")
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), "vqllm"], cwd=Path(shared_job.__file__).parent,
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    short, long = map(float, found.stdout.split())
    assert long - short < 10  # MiB: allocators keep some of what batches leave
