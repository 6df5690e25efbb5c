"""Notebook 05: the VQ quality framework's tiers as files, and eviction beside them."""

import dataclasses
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.capture import capture
from vqkv.evaluate import evaluate, evaluate_restored
from vqkv.evict import H2O, attention_scores, compare_scores, heavy_hitters, random_tokens
from vqkv.experiments.common import draw, frame, load
from vqkv.snapshots import SnapshotReader, SnapshotWriter

KEPT = (
    "file_bytes", "keyframe_bytes", "delta_bytes", "header_bytes", "side_bytes", "every_fp32_bytes", "live_fp16_bytes",
)  # fmt: skip


def tier_ladder(
    models: list[str], corpus: str, steps: int, interval: int, new_tokens: int, num_seqs: int, train_seqs: int,
    retain: float, recent: float, codebook_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Each tier as a snapshot stream of caches that grow by one token a step, and the KL of going on from one of them:
    the last but one, which with ``steps`` a multiple of ``interval`` has the most deltas.

    One row per model and tier. Ratios are from bytes on disk, the header (codebooks) apart: against every snapshot in
    fp32, the source's baseline, and against the live fp16 cache after the last step.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", max(interval, steps), train_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", steps + new_tokens, num_seqs, seed, sources)
        live = capture(model, test[:, :steps], batch_size=num_seqs, post_rope=True)
        found = {}
        tiers = _tiers(model, train, interval, codebook_size, seed)
        for tier, how in tqdm(tiers.items(), desc="tiers", leave=False, disable=None):
            sizes, state = _stream(live, *how, interval)
            found[tier] = sizes | evaluate_restored(model, test, *state)
        plain = found["4-bit deltas"]
        found["4-bit deltas + H2O"] = _evicted(model, train, test, live, interval, plain, retain, recent)
        rows += [{"model": name, "tier": tier} | _ratios(numbers) for tier, numbers in found.items()]
    return frame(rows, sources)


def _tiers(model, train, keyframe: int, codebook_size: int, seed: int) -> dict:
    """Tier -> what keyframes and deltas are stored as."""
    shared = {"keyframe": keyframe, "codebook_size": codebook_size, "seed": seed}
    lossy = {
        "product codes, threshold 0.08": presets.vqq_product(0.08, **shared),
        "product codes, threshold 0.10": presets.vqq_product(0.10, **shared),
        "VQ of 2 values": presets.vq(2, **shared),
        "VQ of 8 values": presets.vq(8, **shared),
    }
    exact = {"lossless": ("fp32", "exact"), "4-bit deltas": ("fp32", "int4")}
    return exact | {tier: (calibrate(model, train, p, progress=False).codecs, "int4") for tier, p in lossy.items()}


def _stream(live, keyframes, deltas, interval: int) -> tuple[dict, tuple]:
    """Write the growing cache to a file; its sizes, and its last snapshot but one (if there are two) read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        with SnapshotWriter(path, keyframes, deltas, interval) as writer:
            for step in range(live[0][0].shape[2]):
                writer.append(*([x[:, :, step : step + 1] for x in role] for role in live))
        stream = SnapshotReader(path)
        report = stream.report()
        return {name: report[name] for name in KEPT}, stream.state(max(0, len(stream) - 2))


def _evicted(model, train, test, live, interval: int, plain: dict, retain: float, recent: float) -> dict:
    """The stream of ``plain`` with its last keyframe evicted, as the source does; KL of the evicted exact cache."""
    steps = live[0][0].shape[2]
    last = steps - steps % interval
    kept = [heavy_hitters(scores, retain, recent) for scores in attention_scores(model, test[:, :last])]
    whole, evicted = (_stream(_one_keyframe(live, last, index), "fp32", "exact", 1)[0] for index in (None, kept))
    saved = whole["keyframe_bytes"] - evicted["keyframe_bytes"]
    smaller = {name: plain[name] - saved for name in ("file_bytes", "keyframe_bytes")}
    policy = H2O(calibrate(model, train[:1], presets.fp16(), progress=False), retain, recent)
    row = evaluate(model, policy, test, "snapshot", prompt_len=steps, batch_size=len(test), reconstruction=False)
    return plain | smaller | {name: row[name] for name in ("kl_mean", "kl_std", "kl_worst", "top1")}


def _one_keyframe(live, seq_len: int, kept) -> list[list[torch.Tensor]]:
    """The first ``seq_len`` tokens, or those ``kept`` of them, folded into the channels: one step of a stream."""
    roles = [[x[:, :, :seq_len] for x in role] for role in live]
    if kept is not None:
        roles = [[x.take_along_dim(i[..., None], 2) for x, i in zip(role, kept, strict=True)] for role in roles]
    return [[x.flatten(2).unsqueeze(2) for x in role] for role in roles]


def _ratios(numbers: dict) -> dict:
    stored = numbers["file_bytes"] - numbers["header_bytes"]
    against = {f"ratio_{name}": numbers[f"{name}_bytes"] / stored for name in ("every_fp32", "live_fp16")}
    return numbers | against | {"keyframe_share": numbers["keyframe_bytes"] / stored}


def eviction(
    models: list[str], corpus: str, prompt_len: int, new_tokens: int, num_seqs: int, train_seqs: int,
    retains: list[float], recent: float, sink_tokens: int, codebook_size: int, num_quantizers: int, seed: int,
    dtype: str, device: str,
):  # fmt: skip
    """Eviction alone and on top of codecs: KL against the share of tokens retained, heavy hitters against random ones.

    ``snapshot`` protocol, evicted once after the prompt; the first ``sink_tokens`` always stay, also for the random
    rule, which would else show no more than what losing a sink costs. ``overlap``: the share of the tokens kept by
    scores from exact keys that scores from this codec's keys would keep too. One row per model, codec, rule and share.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        length = prompt_len + new_tokens  # calibrated on as many: a model may tell positions apart
        train = draw(corpus, tokenizer, "train", length, train_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", length, num_seqs, seed, sources)
        settings = {"prompt_len": prompt_len, "step_size": 8, "batch_size": num_seqs, "reconstruction": False}
        for codec in (presets.fp16(), presets.vqllm(num_quantizers, codebook_size, seed=seed)):
            codec = dataclasses.replace(codec, sink_tokens=sink_tokens)
            compressor = calibrate(model, train, codec, progress=False)
            for retain in tqdm(retains, desc=codec.name, leave=False, disable=None):
                compared = compare_scores(model, compressor, test[:, :prompt_len], retain, recent)
                overlap = sum(layer["overlap"] for layer in compared) / len(compared)
                for rule, choose in (("heavy hitters", heavy_hitters), ("random", random_tokens(seed))):
                    row = evaluate(model, H2O(compressor, retain, recent, choose=choose), test, "snapshot", **settings)
                    label = {"model": name, "codec": codec.name, "retain": retain, "rule": rule, "overlap": overlap}
                    rows.append(label | {key: row[key] for key in ("kl_mean", "kl_std", "kl_worst", "top1", "ratio")})
    return frame(rows, sources)
