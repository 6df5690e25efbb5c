"""Sizes of the technical report "Beyond 84x: A Vector Quantization Quality Framework": its streams, its fallback."""

from typing import Any

import pandas as pd
import torch

from vqkv.presets import Preset
from vqkv.study.snapshots import Stream

STEPS, INTERVAL = 512, 64  # of streams that are written here: a token each, and from keyframe to keyframe
LAYERS, HEADS, HEAD_DIM = 2, 4, 64  # on which ratios hardly depend


def stream(keyframes: str | Preset, deltas: str) -> pd.DataFrame:
    """Return ``Stream.report()`` of random values as a row; a preset's bytes are the same for all data."""
    x = torch.randn(2, LAYERS, 1, HEADS, STEPS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    codecs: Any = keyframes
    if isinstance(keyframes, Preset):
        codec = keyframes.key_codec(HEAD_DIM).fit(x[0, 0])
        codecs = [(codec, codec)] * LAYERS
    return pd.DataFrame([Stream(list(map(list, x)), codecs, deltas, INTERVAL).report()])


def longer_ratio(files: pd.DataFrame, steps: int = 4096) -> pd.Series:
    """Return the ratio to all snapshots of a longer stream, whose keyframes and deltas take as many bytes a token."""
    keyframes, deltas, snapshots = (long / short for short, long in zip(states(STEPS), states(steps), strict=True))
    stored = files["keyframe_bytes"] * keyframes + files["delta_bytes"] * deltas
    return files["every_fp32_bytes"] * snapshots / stored


def states(steps: int) -> tuple[int, int, int]:
    """Return the number of tokens in all keyframes, in all deltas and in all snapshots of a stream."""
    keyframes = steps // INTERVAL
    return INTERVAL * keyframes * (keyframes + 1) // 2, steps - keyframes, steps * (steps + 1) // 2


def fallback_bits(share):
    """Return bits of a value with a share of the blocks of 8 in fp16, others of 8 bits, and a bit for which."""
    return 16 * share + (1 - share) * 8 / 8 + 1 / 8
