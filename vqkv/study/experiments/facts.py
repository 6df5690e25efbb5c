"""Notebook 10: facts hidden in text, which an exact cache tells: by their number, and by the length of the text."""

import itertools

import pandas as pd

from vqkv.errors import DataError
from vqkv.study.experiments.common import check_enough, exact_compressor, facts_told, frame, subject
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.sweep import sweep

EXACT = "fp16"


def facts_lost(
    models: list[str], corpus: str, episodes: list[list[int]], systems: list[str], designs: list[str],
    bits: list[float], least_exact: float, tell_apart: float, train_seqs: int, seq_len: int,
    vqllm: dict[str, list[int]], codebook_size: int, kmeans_iterations: int, sink_tokens: int, seed: int, dtype: str,
    device: str,
):  # fmt: skip
    """Questions about facts in text that each way to store a cache answers: a row per model, system and episode of
    ``episodes``, [facts, tokens of a text, texts]. Systems: fp16, published ones of ``systems`` and ``designs`` at all
    nominal ``bits``, only sinks exact. Columns as of ``common.facts_told``, and ``questions``.

    Raises ``DataError`` where texts are too few to tell ``tell_apart`` points apart, or where the model itself, with an
    exact cache, answers less than ``least_exact`` of the questions: such a task says nothing of caches.
    """
    for count, text_len, texts in episodes:
        check_enough(f"{count} facts in {text_len} tokens", count * texts, tell_apart)
    learning = {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations, "sink_tokens": sink_tokens}
    settings = {
        "who": {"corpus": corpus, "train": [train_seqs, seq_len], "test": [1, seq_len], "seed": seed, "dtype": dtype,
                "device": device},
        "episodes": episodes, "least_exact": least_exact, "vqllm": vqllm, "learning": learning,
    }  # fmt: skip
    listed = [(EXACT, 16.0), *((label, 0.0) for label in systems), *itertools.product(designs, bits)]
    cases = [{"model": name, "system": label, "bits": rate} for name in models for label, rate in listed]
    return frame(*sweep(_rows, cases, settings, "facts"))


def _rows(
    model: str, system: str, bits: float, who: dict, episodes: list[list[int]], least_exact: float, vqllm: dict,
    learning: dict,
):  # fmt: skip
    who = who | {"name": model}
    found, rows = subject(**who), []
    if system == EXACT:
        compressor = exact_compressor(found)
    else:
        compressor, _ = fitted_system(found, system, bits, who, vqllm, learning)
    for count, text_len, texts in episodes:
        told = facts_told(found, compressor, who["corpus"], count, text_len, texts, who["seed"])
        if told["facts_exact"] < least_exact:
            raise DataError(
                f"{model} itself tells {100 * told['facts_exact']:.0f}% of {count} facts in {text_len} tokens: ask for "
                "fewer facts, in shorter text, or take a larger model"
            )
        about = {"model": model, "system": system, "nominal_bits": bits, "num_facts": count, "text_len": text_len}
        rows.append(about | {"questions": count * texts} | told)
    return rows, found.sources


def by_length(table: pd.DataFrame, num_facts: int) -> pd.DataFrame:
    """Share (%) of questions that are answered, systems by tokens of text, of so many facts."""
    rows = table[table["num_facts"] == num_facts].assign(told=100 * table["facts"])
    return rows.pivot_table(index=["system", "nominal_bits"], columns="text_len", values="told", sort=False)
