"""What each process of ``vqkv.bench.scaling`` does; torchrun starts it."""

import json
import sys
import time

import torch

import vqkv
from vqkv import presets
from vqkv.processes import current, launched


def calibrated(num_quantizers: int, codebook_size: int, num_seqs: int, seq_len: int, batch_size: int) -> dict:
    """Seconds of one calibration, and the compressor's fingerprint."""
    torch.set_num_threads(1)
    model, tokenizer = vqkv.load_model("vqkv/llama-mini")
    tokens = vqkv.load_corpus("python-stdlib", tokenizer, "train", seq_len, num_seqs)
    current().wait()
    began = time.perf_counter()
    preset = presets.vqllm(num_quantizers, codebook_size)
    compressor = vqkv.calibrate(model, tokens, preset, batch_size, progress=False)
    current().wait()
    return {"seconds": time.perf_counter() - began, "fingerprint": compressor.fingerprint}


if __name__ == "__main__":
    with launched() as together:
        measured = calibrated(**json.loads(sys.argv[1]))
        if together.first:
            print(json.dumps(measured))
