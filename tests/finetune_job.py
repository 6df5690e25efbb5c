"""A fine-tuning, as one process or shared under torchrun: ``python finetune_job.py MODEL OUT``."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import vqkv
from vqkv import presets
from vqkv.calibration.finetune import finetune
from vqkv.calibration.trained_weights import attention_weights
from vqkv.runtime.processes import launched

TOKENS = torch.randint(0, 400, (36, 30), generator=torch.Generator().manual_seed(0))
PRESET = presets.vqllm(2, 16, 8, revive=True, decay=0.5)
SETTINGS = {"lr": 1e-3, "batch_size": 6, "micro_batch": 4}


def run(model_folder: str, out: Path) -> None:
    """Fine-tune, and write all that came out."""
    torch.set_num_threads(1)
    with launched() as processes:
        model, _ = vqkv.load_model(model_folder)
        made = finetune(model, TOKENS, PRESET, **SETTINGS)
        if processes.first:
            tensors = {f"weights.{i}": weight.detach() for i, weight in enumerate(attention_weights(model))}
            tensors["losses"] = torch.tensor(made.losses, dtype=torch.float64)
            save_file(tensors | {k: v.clone() for k, v in made.compressor._learned().items()}, out)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
