"""A calibration and an evaluation of many presets, as one process or as each of several that share the work."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import vqkv
from vqkv import presets
from vqkv.runtime.processes import launched

RESIDUAL = presets.vqllm(2, 16, 8)
PRESETS = {
    "vqllm": RESIDUAL,
    "revived": presets.vqllm(2, 16, 8, revive=True, decay=0.5),
    "beam": presets.vqllm(2, 16, 8, beam=2),
    "entropy": presets.entropy_coded(RESIDUAL, block=16),
    "kvquant": presets.kvquant(bits=2, block=16),
    "vqq": presets.vqq(codebook_size=16, keyframe=16),
    "product": presets.vqq_product(codebook_size=16, keyframe=16),
    "linear": presets.aqua("higgs", recent_window=0),
    "reduced": presets.aqua(RESIDUAL, "reduced_rank", rank=8, recent_window=0),
    "gptq": presets.aqua("higgs", "gptq", recent_window=0),
    "mlp": presets.aqua("higgs", "mlp", epochs=1, recent_window=0),
    "kvsharer": presets.kvsharer(threshold=-1),
    # no mean: that of what a regression leaves is 0 but for rounding
    "split": presets.crossed("uniform", 1.5, mean=False, rotation="none", predicted=True, mixed=True, block=4),
    "weighted": presets.crossed("uniform", 2.0, rotation="fisher_pca", block=4),
}


def text(num_seqs: int, seed: int, seq_len: int = 64) -> torch.Tensor:
    """Tokens drawn from a few hundred of the vocabulary, so that keys repeat as those of a text do."""
    return torch.randint(0, 400, (num_seqs, seq_len), generator=torch.Generator().manual_seed(seed))


def run(model_folder: str, out: Path, names=tuple(PRESETS)) -> None:
    """Calibrate and evaluate every preset; the first process writes what came out."""
    torch.set_num_threads(1)
    with launched() as processes:
        model, _ = vqkv.load_model(model_folder)
        for name in names:
            compressor = vqkv.calibrate(model, text(24, 0), PRESETS[name], batch_size=5 if name == "vqllm" else 4)
            row = vqkv.evaluate(model, compressor, text(5, 1), chunk_size=32, batch_size=2, per_sequence=True)
            if processes.first:
                save_file({k: v.clone() for k, v in compressor._learned().items()}, out / f"{name}.safetensors")
                (out / f"{name}.json").write_text(json.dumps(row))


def results(out: Path, name: str) -> tuple[dict, dict]:
    """Learned tensors and the evaluation's row."""
    return load_file(out / f"{name}.safetensors"), json.loads((out / f"{name}.json").read_text())
