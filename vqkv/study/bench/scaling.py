"""Times of calibrations by several processes and by one: ``python -m vqkv.study.bench scaling``.

One process and several take turns, each with one thread, on the bundled llama-mini; the clock runs from when all have
the model and the text until all have the compressor. Seconds of wall time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

import vqkv
from vqkv import presets
from vqkv.runtime.processes import current, launched
from vqkv.study.bench.record import check_writable, device_name, versions, write

SIZES = {"num_quantizers": 8, "codebook_size": 256, "num_seqs": 128, "seq_len": 512, "batch_size": 16}
PACKAGES = ("torch", "transformers", "accelerate", "vqkv")


def scaling(processes: int, repetitions: int, sizes: dict) -> list[dict]:
    """A row for one process and one for several: median, least and most seconds, ``speedup`` over one process, and the
    compressors' fingerprint. ``sizes``: num_quantizers, codebook_size, num_seqs, seq_len, batch_size."""
    found: dict[int, list[dict]] = {1: [], processes: []}
    for _ in tqdm(range(repetitions), desc="calibrations", disable=None):
        for count, runs in found.items():
            runs.append(_launch(count, sizes))
    about = {"device": device_name("cpu"), "threads": 1, **sizes, "versions": versions(*PACKAGES)}
    rows = [_row(count, runs) | about for count, runs in found.items()]
    return [row | {"speedup": rows[0]["seconds"] / row["seconds"]} for row in rows]


def _row(count: int, runs: list[dict]) -> dict:
    seconds = [run["seconds"] for run in runs]
    about = {"processes": count, "repetitions": len(runs), "fingerprint": runs[0]["fingerprint"]}
    return about | {"seconds": median(seconds), "least": min(seconds), "most": max(seconds)}


def _launch(count: int, sizes: dict) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    found = subprocess.run(
        [*command, "-m", "vqkv.study.bench.scaling", json.dumps(sizes)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(found.stdout)


def calibrated(num_quantizers: int, codebook_size: int, num_seqs: int, seq_len: int, batch_size: int) -> dict:
    """Seconds of one calibration, and the compressor's fingerprint: the part of each process."""
    torch.set_num_threads(1)
    model, tokenizer = vqkv.load_model("vqkv/llama-mini")
    tokens = vqkv.load_corpus("python-stdlib", tokenizer, "train", seq_len, num_seqs)
    current().wait()
    began = time.perf_counter()
    compressor = vqkv.calibrate(model, tokens, presets.vqllm(num_quantizers, codebook_size), batch_size, progress=False)
    current().wait()
    return {"seconds": time.perf_counter() - began, "fingerprint": compressor.fingerprint}


def main(arguments: list[str]) -> None:
    """Measure and print, as ``options`` say."""
    parser = argparse.ArgumentParser(prog="python -m vqkv.study.bench scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = parser.parse_args(arguments)
    if options.out:
        check_writable(options.out)
    rows = scaling(options.processes, options.repetitions, {name: getattr(options, name) for name in SIZES})
    for row in rows:
        print(f"{row['processes']} processes: {row['seconds']:.1f} s ({row['least']:.1f} to {row['most']:.1f}), "
              f"{row['speedup']:.2f} times one, compressor {row['fingerprint'][:16]}")  # fmt: skip
    if options.out:
        write(rows, options.out)


if __name__ == "__main__":  # started by torchrun
    with launched() as together:
        measured = calibrated(**json.loads(sys.argv[1]))
        if together.first:
            print(json.dumps(measured))
