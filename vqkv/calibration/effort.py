"""How long a calibration takes, before it begins."""

import torch
from torch.utils.benchmark import Timer

from vqkv.models.layers import max_positions

PROBE = 256  # tokens of the pass that is timed
# Passes of the model over its text that take as long as calibrating: processor time, a random Llama of 8 layers and
# 1,024 KV channels on 32,768 tokens. A name counts for all that begin with it.
PASSES = {"best": 20, "kvtc": 14, "vqllm": 12, "aqua": 5.9, "live": 4.2, "nova": 3.0, "crossed": 2.7, "aatc": 2.6}
PASSES |= {"rvq2": 2.0, "vqq_product": 1.8, "kvquant": 1.8, "vq": 1.6, "cachegen": 1.5, "block_gtq": 1.4}
PASSES |= {"kvsharer": 1.4, "lossless": 1.3, "higgs": 1.2, "oscar": 0.3}
PASSES |= dict.fromkeys(("fp", "hqq", "quanto", "kivi", "turboquant", "kvarn", "nvfp4", "nsnquant"), 0.2)


def passes(name: str) -> float:
    """Estimate how many passes of the model over its text calibrating a preset takes, by its name."""
    return next((count for start, count in PASSES.items() if name.startswith(start)), 6.0)


def seconds_per_token(model) -> float:
    """Time a forward pass over ``PROBE`` tokens."""
    tokens = torch.ones(1, int(min(max_positions(model), PROBE)), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        timer = Timer("model(tokens)", globals={"model": model, "tokens": tokens}, num_threads=torch.get_num_threads())
        return timer.timeit(2).mean / tokens.shape[1]
