"""Notebook 05: the VQ quality framework's tiers as files, eviction with them, and its codes entropy-coded."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.evaluation.evaluate import evaluate, evaluate_restored
from vqkv.models.capture import capture
from vqkv.study.eviction import H2O, attention_scores, heavy_hitters, snapkv
from vqkv.study.experiments.common import FRAMEWORK, exact_compressor
from vqkv.study.shared import per_process
from vqkv.study.snapshots import Stream
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

RATIOS = ("ratio_every_fp32", "ratio_live_fp16")
# What keyframes and deltas are stored as.
EXACT: dict[str, tuple[Any, str]] = {"lossless": ("fp32", "exact"), "4-bit deltas": ("fp32", "int4")}
EVICTED, NOT_EVICTED = "4-bit deltas + H2O", "4-bit deltas"
TIERS = [*EXACT, *(label for label in FRAMEWORK if label != "VQ of 8, threshold 0.07"), EVICTED]
CODECS = ("fp16", "vqllm")
DAMAGE = ("kl_mean", "kl_low", "kl_high", "kl_std", "kl_worst", "kl_floor", "ppl_exact", "ppl", "top1")
EVICTION_COLUMNS = (*DAMAGE, "ratio")


def _with_evicted(rows: list[dict]) -> list[dict]:
    """Return the rows; the evicted tier's bytes are those of the complete one, less what its last keyframe loses."""
    complete = next((row for row in rows if row["tier"] == NOT_EVICTED), {})
    for row in (row for row in rows if row["tier"] == EVICTED):
        saved, stored = row.pop("saved_bytes"), complete["live_fp16_bytes"] / complete["ratio_live_fp16"]
        less = {name: complete[name] - saved for name in ("file_bytes", "keyframe_bytes")}
        row |= complete | less | {name: complete[name] * stored / (stored - saved) for name in RATIOS} | row
    return rows


@experiment(lambda: product(tier=TIERS), finish=_with_evicted)
def tier_ladder(
    subject: Subject, tier: str, steps: int, interval: int, retain: float, recent: float, codebook_size: int
) -> dict:
    """Write each tier as a snapshot stream, a token a step, and go on from the last state but one: a row per tier.

    Ratios of a file, without codebooks, to every snapshot in fp32 and to the live fp16 cache at the end.
    """
    live = _live(subject=subject, steps=steps)
    if tier == EVICTED:
        row = _evicted(subject, live, interval, retain, recent)
    else:
        keyframes, deltas = EXACT.get(tier, ("", "int4"))
        if not keyframes:
            preset = FRAMEWORK[tier](block_tokens=interval, codebook_size=codebook_size, seed=subject.seed)
            keyframes = subject.calibrated(preset).codecs
        stream = Stream(live, keyframes, deltas, interval)
        state, row = stream.state(max(0, steps - 2)), stream.report()
        del row["header_bytes"]
        row |= evaluate_restored(subject.exact, subject.test, *state)
    return {"model": subject.name, "tier": tier} | row


@per_process(maxsize=1)
def _live(subject: Subject, steps: int):
    return capture(subject.model, subject.test[:, :steps], batch_size=len(subject.test), pre_rope=False)


def _evicted(subject: Subject, live, interval: int, retain: float, recent: float) -> dict:
    """Return what eviction takes off a stream's last keyframe, in bytes, and the KL of the evicted exact cache."""
    steps, tokens = live[0][0].shape[2], subject.test
    last = steps - steps % interval
    kept = [heavy_hitters(scores, retain, recent) for scores in attention_scores(subject.model, tokens[:, :last])]
    streams = (Stream(_one_keyframe(live, last, index), "fp32", "exact", 1) for index in (None, kept))
    complete, evicted = (stream.report()["keyframe_bytes"] for stream in streams)
    settings = {"prompt_len": steps, "batch_size": len(tokens), "reconstruction": False, "exact": subject.exact}
    row = evaluate(subject.model, H2O(exact_compressor(subject), retain, recent), tokens, "snapshot", **settings)
    return {"saved_bytes": complete - evicted} | {name: row[name] for name in DAMAGE}


def _one_keyframe(live, seq_len: int, kept) -> list[list[torch.Tensor]]:
    """Fold the first ``seq_len`` tokens, or those ``kept`` of them, into the channels: one step of a stream."""
    roles = [[x[:, :, :seq_len] for x in role] for role in live]
    if kept is not None:
        roles = [[x.take_along_dim(i[..., None], 2) for x, i in zip(role, kept, strict=True)] for role in roles]
    return [[x.flatten(2).unsqueeze(2) for x in role] for role in roles]


@experiment(lambda retains: product(codec=CODECS, retain=retains))
def eviction(
    subject: Subject, codec: str, retain: float, prompt_len: int, recent: float, sink_tokens: int, quantizer: dict
) -> list[dict]:
    """Evict alone and on top of codecs: KL by share retained, for heavy hitters, SnapKV and random tokens; a row each.

    ``snapshot`` protocol, once after the prompt. ``sink_tokens`` always stay, as losing one would hide all else.
    """
    compressor = _evicted_codec(subject=subject, codec=codec, sink_tokens=sink_tokens, **quantizer)
    settings: dict[str, Any] = {"prompt_len": prompt_len, "step_size": 8, "reconstruction": False}
    settings |= {"batch_size": len(subject.test), "exact": subject.exact}
    rows, rules = [], {
        "heavy hitters": H2O(compressor, retain, recent),
        "SnapKV": snapkv(compressor, retain),
        "random": H2O(compressor, retain, recent, choose=random_tokens(subject.seed)),
    }  # fmt: skip
    for rule, policy in rules.items():
        row = evaluate(subject.model, policy, subject.test, "snapshot", **settings)
        label = {"model": subject.name, "codec": codec, "retain": retain, "rule": rule}
        rows.append(label | {key: row[key] for key in EVICTION_COLUMNS})
    return rows


@per_process(maxsize=1)
def _evicted_codec(subject: Subject, codec: str, sink_tokens: int, **quantizer) -> Compressor:
    preset = presets.vqllm(**quantizer, seed=subject.seed) if codec == "vqllm" else presets.fp16()
    return subject.calibrated(dataclasses.replace(preset, sink_tokens=sink_tokens))


def random_tokens(seed: int = 0) -> Callable[..., torch.Tensor]:
    """Make a rule in place of ``heavy_hitters`` that draws the kept tokens at random, the newest apart: the control."""
    generator = torch.Generator().manual_seed(seed)

    def choose(scores: torch.Tensor, *shares, **counts) -> torch.Tensor:
        drawn = torch.rand(scores.shape, generator=generator, dtype=torch.float32)
        return heavy_hitters(drawn.to(scores.device), *shares, **counts)

    return choose


def _codecs(codebook_size: int, num_quantizers: int, seed: int = 0) -> dict[str, presets.Preset]:
    shared = {"codebook_size": codebook_size, "seed": seed}
    return {
        "VQ of 8 values": presets.vq(8, **shared),
        "2 residual stages of 8 values": presets.rvq2(**shared),
        "residual VQ": presets.vqllm(num_quantizers, **shared),
    }


@experiment(lambda codebook_size, num_quantizers: product(codec=_codecs(codebook_size, num_quantizers)))
def code_entropy(subject: Subject, codec: str, codebook_size: int, num_quantizers: int) -> list[dict]:
    """Measure bits a value of held-out codes, packed and by rANS: a row per codec and role, means over layers.

    ``by_stage``: with a table for each stage. ``by_place``: one for each place in a token, which are ``table_bytes``.
    """
    preset, rows = _codecs(codebook_size, num_quantizers, subject.seed)[codec], []
    coded = [subject.calibrated(presets.entropy_coded(preset, context=context)) for context in ("stage", "position")]
    roles = capture(subject.model, subject.test, pre_rope=preset.fitting(subject.model).pre_rope or 0)
    for i, role in enumerate(("key", "value")):
        codecs = [[pair[i] for pair in compressor.codecs] for compressor in coded]
        by_layer = zip(codecs[0], codecs[1], roles[i], strict=True)
        layers = [_layer(stage, position, x.float()) for stage, position, x in by_layer]
        means = {name: statistics.mean(layer[name] for layer in layers) for name in layers[0]}
        rows.append({"model": subject.name, "codec": codec, "role": role} | means)
    return rows


def _layer(by_stage, by_place, x) -> dict[str, float]:
    """Return bits a value of the codes by way of coding them."""
    inner = by_place.quantizer.quantizer
    bits = {"packed": inner.encode(by_place.vectors(x))[0].numel() * inner.code_bits / x.numel()}
    for name, codec in (("by_stage", by_stage), ("by_place", by_place)):
        payload = codec.encode(x)
        bits[name] = 8 * (payload.nbytes - payload.fields["scale"].nbytes) / x.numel()
    return bits | {"table_bytes": by_place.side_bytes - inner.codebooks.nbytes}
