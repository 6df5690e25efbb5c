"""Key-value recall read through a compressed cache, of lists and behind text."""

import torch

from vqkv.data.recall import RecallBatch, RecallTask
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.study.experiments.common import Subject, draw

BLOCK = 128  # tokens, as many as the longest block of a published codec


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
