"""Snapshot streams of the VQ framework's tiers, written here: 512 steps of one token, keyframes every 64."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from vqkv import presets
from vqkv.cache.snapshots import SnapshotReader, SnapshotWriter

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


@contextmanager
def written(live: list[list[torch.Tensor]], keyframes, deltas, interval: int) -> Iterator[SnapshotReader]:
    """A file of a cache (keys and values, each layer's) that grows by one token a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        with SnapshotWriter(path, keyframes, deltas, interval) as writer:
            for step in range(live[0][0].shape[2]):
                writer.append(*([x[:, :, step : step + 1] for x in role] for role in live))
        yield SnapshotReader(path)
