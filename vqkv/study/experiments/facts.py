"""Notebook 10: what is answered of what an exact cache answers: facts hidden in a text, a passage that comes again."""

from typing import Any

import torch

from vqkv.errors import DataError
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.study.experiments.common import COPY_FROM, exact_compressor, facts_answered
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

EXACT = "fp16"


@experiment(
    lambda systems, designs, bits: (
        [{"system": EXACT, "bits": 16.0}] + product(system=systems, bits=[0.0]) + product(system=designs, bits=bits)
    )
)
def retrieval(
    subject: Subject, system: str, bits: float, episodes: list[list[int]], passage: int, least_exact: float,
    vqllm: dict, learning: dict,
) -> list[dict]:  # fmt: skip
    """Ask about a text through each way to store a cache: a row per system and task.

    ``facts``: ``episodes`` of [facts, tokens of a text, texts]. ``copy``: a ``passage`` comes again at the end.
    ``told`` and ``told_exact`` are shares, ``lost`` their difference in points with its 95% interval. Raises
    ``DataError`` where the exact cache tells less than ``least_exact``: such a task says nothing of caches.
    """
    exact = system == EXACT
    compressor = exact_compressor(subject) if exact else fitted_system(subject, system, bits, vqllm, learning)
    rows = [_copy(subject, compressor, passage)]
    for count, text_len, texts in episodes:
        answers = facts_answered(subject, compressor, count, text_len, texts)
        answers = {name.replace("facts", "told").replace("told_lost", "lost"): each for name, each in answers.items()}
        rows.append({"task": "facts", "num_facts": count, "text_len": text_len, "questions": count * texts} | answers)
    for row in rows:
        if row["told_exact"] < least_exact:
            raise DataError(
                f"{subject.name} itself tells {100 * row['told_exact']:.0f}% of {row['task']}, {row['num_facts']} in "
                f"{row['text_len']} tokens: ask for fewer facts, in shorter text, or take a larger model"
            )
    return [{"model": subject.name, "system": system, "nominal_bits": bits} | row for row in rows]


def _copy(subject: Subject, compressor, passage: int) -> dict:
    tokens, answers = passages(subject.test, passage)
    read: dict[str, Any] = {"chunk_size": passage, "reconstruction": False, "per_sequence": True}
    row = evaluate(subject.model, compressor, tokens, answers=answers, exact=subject.exact, **read)
    names = ("recall_each", "recall_exact_each")
    each, exact = (torch.tensor(row[name]).double().view(len(tokens), -1) for name in names)
    low, high = bootstrap_interval(100 * (exact - each).mean(1))
    shares = {"told": row["recall"], "told_exact": row["recall_exact"]}
    lost = {"lost": 100 * (shares["told_exact"] - shares["told"]), "lost_low": low, "lost_high": high}
    about = {"task": "copy", "num_facts": 0, "text_len": tokens.shape[1], "questions": each.numel()}
    return about | shares | lost


def passages(text: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``text`` with its second ``size`` tokens again as its last, and where these are asked for (bool)."""
    tokens = torch.cat([text[:, :-size], text[:, size : 2 * size]], dim=1)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, COPY_FROM - size :] = True
    return tokens, answers
