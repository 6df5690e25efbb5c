"""Notebook 10: what is told of a text that an exact cache tells: facts hidden in it, and a passage that comes again."""

import itertools

import torch

from vqkv.errors import DataError
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.study.experiments.common import (
    FINDS,
    Subject,
    check_enough,
    exact_compressor,
    facts_told,
    frame,
    passages,
    subject,
)
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.sweep import sweep

EXACT = "fp16"


def retrieval(
    models: list[str], corpus: str, episodes: list[list[int]], copied: list[int], systems: list[str],
    designs: list[str], bits: list[float], least_exact: float, tell_apart: float, train_seqs: int, seq_len: int,
    vqllm: dict[str, list[int]], codebook_size: int, kmeans_iterations: int, sink_tokens: int, seed: int, dtype: str,
    device: str,
):  # fmt: skip
    """Questions about a text that each way to store a cache answers: a row per model, system and task.

    Task ``facts``: ``episodes`` of [facts, tokens of a text, texts] (``common.facts_told``). Task ``copy``: ``copied``,
    [texts, tokens of each, tokens of a passage that comes again at its end]. ``told`` and ``told_exact`` are shares of
    ``questions``, ``lost`` their difference in points with its 95% interval over texts. Systems: fp16, published ones
    of ``systems`` and ``designs`` at all nominal ``bits``, only sinks exact.

    Raises ``DataError`` where texts are too few to tell ``tell_apart`` points apart, or where the model itself, with an
    exact cache, answers less than ``least_exact`` of the questions: such a task says nothing of caches.
    """
    texts, _, again = copied
    asked = [(f"{count} facts in {text_len} tokens", count * number) for count, text_len, number in episodes]
    for task, questions in [*asked, ("copy", texts * (again - FINDS))]:
        check_enough(task, questions, tell_apart)
    settings = {
        "who": {"corpus": corpus, "train": [train_seqs, seq_len], "test": copied[:2], "seed": seed, "dtype": dtype,
                "device": device},
        "episodes": episodes, "again": again, "least_exact": least_exact, "vqllm": vqllm,
        "learning": {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations,
                     "sink_tokens": sink_tokens},
    }  # fmt: skip
    listed = [(EXACT, 16.0), *((label, 0.0) for label in systems), *itertools.product(designs, bits)]
    cases = [{"model": name, "system": label, "bits": rate} for name in models for label, rate in listed]
    return frame(*sweep(_rows, cases, settings, "facts"))


def _rows(
    model: str, system: str, bits: float, who: dict, episodes: list[list[int]], again: int, least_exact: float,
    vqllm: dict, learning: dict,
):  # fmt: skip
    who = who | {"name": model}
    found = subject(**who)
    if system == EXACT:
        compressor = exact_compressor(found)
    else:
        compressor = fitted_system(found, system, bits, who, vqllm, learning)
    rows = [_copy(found, compressor, again)]
    for count, text_len, texts in episodes:
        told = facts_told(found, compressor, who["corpus"], count, text_len, texts, who["seed"])
        told = {name.replace("facts", "told").replace("told_lost", "lost"): value for name, value in told.items()}
        rows.append({"task": "facts", "num_facts": count, "text_len": text_len, "questions": count * texts} | told)
    for row in rows:
        _check_told(model, row, least_exact)
    return [{"model": model, "system": system, "nominal_bits": bits} | row for row in rows], found.sources


def _copy(found: Subject, compressor, again: int) -> dict:
    batch = passages(found.test, again)
    read = {"chunk_size": again, "reconstruction": False, "per_sequence": True, "exact": found.exact}
    row = evaluate(found.model, compressor, batch.tokens, answers=batch.answers, **read)
    names = ("recall_each", "recall_exact_each")
    each, exact = (torch.tensor(row[name]).double().view(len(batch.tokens), -1) for name in names)
    low, high = bootstrap_interval(100 * (exact - each).mean(1))
    told, told_exact = row["recall"], row["recall_exact"]
    lost = {"lost": 100 * (told_exact - told), "lost_low": low, "lost_high": high}
    about = {"task": "copy", "num_facts": 0, "text_len": batch.tokens.shape[1], "questions": each.numel()}
    return about | {"told": told, "told_exact": told_exact} | lost


def _check_told(model: str, row: dict, least: float) -> None:
    if row["told_exact"] < least:
        raise DataError(
            f"{model} itself tells {100 * row['told_exact']:.0f}% of {row['task']}, {row['num_facts']} in "
            f"{row['text_len']} tokens: ask for fewer facts, in shorter text, or take a larger model"
        )
