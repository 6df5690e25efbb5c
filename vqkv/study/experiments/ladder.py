"""Notebook 05: the VQ quality framework's tiers as files, and eviction beside them."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vqkv import presets
from vqkv.cache.attention_mass import token_mask
from vqkv.cache.compressor import Compressor
from vqkv.cache.eviction import H2O, attention_scores, heavy_hitters, snapkv
from vqkv.evaluation.evaluate import evaluate, evaluate_restored
from vqkv.models.capture import capture
from vqkv.study.experiments.common import Subject, calibrated, exact_compressor, frame, subject
from vqkv.study.snapshots import SnapshotReader, write_stream
from vqkv.study.sweep import per_process, sweep

KEPT = (
    "file_bytes", "keyframe_bytes", "delta_bytes", "header_bytes", "side_bytes", "every_fp32_bytes", "live_fp16_bytes",
)  # fmt: skip
EXACT = {"lossless": ("fp32", "exact"), "4-bit deltas": ("fp32", "int4")}  # what keyframes and deltas are stored as
EVICTED, WHOLE = "4-bit deltas + H2O", "4-bit deltas"
DAMAGE = ("kl_mean", "kl_low", "kl_high", "kl_std", "kl_worst", "kl_floor", "ppl_exact", "ppl", "top1")
EVICTION_COLUMNS = (*DAMAGE, "ratio")


def tier_ladder(
    models: list[str], corpus: str, steps: int, interval: int, new_tokens: int, num_seqs: int, train_seqs: int,
    retain: float, recent: float, codebook_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Each tier as a snapshot stream of caches that grow by one token a step, and the KL of going on from one of them:
    the last but one, which with ``steps`` a multiple of ``interval`` has the most deltas.

    One row per model and tier. Ratios are from bytes on disk, the header (codebooks) apart: against every snapshot in
    fp32, the source's baseline, and against the live fp16 cache after the last step.
    """
    texts = {"train": [train_seqs, max(interval, steps)], "test": [num_seqs, steps + new_tokens], "seed": seed}
    settings = {
        "who": texts | {"corpus": corpus, "dtype": dtype, "device": device},
        "stream": {"steps": steps, "interval": interval},
        "codebook_size": codebook_size,
        "kept": {"retain": retain, "recent": recent},
    }
    tiers = [*EXACT, *_lossy(interval, codebook_size, seed), EVICTED]
    cases = [{"model": name, "tier": tier} for name in models for tier in tiers]
    rows, sources = sweep(_tier_row, cases, settings, "tiers")
    return frame([_ratios(row) for row in _with_evicted(rows)], sources)


def _tier_row(model: str, tier: str, who: dict, stream: dict, codebook_size: int, kept: dict):
    """Bytes and KL of a tier; of the evicted one KL, and how many bytes of the whole one it saves."""
    who = who | {"name": model}
    found, live = subject(**who), _live(who=who, steps=stream["steps"])
    if tier == EVICTED:
        row = _evicted(found, live, stream["interval"], **kept)
    else:
        lossy = _lossy(stream["interval"], codebook_size, who["seed"])
        stored = EXACT.get(tier) or (calibrated(lossy[tier], who).codecs, "int4")
        row, state = _stream(live, *stored, stream["interval"])
        row |= evaluate_restored(found.exact, found.test, *state)
    return [{"model": model, "tier": tier} | row], found.sources


@per_process(maxsize=1)
def _live(who: dict, steps: int):
    found = subject(**who)
    return capture(found.model, found.test[:, :steps], batch_size=len(found.test), pre_rope=False)


def _lossy(keyframe: int, codebook_size: int, seed: int) -> dict[str, presets.Preset]:
    """Presets that keyframes are stored by."""
    shared = {"keyframe": keyframe, "codebook_size": codebook_size, "seed": seed}
    return {
        "product codes, threshold 0.08": presets.vqq_product(0.08, **shared),
        "product codes, threshold 0.10": presets.vqq_product(0.10, **shared),
        "VQ of 2 values": presets.vq(2, **shared),
        "VQ of 8 values": presets.vq(8, **shared),
    }


def _stream(live, keyframes, deltas, interval: int) -> tuple[dict, tuple]:
    """Write the growing cache to a file; its sizes, and its last snapshot but one (if there are two) read back."""
    with written(live, keyframes, deltas, interval) as stream:
        report = stream.report()
        return {name: report[name] for name in KEPT}, stream.state(max(0, len(stream) - 2))


@contextmanager
def written(live: list[list[torch.Tensor]], keyframes, deltas, interval: int) -> Iterator[SnapshotReader]:
    """A file of a cache (keys and values, each layer's) that grows by one token a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        write_stream(path, live, keyframes, deltas, interval)
        yield SnapshotReader(path)


def _evicted(found: Subject, live, interval: int, retain: float, recent: float) -> dict:
    """Bytes that a stream's last keyframe is smaller by once evicted, as the source does; KL of the evicted exact
    cache."""
    steps = live[0][0].shape[2]
    last = steps - steps % interval
    kept = [heavy_hitters(scores, retain, recent) for scores in attention_scores(found.model, found.test[:, :last])]
    whole, evicted = (_stream(_one_keyframe(live, last, index), "fp32", "exact", 1)[0] for index in (None, kept))
    settings = {"prompt_len": steps, "batch_size": len(found.test), "reconstruction": False, "exact": found.exact}
    row = evaluate(found.model, H2O(exact_compressor(found), retain, recent), found.test, "snapshot", **settings)
    saved = {"saved_bytes": whole["keyframe_bytes"] - evicted["keyframe_bytes"]}
    return saved | {name: row[name] for name in DAMAGE}


def _with_evicted(rows: list[dict]) -> list[dict]:
    """The evicted tier's bytes: those of the whole one, less what its last keyframe has lost."""
    whole = {row["model"]: row for row in rows if row["tier"] == WHOLE}
    found = []
    for row in rows:
        if row["tier"] == EVICTED:
            plain, saved = whole[row["model"]], row.pop("saved_bytes")
            row = plain | {name: plain[name] - saved for name in ("file_bytes", "keyframe_bytes")} | row
        found.append(row)
    return found


def _one_keyframe(live, seq_len: int, kept) -> list[list[torch.Tensor]]:
    """The first ``seq_len`` tokens, or those ``kept`` of them, folded into the channels: one step of a stream."""
    roles = [[x[:, :, :seq_len] for x in role] for role in live]
    if kept is not None:
        roles = [[x.take_along_dim(i[..., None], 2) for x, i in zip(role, kept, strict=True)] for role in roles]
    return [[x.flatten(2).unsqueeze(2) for x in role] for role in roles]


def _ratios(row: dict) -> dict:
    stored = row["file_bytes"] - row["header_bytes"]
    against = {f"ratio_{name}": row[f"{name}_bytes"] / stored for name in ("every_fp32", "live_fp16")}
    return row | against | {"keyframe_share": row["keyframe_bytes"] / stored}


def eviction(
    models: list[str], corpus: str, prompt_len: int, new_tokens: int, num_seqs: int, train_seqs: int,
    retains: list[float], recent: float, sink_tokens: int, codebook_size: int, num_quantizers: int, seed: int,
    dtype: str, device: str,
):  # fmt: skip
    """Eviction alone and on top of codecs: KL against the share of tokens retained, heavy hitters and
    SnapKV against random ones.

    ``snapshot`` protocol, evicted once after the prompt; the first ``sink_tokens`` always stay, also for the random
    rule, which would else show no more than what losing a sink costs. ``overlap``: the share of the tokens kept by
    scores from exact keys that scores from this codec's keys would keep too. One row per model, codec, rule and share.
    """
    length = prompt_len + new_tokens  # calibrated on as many: a model may tell positions apart
    texts = {"train": [train_seqs, length], "test": [num_seqs, length], "seed": seed}
    settings = {
        "who": texts | {"corpus": corpus, "dtype": dtype, "device": device},
        "quantizer": {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "sink_tokens": sink_tokens},
        "prompt_len": prompt_len,
        "recent": recent,
    }
    codecs = _codecs(seed=seed, **settings["quantizer"])
    cases = [{"model": name, "codec": codec, "retain": part} for name in models for codec in codecs for part in retains]
    return frame(*sweep(_eviction_rows, cases, settings, "eviction"))


def _eviction_rows(model: str, codec: str, retain: float, who: dict, quantizer: dict, prompt_len: int, recent: float):
    who = who | {"name": model}
    found, compressor = subject(**who), _evicted_codec(codec=codec, who=who, quantizer=quantizer)
    settings = {"prompt_len": prompt_len, "step_size": 8, "batch_size": len(found.test), "reconstruction": False}
    compared = compare_scores(found.model, compressor, found.test[:, :prompt_len], retain, recent)
    overlap = sum(compared) / len(compared)
    rows, rules = [], {
        "heavy hitters": H2O(compressor, retain, recent),
        "SnapKV": snapkv(compressor, retain),
        "random": H2O(compressor, retain, recent, choose=random_tokens(who["seed"])),
    }  # fmt: skip
    for rule, policy in rules.items():
        row = evaluate(found.model, policy, found.test, "snapshot", **settings, exact=found.exact)
        label = {"model": model, "codec": codec, "retain": retain, "rule": rule, "overlap": overlap}
        rows.append(label | {key: row[key] for key in EVICTION_COLUMNS})
    return rows, found.sources


def random_tokens(seed: int = 0) -> Callable[..., torch.Tensor]:
    """A rule in place of ``heavy_hitters`` that draws the kept tokens at random, the newest apart: the control."""
    generator = torch.Generator().manual_seed(seed)

    def choose(scores: torch.Tensor, *shares, **counts) -> torch.Tensor:
        drawn = torch.rand(scores.shape, generator=generator, dtype=torch.float32)
        return heavy_hitters(drawn.to(scores.device), *shares, **counts)

    return choose


def compare_scores(
    model, compressor, tokens: torch.Tensor, retain: float = 0.75, recent: float = 0.1, batch_size: int = 8
) -> list[float]:
    """The share, in each layer, of the tokens that an exact pass keeps which are kept too if attention reads packed
    keys and values; mean over sequences and heads."""
    exact, packed = (attention_scores(model, tokens, reads, batch_size) for reads in (None, compressor))
    shares = []
    for pair in zip(exact, packed, strict=True):
        ours, theirs = (token_mask(heavy_hitters(x, retain, recent), x.shape[-1]) for x in pair)
        shares.append((ours & theirs).sum().item() / ours.sum().item())
    return shares


@per_process(maxsize=1)
def _evicted_codec(codec: str, who: dict, quantizer: dict) -> Compressor:
    return calibrated(_codecs(seed=who["seed"], **quantizer)[codec], who)


def _codecs(num_quantizers: int, codebook_size: int, sink_tokens: int, seed: int) -> dict[str, presets.Preset]:
    chosen = (presets.fp16(), presets.vqllm(num_quantizers, codebook_size, seed=seed))
    return {preset.name: dataclasses.replace(preset, sink_tokens=sink_tokens) for preset in chosen}
