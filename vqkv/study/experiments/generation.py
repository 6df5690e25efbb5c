"""Notebook 08: what a compressed cache costs and saves while generating."""

import math
from functools import partial

import pandas as pd
import torch

from vqkv.evaluation.exact import ExactPass
from vqkv.evaluation.metrics import token_kl, token_nll
from vqkv.models.layers import max_positions
from vqkv.models.rope import rotates
from vqkv.study.bench.caches import REFERENCE, chosen, contenders, stored_bytes
from vqkv.study.bench.generation import latency
from vqkv.study.bench.peak import peak_memory
from vqkv.study.experiments.common import Subject, calibrated, frame, loaded, subject
from vqkv.study.sweep import sweep

BLOCK = 128  # tokens: every system packs in blocks that divide it


def generation_latency(**settings) -> pd.DataFrame:
    """Times by ``vqkv.study.bench.generation.latency``, which no two runs have alike, and no case of a sweep: all
    systems take turns in one process."""
    return frame(latency(**settings), {})


def generation_peak(**settings) -> pd.DataFrame:
    """Resident memory by ``study.bench.peak.peak_memory``, which differs a little from run to run; nor a sweep."""
    return frame(peak_memory(**settings), {})


def memory_growth(
    model: str, corpus: str, systems: list[str], train_seqs: int, seq_len: int, generated: list[int],
    batches: list[int], codebook_sizes: list[int], kmeans_iterations: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Bytes that the caches of ``systems`` (all if there are none) store after a prompt of 128 tokens and ``generated``
    more, multiples of 128; a row per system, batch size and number of tokens.

    ``stored_bytes``: every tensor that the cache holds, on a model in ``dtype``. ``expected_bytes``: bits per value
    times packed values, and what is exact or kept decoded (``exact_bytes``). ``largest_bytes``: one token before, when
    a cache that packs 128 tokens at a time holds most. ``ratio``: of ``DynamicCache``'s bytes to these (NaN without
    it). ``side_bytes``: codebooks and predictors, stored once whatever the number of tokens and sequences. Presets are
    fitted on ``train_seqs`` sequences of ``seq_len`` tokens.
    """
    texts = {"train": [train_seqs, seq_len], "test": [max(batches), BLOCK + max(generated)], "seed": seed}
    settings = {
        "who": texts | {"name": model, "corpus": corpus, "dtype": dtype, "device": device},
        "fit": {"codebook_sizes": codebook_sizes, "kmeans_iterations": kmeans_iterations, "seed": seed},
        "generated": generated,
        "batches": batches,
    }
    cases = [{"label": label} for label in chosen(systems, codebook_sizes)]
    rows, sources = sweep(_memory_rows, cases, settings, "memory")
    return frame(_with_ratio(rows), sources)


def _memory_rows(label: str, who: dict, fit: dict, generated: list[int], batches: list[int]):
    """None for transformers' cache with a package that is missing."""
    found, rows = subject(**who), []
    for system in fitted_contender(found, label, who, fit).values():
        for batch in batches:
            growth = _growth(found.model, system, found.test[:batch].to(found.model.device), generated)
            rows += [{"model": who["name"], "system": label, "batch": batch} | row for row in growth]
    return rows, found.sources


@torch.inference_mode()
def _growth(model, system, tokens: torch.Tensor, generated: list[int]) -> list[dict]:
    """Feed the tokens as generation would store them, a block's last token apart."""
    cache, rows, largest = system.new_cache(model), [], 0
    for done in range(0, tokens.shape[1], BLOCK):
        pieces = [BLOCK] if done == 0 else [BLOCK - 1, 1]
        for piece in tokens[:, done : done + BLOCK].split(pieces, dim=1):
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            largest = largest if piece.shape[1] == 1 else stored_bytes(cache, system)
        if done in generated:
            rows.append({"generated": done} | _sizes(cache, system) | {"largest_bytes": largest})
    return rows


def _sizes(cache, system) -> dict:
    report = cache.report()
    exact = sum(report.kinds.get(kind, 0) for kind in ("window", "sinks", "decoded"))
    return {
        "stored_bytes": stored_bytes(cache, system),
        "expected_bytes": report.packed_bytes + exact,
        "exact_bytes": exact,
        "packed_values": report.packed_values,
        "values": report.values,
        "bits_per_value": report.bits_per_value,
        "side_bytes": system.side_bytes,
    }


def _with_ratio(rows: list[dict]) -> list[dict]:
    plain = {(row["batch"], row["generated"]): row["stored_bytes"] for row in rows if row["system"] == REFERENCE}
    for row in rows:
        row["bits_total"] = 8 * row["stored_bytes"] / row["values"]
        row["ratio"] = plain.get((row["batch"], row["generated"]), math.nan) / row["stored_bytes"]
    return rows


def loss_by_position(
    models: list[str], corpus: str, systems: list[str], train_seqs: int, seq_len: int, longest: int, num_seqs: int,
    chunk_size: int, bucket: int, batch_size: int, codebook_sizes: list[int], kmeans_iterations: int, seed: int,
    dtype: str, device: str,
):  # fmt: skip
    """Negative log-likelihood by position in long held-out text, fed ``chunk_size`` tokens at a time, every one of the
    ``systems`` (all if there are none) with the sinks and window that it has; a row per model, system and bucket of
    ``bucket`` positions.

    Sequences have ``longest`` tokens, or as many as a model with learned positions has. ``nll`` and ``kl`` (against the
    exact model) are nats per token, ``nll_added`` is the difference from ``nll_exact``, each with the standard error
    of its mean over sequences (``_se``). Presets are fitted on ``train_seqs`` sequences of ``seq_len`` tokens.
    """
    texts = {"train": [train_seqs, seq_len], "test": [num_seqs, longest], "seed": seed}
    settings = {
        "who": texts | {"corpus": corpus, "dtype": dtype, "device": device},
        "fit": {"codebook_sizes": codebook_sizes, "kmeans_iterations": kmeans_iterations, "seed": seed},
        "feed": {"chunk_size": chunk_size, "batch_size": batch_size},
        "bucket": bucket,
    }
    cases = [{"model": name, "label": label} for name in models for label in chosen(systems, codebook_sizes)]
    return frame(*sweep(_position_rows, cases, settings, "position"))


def _position_rows(model: str, label: str, who: dict, fit: dict, feed: dict, bucket: int):
    """None for transformers' cache with a package that is missing."""
    who = _no_longer(who | {"name": model})
    found, rows = subject(**who), []
    for system in fitted_contender(found, label, who, fit).values():
        losses = torch.cat([*_losses(found.exact, system, found.test.to(found.model.device), **feed)], 1)
        about = {"model": model, "trained": max_positions(found.model), "system": label}
        rows += [about | row for row in _by_bucket(losses, bucket)]
    return rows, found.sources


def _no_longer(who: dict) -> dict:
    """``who`` with held-out sequences no longer than a model with learned positions has."""
    model, *_ = loaded(name=who["name"], dtype=who["dtype"], device=who["device"])
    num_seqs, length = who["test"]
    if not rotates(model):
        length = min(length, max_positions(model))
    return who | {"test": [num_seqs, length]}


def fitted_contender(found: Subject, label: str, who: dict, fit: dict) -> dict:
    """The system of this label by its name, fitted on the text of ``subject(**who)``; nothing for transformers' cache
    with a package that is missing."""
    fitted = partial(calibrated, who=who, batch_size=len(found.train))
    return contenders(found.model, found.train, [label], **fit, fit=fitted)


@torch.inference_mode()
def _losses(exact_pass: ExactPass, system, tokens: torch.Tensor, chunk_size: int, batch_size: int):
    """Yields, batch by batch, the NLL with a system, the exact one, KL and that of an fp16 cache: (4, num_seqs, seq_len
    - 1)."""
    model = exact_pass.model
    for batch in tokens.split(batch_size):
        exact, targets = exact_pass(batch)[0][:, :-1], batch[:, 1:]
        cache = system.new_cache(model)
        pieces = [model(x, past_key_values=cache, use_cache=True).logits for x in batch.split(chunk_size, dim=1)]
        logits = torch.cat(pieces, 1)[:, :-1]
        floor = exact_pass.floor(batch, [x.shape[1] for x in batch.split(chunk_size, dim=1)])[:, :-1]
        losses = [token_nll(logits, targets), token_nll(exact, targets), token_kl(exact, logits), floor]
        yield torch.stack(losses).cpu()


def _by_bucket(losses: torch.Tensor, bucket: int) -> list[dict]:
    """A row per bucket of positions of ``losses`` (4, num_seqs, positions); position 0 is that of the first token."""
    rows = []
    for start in range(0, losses.shape[2], bucket):
        nll, exact, kl, floor = losses[:, :, start : start + bucket].double().mean(2)
        means = {"nll": nll, "nll_exact": exact, "nll_added": nll - exact, "kl": kl, "kl_floor": floor}
        row = {"start": start, "end": min(start + bucket, losses.shape[2]), "num_seqs": len(nll)}
        for name, each in means.items():
            row |= {name: each.mean().item(), f"{name}_se": (each.std() / len(each) ** 0.5).item()}
        rows.append(row)
    return rows


def with_side(memory: pd.DataFrame, sharing: int = 1) -> pd.DataFrame:
    """Rows of ``memory_growth`` with side information counted, ``sharing`` such caches having it in common:
    ``all_told_bytes``, ``bits_all_told`` a value, and ``ratio_all_told`` of ``DynamicCache``'s bytes to these."""
    total = memory["stored_bytes"] + memory["side_bytes"] / sharing
    ratio = memory["ratio"] * memory["stored_bytes"] / total
    return memory.assign(all_told_bytes=total, bits_all_told=8 * total / memory["values"], ratio_all_told=ratio)


def choices(
    times: pd.DataFrame, memory: pd.DataFrame, losses: pd.DataFrame, model: str, context: int, sharing: int
) -> pd.DataFrame:
    """The choice that one has, a row per system: ``model``'s bits per value all told of one sequence after the most
    generated tokens (``bits_all_told``) and of one of ``sharing`` such that share side information (``bits_shared``),
    and its KL over all positions, with that of an fp16 cache; and milliseconds added to the prompt and to a token after
    ``context`` tokens of the model that is timed."""
    losses = losses[losses["model"] == model]
    weights = losses["end"] - losses["start"]
    means = losses[["kl", "kl_floor"]].mul(weights, axis=0).groupby(losses["system"], sort=False).sum()
    means = means.div(weights.groupby(losses["system"], sort=False).sum(), axis=0)
    timed = times[(times["batch"] == 1) & (times["context"] == context)].set_index("system")
    stored = memory[(memory["batch"] == 1) & (memory["generated"] == memory["generated"].max())].set_index("system")
    bits = {"bits_all_told": with_side(stored)["bits_all_told"]}
    bits |= {"bits_shared": with_side(stored, sharing)["bits_all_told"]}
    return pd.concat([pd.DataFrame(bits), means, timed[["added_prefill_ms", "added_ms"]]], axis=1, join="inner")
