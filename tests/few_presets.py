"""Small presets of every kind, and text that they can be calibrated on."""

import torch

from vqkv import presets

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
