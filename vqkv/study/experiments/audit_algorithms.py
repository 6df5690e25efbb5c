"""Algorithms, streams and formulas as the sources print them, done again by this library."""

from typing import Any

import pandas as pd
import torch

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.codecs.predictive import ROLES, side_by_side
from vqkv.kernels import rvq_encode
from vqkv.models.capture import capture
from vqkv.models.load import load_model
from vqkv.study.snapshots import Stream

STEPS, INTERVAL = 512, 64  # of the VQ framework's streams: a token each, and from keyframe to keyframe
LAYERS, HEADS, HEAD_DIM = 2, 4, 64  # on which ratios hardly depend


def rvq_algorithm_1() -> float:
    """Compare codes of random vectors with those of residual VQ's Algorithm 1, the loop in float64."""
    generator = torch.Generator().manual_seed(0)
    z, codebooks = torch.randn(1, 1, 500, 32, generator=generator), torch.randn(8, 64, 32, generator=generator)
    codes, residual = rvq_encode(z, codebooks).flatten(0, 2), z.flatten(0, 2).double()
    same = torch.ones(len(residual), dtype=torch.bool)
    for stage, codebook in enumerate(codebooks.double()):
        nearest = torch.cdist(residual, codebook).argmin(1)
        same &= codes[:, stage] == nearest
        residual = residual - codebook[nearest]
    return same.double().mean().item()


def aqua_algorithms() -> list[float]:
    """Compare a bundled model's keys and values with AQUA-KV's Algorithms 2 and 3, layer by layer."""
    model, _ = load_model("vqkv/llama-mini")
    tokens = torch.randint(0, 4096, (4, 64), generator=torch.Generator().manual_seed(0))
    preset = presets.aqua(presets.higgs(2), sink_tokens=0, recent_window=0)
    compressor = calibrate(model, tokens, preset, progress=False)
    exact, reconstructions, shares = dict(zip(ROLES, capture(model, tokens))), compressor.new_pass(), []
    before: dict[tuple[str, int], torch.Tensor] = {}
    for layer, codecs in enumerate(compressor.codecs):
        pair = [exact[role][layer].float() for role in ROLES]
        read = compressor.reconstruct(layer, pair[0], pair[1], reconstructions)
        for role, x, codec, x_hat in zip(ROLES, pair, codecs, read, strict=True):
            sources = [("key", layer - 1)] if role == "key" else [("value", layer - 1), ("key", layer)]
            predicted = 0.0
            if layer:
                inputs = torch.cat([side_by_side(before[source]) for source in sources], dim=-1)
                predictor = compressor.predictions[role, layer].predictor
                predicted = predictor(inputs).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
            before[role, layer] = codec.decode(codec.encode(x - predicted)) + predicted
            shares.append(((before[role, layer] - x_hat).abs() < 1e-5).double().mean().item())
    return shares


def vqq_algorithm_1(threshold: float) -> float:
    """Compare blocks with the VQ framework's Algorithm 1: in fp16 if an error is above the threshold."""
    x = torch.randn(1, 4, 256, 64, generator=torch.Generator().manual_seed(0))
    plain, mixed = (presets.vqq(limit).key_codec(64).fit(x).quantize_dequantize(x) for limit in (1e9, threshold))
    x, plain, mixed = (y.unflatten(2, (-1, 64)).flatten(3).unflatten(3, (-1, 8)) for y in (x, plain, mixed))
    largest = x.abs().amax((3, 4), keepdim=True)
    exact = ((x - plain) / largest).abs().amax(4) > threshold
    stored = torch.where(exact[..., None], x, plain)
    return ((mixed - stored).abs().amax(4) < 2**-10 * largest[..., 0]).double().mean().item()


def codes_within_4_bits(sign: float) -> float:
    """Return the share of the blog's codes within 4 bits: X_q = round(X / S) + sign Z."""
    x, scale, zero = _groups()
    codes = (x / scale).round() + sign * zero
    return ((codes >= 0) & (codes < 16)).double().mean().item()


def restored_within_half_a_step() -> float:
    """Return the share of values that the blog's formula brings back within S / 2, in whole numbers."""
    x, scale, zero = _groups()
    restored = ((x / scale).round() - zero + zero) * scale
    return ((restored - x).abs() <= scale / 2 * (1 + 1e-9)).double().mean().item()


def _groups() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random values by group, S, and Z = round(-min / S)."""
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale = (high - low) / 15
    return x, scale, (-low / scale).round()


def stream(keyframes: str | presets.Preset, deltas: str) -> pd.DataFrame:
    """Return ``Stream.report()`` of random values as a row; a preset's bytes are the same for all data."""
    x = torch.randn(2, LAYERS, 1, HEADS, STEPS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    codecs: Any = keyframes
    if isinstance(keyframes, presets.Preset):
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
