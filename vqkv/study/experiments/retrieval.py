"""Notebook 10: what each way to store a cache loses of key-value recall, which an exact cache has."""

import itertools

import pandas as pd
import torch

from vqkv.data.recall import RecallBatch, RecallTask
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.study.experiments.common import Subject, check_enough, draw, exact_compressor, frame, subject
from vqkv.study.experiments.designs import published
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.sweep import sweep

EXACT = "fp16"
AQUA = ("aqua higgs 2, first 2", "aqua higgs 2", "aqua higgs 3, first 2")
BLOCK = 128  # tokens, as many as the longest block of a published codec


def retrieval(
    models: list[str], corpus: str, pairs: list[int], far_pairs: int, gaps: list[int], num_seqs: int, train_seqs: int,
    seq_len: int, vqllm: dict[str, list[int]], designs: list[str], bits: list[float], codebook_size: int,
    kmeans_iterations: int, sink_tokens: int, tell_apart: float, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Greedy recall of ``pairs`` pairs, and of ``far_pairs`` behind ``gaps`` tokens of held-out text, ``num_seqs``
    episodes each, every key asked for once: a row per model, system and episode. Every token is read as it is stored
    (``in_place``).

    Systems: ``designs.published`` with AQUA-KV's of ``AQUA``, and ``designs`` at all nominal ``bits``. ``low``,
    ``high``: 95% bootstrap interval over episodes of what is ``lost``, in points. Raises ``DataError`` where episodes
    are too few to tell ``tell_apart`` points apart.
    """
    for count in (*pairs, far_pairs):
        check_enough(f"recall of {count} pairs", count * num_seqs, tell_apart)
    learning = {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations, "sink_tokens": sink_tokens}
    settings = {
        "who": {"corpus": corpus, "train": [train_seqs, seq_len], "test": [1, seq_len], "seed": seed, "dtype": dtype,
                "device": device},
        "episodes": [[count, 0] for count in pairs] + [[far_pairs, gap] for gap in gaps],
        "num_seqs": num_seqs, "vqllm": vqllm, "learning": learning,
    }  # fmt: skip
    others = [label for label in published(vqllm, sink_tokens, seed) if not label.startswith("aqua")]
    systems = [(EXACT, 16.0), *((label, 0.0) for label in (*others, *AQUA)), *itertools.product(designs, bits)]
    cases = [{"model": name, "system": label, "bits": rate} for name in models for label, rate in systems]
    return frame(*sweep(_rows, cases, settings, "retrieval"))


def _rows(
    model: str, system: str, bits: float, who: dict, episodes: list[list[int]], num_seqs: int, vqllm: dict,
    learning: dict,
):  # fmt: skip
    who = who | {"name": model}
    found, rows = subject(**who), []
    if system == EXACT:
        compressor = exact_compressor(found)
    else:
        compressor, _ = fitted_system(found, system, bits, who, vqllm, learning)
    for count, gap in episodes:
        batch = recall_episodes(found, count, gap, num_seqs, learning["sink_tokens"], who)
        about = {"model": model, "system": system, "nominal_bits": bits, "pairs": count, "gap": gap}
        rows.append(about | scored(found, compressor, batch))
    return rows, found.sources


def recall_episodes(found: Subject, count: int, gap: int, num_seqs: int, sinks: int, who: dict) -> RecallBatch:
    """Episodes, and held-out text behind the last query up to sinks and whole blocks, or a codec that packs blocks of
    tokens would hold the last ones exact."""
    text = draw(who["corpus"], found.tokenizer, "test", gap + BLOCK, num_seqs, who["seed"], found.sources)[:, 1:]
    batch = RecallTask(found.tokenizer).episodes(count, num_seqs, who["seed"], text[:, :gap] if gap else None)
    after = text[:, gap : gap + (sinks - batch.tokens.shape[1]) % BLOCK]
    nothing = torch.zeros_like(after)
    parts = [(batch.tokens, after), (batch.answers, nothing.bool()), (batch.distance, nothing)]
    return RecallBatch(*(torch.cat(pair, 1) for pair in parts))


def scored(found: Subject, compressor, batch: RecallBatch) -> dict:
    """Shares of right answers, read in place and exact, and points ``lost`` with their interval over sequences."""
    row = evaluate(
        found.model, compressor, batch.tokens, "in_place", answers=batch.answers, reconstruction=False,
        per_sequence=True, exact=found.exact,
    )  # fmt: skip
    each, exact = (
        torch.tensor(row[name], dtype=torch.float64).view(len(batch.tokens), -1)
        for name in ("recall_each", "recall_exact_each")
    )
    low, high = bootstrap_interval(100 * (exact - each).mean(1))
    return {
        "bits_per_value": row["bits_per_value"], "recall": row["recall"], "recall_exact": row["recall_exact"],
        "lost": 100 * (row["recall_exact"] - row["recall"]), "low": low, "high": high, "answers": each.numel(),
        "kl_mean": row["kl_mean"], "kl_floor": row["kl_floor"],
    }  # fmt: skip


def first_lost(table, points: float = 10):
    """The most bits per value at which each family of systems loses ``points`` of what an exact cache recalls for
    certain (the interval's lower end), by model and episode: a row each; NaN if it never does. A design is a family of
    its own."""
    kind = table["system"].str.split(",").str[0].str.replace(r" \d.*", "", regex=True)
    rows = table.assign(family=kind.where(table["nominal_bits"].isin([0, 16]), table["system"]))
    lost = rows[rows["low"] >= points]
    keys = ["model", "pairs", "gap", "family"]
    found = lost.groupby(keys, sort=False)["bits_per_value"].max().unstack("family")
    episodes = pd.MultiIndex.from_frame(rows[keys[:-1]].drop_duplicates())
    return found.reindex(index=episodes, columns=[name for name in rows["family"].unique() if name != EXACT])
