"""Notebook 14: calibration on text of another domain, on little text, and on text of several seeds: who breaks."""

import itertools
import math

import numpy as np
import pandas as pd

from vqkv.errors import DataError
from vqkv.evaluation.evaluate import evaluate
from vqkv.study.experiments.common import draw, frame, loaded, subject
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.sweep import per_process, sweep

MEASURED = ("bits_per_value", "side_bytes", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1")


def calibration_text(
    models: list[str], corpora: list[str], systems: list[list], train_seqs: int, sizes: list[int],
    fit_seeds: list[int], text_seeds: list[int], seq_len: int, num_seqs: int, chunk_size: int,
    vqllm: dict[str, list[int]], codebook_size: int, kmeans_iterations: int, sink_tokens: int, tuned: dict[str, dict],
    larger: dict[str, list[int]], dtype: str, device: str,
):  # fmt: skip
    """Every one of ``systems``, [label, nominal bits] as ``frontier.fitted_system`` takes them, calibrated on text of
    the ``train`` split and read on ``num_seqs`` sequences of the ``test`` split, ``chunked`` protocol. A row per part,
    model, system, calibration and text:

    - ``domain``: every one of ``corpora`` to calibrate on, and every one to read; ``train_seqs``, the first seeds.
    - ``size``: ``sizes`` sequences to calibrate on, and those that ``larger`` names for a system; the fewer the first
      of the more; the first corpus and seeds.
    - ``seeds``: ``fit_seeds``, which draw the calibration text and start k-means and rotations, times ``text_seeds``,
      which draw what is read; the first corpus, ``train_seqs``.

    One calibration is read on all its texts, and a row that belongs to several parts is in each. ``refused``: the
    beginning of the error where a system takes no calibration on so little text; its numbers are NaN. Designs that
    predict refuse nothing and fall back to nothing (``presets.best`` does): too little text shows in
    ``bits_per_value``, which is what the text that is read takes, and predictions that are left out, as they gain
    nothing, in fewer ``side_bytes``.
    """
    learning = {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations, "sink_tokens": sink_tokens}
    settings = {
        "who": {"test": [num_seqs, seq_len], "test_seed": text_seeds[0], "dtype": dtype, "device": device},
        "chunk_size": chunk_size, "vqllm": vqllm, "learning": learning, "tuned": tuned,
    }  # fmt: skip
    cases = [
        {"model": name, "system": label, "bits": bits, "fit": [*fit], "texts": [[*text, parts] for text, parts in read]}
        for name, (label, bits) in itertools.product(models, systems)
        for fit, read in _fits(corpora, train_seqs, [*sizes, *larger.get(label, [])], fit_seeds, text_seeds)
    ]
    cases.sort(
        key=lambda case: (models.index(case["model"]), str(case["fit"]))
    )  # text is captured once for all systems
    return frame(*sweep(_rows, cases, settings, "calibration text"))


def _fits(corpora: list[str], train_seqs: int, sizes: list[int], fit_seeds: list[int], text_seeds: list[int]):
    """[(calibration: corpus, sequences, seed), [(text: corpus, seed), parts that want it]]."""
    first, fit, text = corpora[0], fit_seeds[0], text_seeds[0]
    wanted = [("domain", (ours, train_seqs, fit), (read, text)) for ours, read in itertools.product(corpora, corpora)]
    wanted += [("size", (first, size, fit), (first, text)) for size in sizes]
    wanted += [("seeds", (first, train_seqs, a), (first, b)) for a, b in itertools.product(fit_seeds, text_seeds)]
    found: dict[tuple, dict[tuple, list[str]]] = {}
    for part, calibrated_on, read in wanted:
        found.setdefault(calibrated_on, {}).setdefault(read, []).append(part)
    return [(calibrated_on, [*texts.items()]) for calibrated_on, texts in found.items()]


def _rows(
    model: str, system: str, bits: float, fit: list, texts: list[list], who: dict, chunk_size: int,
    vqllm: dict, learning: dict, tuned: dict,
):  # fmt: skip
    corpus, count, seed = fit
    size, how = who["test"], {"name": model, "dtype": who["dtype"], "device": who["device"]}
    who = who | {"name": model, "corpus": corpus, "train": [count, size[1]], "seed": seed}
    found = subject(**who)
    compressor, refused, rows, sources = None, "", [], found.sources
    try:
        compressor = fitted_system(found, system, bits, who, vqllm, learning, tuned)
    except DataError as error:
        refused = str(error).partition(":")[0]
    for read, text_seed, parts in texts:
        row = dict.fromkeys(MEASURED, math.nan)
        if compressor:
            tokens, drawn, exact = _held_out(corpus=read, size=size, seed=text_seed, **how)
            row = evaluate(exact.model, compressor, tokens, chunk_size=chunk_size, reconstruction=False, exact=exact)
            sources = sources | drawn
        label = {"model": model, "system": system, "nominal_bits": bits, "train_corpus": corpus, "test_corpus": read}
        label |= {"train_seqs": count, "fit_seed": seed, "text_seed": text_seed}
        label |= {name: row[name] for name in MEASURED} | {"refused": refused}
        rows += [{"part": part} | label for part in parts]
    return rows, sources


@per_process(maxsize=8)
def _held_out(name: str, dtype: str, device: str, corpus: str, size: list[int], seed: int):
    """Tokens to read, their source, and the model's own pass over them, which all systems share."""
    sources = {}
    _, tokenizer, _, exact = loaded(name=name, dtype=dtype, device=device)
    tokens = draw(corpus, tokenizer, "test", size[1], size[0], seed, sources)
    return tokens, sources, exact


def across_domains(table: pd.DataFrame) -> pd.DataFrame:
    """For each model, system and corpus that is read: KL and stored bits with calibration on that corpus (``own``) and
    on another (``other``, geometric mean if there are several), and the latter over the former (``ratio``).
    ``lost_bits``: what the other text costs in all, in bits of a value, by the rule that four times the KL is a bit."""
    rows, domain = [], table[table["part"] == "domain"]
    for key, mine in domain.groupby(["model", "system", "nominal_bits", "test_corpus"], sort=False):
        own, row = mine["train_corpus"] == mine["test_corpus"], {}
        for name, column in (("kl", "kl_mean"), ("bits", "bits_per_value")):
            ours, theirs = (2 ** np.log2(mine.loc[which, column]).mean() for which in (own, ~own))
            row |= {f"{name}_own": ours, f"{name}_other": theirs, f"{name}_ratio": theirs / ours}
        row["lost_bits"] = row["bits_other"] - row["bits_own"] + math.log2(row["kl_ratio"]) / 2
        rows.append(dict(zip(("model", "system", "nominal_bits", "test_corpus"), key)) | row)
    return pd.DataFrame(rows)


def seed_spread(table: pd.DataFrame) -> pd.DataFrame:
    """For each model and system, standard deviations over seeds of the calibration (``fit``: its text, k-means,
    rotations) and over those of what is read (``text``), each of means over the other: of log2 KL and of stored bits.
    NaN where a calibration was refused."""
    rows, seeds = [], table[table["part"] == "seeds"].assign(log2_kl=lambda rows: np.log2(rows["kl_mean"]))
    for key, mine in seeds.groupby(["model", "system", "nominal_bits"], sort=False):
        row = dict(zip(("model", "system", "nominal_bits"), key))
        for name, column in (("log2_kl", "log2_kl"), ("bits", "bits_per_value")):
            grid = mine.pivot(index="fit_seed", columns="text_seed", values=column)
            for axis, what in ((1, "fit"), (0, "text")):
                row[f"{name}_{what}"] = grid.mean(axis=axis, skipna=False).std(skipna=False)
        rows.append(row)
    return pd.DataFrame(rows)
