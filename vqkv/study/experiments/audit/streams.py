"""Snapshot streams of the VQ framework's tiers, written here: 512 steps of one token, keyframes every 64."""

from functools import cache

import torch

from vqkv import presets
from vqkv.study.experiments.ladder import written

STEPS, INTERVAL = 512, 64
LAYERS, HEADS, HEAD_DIM = 2, 4, 64  # on which ratios hardly depend
TIERS = {  # what keyframes and deltas are stored as; a preset where it takes the same bytes for all data
    "4-bit deltas": ("fp32", "int4"),
    "lossless": ("fp32", "exact"),
    "VQ of 2 values": (presets.vq(2), "int4"),
    "VQ of 8 values": (presets.vq(8), "int4"),
    "2 residual stages": (presets.rvq2(), "int4"),
    "all blocks in fp16": (presets.vqq(0.0), "int4"),
}


@cache
def stream(tier: str) -> dict:
    """``SnapshotReader.report()`` of a file of random values."""
    x = torch.randn(2, LAYERS, 1, HEADS, STEPS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    keyframes, deltas = TIERS[tier]
    if not isinstance(keyframes, str):
        codec = keyframes.key_codec(HEAD_DIM).fit(x[0, 0])
        keyframes = [(codec, codec)] * LAYERS
    with written(list(map(list, x)), keyframes, deltas, INTERVAL) as found:
        return found.report()
