"""Notebook 02: calibration on text of another domain, and on little text."""

import math

import pandas as pd

from vqkv.errors import DataError
from vqkv.study.experiments.common import by_window, draw, frame, subject
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.sweep import sweep

MEASURED = ("bits_per_value", "side_bytes", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1", "kl_each")


def calibration_text(
    model: str, corpus: str, other_corpus: str, systems: list[str], designs: list[str], bits: float, train_seqs: int,
    sizes: list[int], seed: int, seq_len: int, num_seqs: int, chunk_size: int, vqllm: dict[str, list[int]],
    codebook_size: int, kmeans_iterations: int, sink_tokens: int, tuned: dict[str, dict], dtype: str, device: str,
):  # fmt: skip
    """Published ``systems`` and ``designs`` at nominal ``bits`` (see ``frontier``), calibrated on text of the ``train``
    split and read on ``num_seqs`` windows of the ``test`` split, ``chunked`` protocol. A row per system, calibration
    and text:

    - ``train_seqs`` sequences of either corpus, read on both;
    - each of ``sizes`` of ``corpus``, read on ``corpus``; the fewer sequences are the first of the more.

    ``kl_each``: the KL of each window. ``refused``: the error where a system takes no calibration on so little
    text; its numbers are NaN. Designs that predict refuse nothing: too little text shows in
    ``bits_per_value``, which is what the text that is read takes.
    """
    learning = {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations, "sink_tokens": sink_tokens}
    text = {"test": [num_seqs, seq_len], "seed": seed, "dtype": dtype, "device": device}
    settings = {"who": text | {"name": model}, "chunk_size": chunk_size, "vqllm": vqllm}
    both = [corpus, other_corpus]
    fits = [(source, train_seqs, both) for source in both]
    fits += [(corpus, size, [corpus]) for size in sizes if size != train_seqs]
    cases = [
        {"system": label, "bits": nominal, "corpus": source, "train_seqs": size, "texts": texts}
        for source, size, texts in fits  # outermost: keys and values are captured once for all systems
        for label, nominal in [*((label, 0) for label in systems), *((label, bits) for label in designs)]
    ]
    return frame(*sweep(_rows, cases, settings | {"learning": learning, "tuned": tuned}, "calibration text"))


def _rows(
    system: str, bits: float, corpus: str, train_seqs: int, texts: list[str], who: dict, chunk_size: int,
    vqllm: dict, learning: dict, tuned: dict,
):  # fmt: skip
    num_seqs, seq_len = who["test"]
    who = who | {"corpus": corpus, "train": [train_seqs, seq_len]}
    found, refused, compressor, rows = subject(**who), "", None, []
    try:
        compressor = fitted_system(found, system, bits, who, vqllm, learning, tuned)
    except DataError as error:
        refused = str(error)
    for read in texts:
        row = dict.fromkeys(MEASURED, math.nan) | {"kl_each": ""}
        if compressor:
            tokens = draw(read, found.tokenizer, "test", seq_len, num_seqs, who["seed"], found.sources)
            row = by_window(found, compressor, tokens, chunk_size=chunk_size, reconstruction=False)
        label = {"model": who["name"], "system": system, "nominal_bits": bits, "train_corpus": corpus}
        label |= {"test_corpus": read, "train_seqs": train_seqs}
        rows.append(label | {name: row[name] for name in MEASURED} | {"refused": refused})
    return rows, found.sources


def against_own(table: pd.DataFrame, train_seqs: int) -> pd.DataFrame:
    """Every other calibration beside that on ``train_seqs`` sequences of the corpus that is read (``_own``), system by
    system. ``ratio``: its KL over the latter's, with the 95% interval over windows, ``low`` to ``high``; NaN where it
    was refused. ``more_bits``: what it takes more of stored bits."""
    keys, numbers = ["model", "system", "nominal_bits", "test_corpus"], ["kl_mean", "bits_per_value", "kl_each"]
    own = (table["train_corpus"] == table["test_corpus"]) & (table["train_seqs"] == train_seqs)
    both = table[~own].merge(table.loc[own, keys + numbers], on=keys, suffixes=("", "_own"))
    known = both[both["kl_mean"].notna() & both["kl_mean_own"].notna()]
    pairs = zip(known["kl_each"], known["kl_each_own"], strict=True)
    ratios = [paired_ratio(str(other).split(), str(ours).split()) for other, ours in pairs]
    both = both.join(pd.DataFrame(ratios, known.index, ["ratio", "low", "high"]))
    return both.assign(more_bits=both["bits_per_value"] - both["bits_per_value_own"])
