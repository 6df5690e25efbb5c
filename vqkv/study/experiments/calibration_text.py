"""Notebook 02: calibration on text of another domain, and on little text."""

import math

import pandas as pd

from vqkv.errors import DataError
from vqkv.study.experiments.common import by_window
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment

MEASURED = ("bits_per_value", "side_bytes", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1", "kl_each")


def _cases(
    subject: Subject, other_corpus: str, sizes: list[int], systems: list[str], designs: list[str], bits: float
) -> list[dict]:
    num_seqs, seq_len = subject.train_size
    both = [subject.corpus, other_corpus]
    fits = [(corpus, num_seqs, both) for corpus in both]
    fits += [(subject.corpus, size, both[:1]) for size in sizes if size != num_seqs]
    return [
        {"subject": subject.changed(corpus=corpus, train_size=[size, seq_len]), "texts": texts}
        | {"system": label, "bits": nominal}
        for corpus, size, texts in fits  # outermost: keys and values are captured once for all systems
        for label, nominal in [*((label, 0) for label in systems), *((label, bits) for label in designs)]
    ]


@experiment(_cases)
def calibration_text(
    subject: Subject, system: str, bits: float, texts: list[str], chunk_size: int, vqllm: dict, learning: dict
) -> list[dict]:
    """Calibrate ``systems`` and ``designs`` on other or less text and read windows of ``test``: a row per text,
    ``chunked``.

    The subject's ``train_size`` of its corpus and of ``other_corpus``, read on both; ``sizes`` of its corpus, on that.
    ``kl_each``: of each window. ``refused``: the error where a system takes no calibration on so little text.
    """
    refused, compressor, rows = "", None, []
    try:
        compressor = fitted_system(subject, system, bits, vqllm, learning)
    except DataError as error:
        refused = str(error)
    for corpus in texts:
        row = dict.fromkeys(MEASURED, math.nan) | {"kl_each": ""}
        if compressor:
            tokens = subject.text("test", subject.test_size, subject.seed, corpus)
            row = by_window(subject, compressor, tokens, chunk_size=chunk_size, reconstruction=False)
        label = {"model": subject.name, "system": system, "nominal_bits": bits, "train_corpus": subject.corpus}
        label |= {"test_corpus": corpus, "train_seqs": subject.train_size[0]}
        rows.append(label | {name: row[name] for name in MEASURED} | {"refused": refused})
    return rows


def against_own(table: pd.DataFrame, train_seqs: int) -> pd.DataFrame:
    """Every other calibration next to that on ``train_seqs`` sequences of the corpus that is read (``_own``), system by
    system. ``ratio``: its KL over the latter's, with the 95% interval over windows, ``low`` to ``high``; NaN where it
    was refused. ``more_bits``: what it takes more of stored bits."""
    keys, numbers = ["model", "system", "nominal_bits", "test_corpus"], ["kl_mean", "bits_per_value", "kl_each"]
    own = (table["train_corpus"] == table["test_corpus"]) & (table["train_seqs"] == train_seqs)
    both = table[~own].merge(table.loc[own, keys + numbers], on=keys, suffixes=("", "_own"))
    finite = both[both["kl_mean"].notna() & both["kl_mean_own"].notna()]
    pairs = zip(finite["kl_each"], finite["kl_each_own"], strict=True)
    ratios = [paired_ratio(str(other).split(), str(ours).split()) for other, ours in pairs]
    both = both.join(pd.DataFrame(ratios, finite.index, ["ratio", "low", "high"]))
    return both.assign(more_bits=both["bits_per_value"] - both["bits_per_value_own"])
