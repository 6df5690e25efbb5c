"""Notebook 11: every system and the unpublished crosses, on one harness, and the search for the latter."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import DataError, UnknownNameError
from vqkv.study.experiments.common import (
    bits_with_side,
    by_window,
    explained_by_layer,
    facts_answered,
    tokens_kept_exact,
)
from vqkv.study.experiments.designs import every, exists, factorial, published, since
from vqkv.study.experiments.residual_vq import shallower
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

CONTEXTS = {"1k": 1024, "2k": 2048, "8k": 8192, "32k": 32768, "128k": 131072}
DRAWS = 1000  # of a bootstrap
BATCH = 16  # sequences at a time in calibration, so that memory does not grow with the text
LEAST, MOST = 1e-9, 1e3  # nats: a system that broke is ranked last, not left out


def _rung(subject: Subject, models: list[str], rung: dict, number: int, designs: list[str], seq_len: int) -> list[dict]:
    """Cases of one rung of the search."""
    sizes = {"train_size": [rung["train_seqs"], seq_len], "test_size": [rung["num_seqs"], seq_len]}
    subjects = subject.changed(**sizes).each(name=models[: rung["models"]])
    cases = product(subject=subjects, design=designs, bits=rung["bits"], rung=[number])
    return [case for case in cases if exists(case["design"], case["bits"])]


def _first_rung(subject: Subject, models: list[str], rungs: list[dict], seq_len: int) -> list[dict]:
    return _rung(subject, models, rungs[0], 1, rungs[0].get("designs") or [*factorial()], seq_len)


def _next_rung(
    rows: list[dict], sweeps: int, subject: Subject, models: list[str], rungs: list[dict], contexts: list[str],
    seq_len: int,
) -> list[dict]:  # fmt: skip
    kept = _left(rows, sweeps, rungs[sweeps - 1]["keep"], contexts)
    return _rung(subject, models, rungs[sweeps], sweeps + 1, kept, seq_len) if sweeps < len(rungs) else []


def _left(rows: list[dict], number: int, keep: int, contexts: list[str]) -> list[str]:
    """The designs that a rung keeps. Raises ``DataError`` if it had none that works."""
    tried = [row for row in rows if row["rung"] == number]
    if not tried:
        raise DataError(f"rung {number}: no design that is left works with these models and bits")
    ranks = [_ranks(tried, f"equivalent_bits_{name}") for name in contexts]
    designs = dict.fromkeys(row["design"] for row in tried)
    return [design for design in designs if min(rank[design] for rank in ranks) <= keep]


def _ranked(rows: list[dict], rungs: list[dict], contexts: list[str]) -> list[dict]:
    """The rows with the columns that compare a rung's designs."""
    found = []
    for number, rung in enumerate(rungs, 1):
        tried, kept = [row for row in rows if row["rung"] == number], _left(rows, number, rung["keep"], contexts)
        columns = {}
        for name in contexts:
            columns[f"rank_{name}"] = _ranks(tried, f"equivalent_bits_{name}")
            columns[f"rank_{name}_se"] = _rank_errors(tried, f"equivalent_bits_{name}")
        for row in tried:
            places = {name: column[row["design"]] for name, column in columns.items()}
            found.append({"rung": number, "kept": row["design"] in kept} | places | row)
    return found


@experiment(_first_rung, then=_next_rung, finish=_ranked)
def halving_search(
    subject: Subject, design: str, bits: float, rung: int, contexts: list[str], chunk_size: int, learning: dict
) -> list[dict]:
    """Successive halving (Jamieson & Talwalkar 2016) over ``designs.factorial``, scored on the validation split, on
    which no table reports. Each rung of ``rungs`` tries the designs that are left on more text, ``{"models": at most so
    many of them, "bits": [...], "train_seqs", "num_seqs", "keep"}``, and keeps for each of ``contexts`` (of
    ``CONTEXTS``) the ``keep`` best by equivalent bits, averaged over its models and bits. The first may name the
    ``designs`` to begin with; all of them otherwise.

    A row per rung, model, design and nominal bits. ``equivalent_bits_CONTEXT``: stored bits of a value at so many
    tokens, side information included, plus log2(KL) / 2: the bits when every bit makes the KL four times smaller,
    as at high rates it does; lower is better. ``rank_CONTEXT`` is the design's in its rung, from 1, ``rank_CONTEXT_se``
    its standard error, over ``DRAWS`` bootstrap draws of the windows; ``kept`` whether it went on.
    """
    compressor = fitted(presets.crossed(**factorial()[design], bits=bits, seed=subject.seed, **learning), subject)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    totals = total_bits(row, subject.about, tokens_kept_exact(compressor))
    label = {"rung": rung, "model": subject.name, "design": design, "bits": bits}
    label |= {f"equivalent_bits_{at}": equivalent_bits(totals[f"bits_{at}_x1"], row["kl_mean"]) for at in contexts}
    columns = ("bits_per_value", "kl_mean", "kl_floor", "top1", "side_bytes", "kl_each")
    return [label | {name: row[name] for name in columns}]


def _ranks(rows: list[dict], column: str) -> dict[str, int]:
    """Design -> place, from 1, by the mean of a column."""
    means = pd.DataFrame(rows).groupby("design", sort=False)[column].mean()
    return {design: rank for rank, design in enumerate(means.sort_values(kind="stable").index, 1)}


def _rank_errors(rows: list[dict], column: str) -> dict[str, float]:
    """Design -> standard deviation of its place when the windows are drawn again (Efron & Tibshirani 1993), the same
    for all designs."""
    table, rng = pd.DataFrame(rows), np.random.default_rng(0)
    kl = np.nan_to_num(np.array([each.split() for each in table["kl_each"]], float), nan=MOST)
    fixed = table[column] - np.log2(np.clip(kl.mean(1), LEAST, MOST)) / 2
    places = []
    for _ in range(DRAWS):
        drawn = kl[:, rng.integers(kl.shape[1], size=kl.shape[1])].mean(1)
        table["drawn"] = fixed + np.log2(np.clip(drawn, LEAST, MOST)) / 2
        places.append(table.groupby("design", sort=False)["drawn"].mean().rank())
    return pd.concat(places, axis=1).std(axis=1).to_dict()


def equivalent_bits(bits: float, kl: float) -> float:
    """What is left of ``bits`` when every one makes the KL four times smaller; ``MOST`` nats where it is no number."""
    return bits + math.log2(max(LEAST, kl) if math.isfinite(kl) else MOST) / 2


def _cases(
    subject: Subject, seeds: list[int], systems: list[str], vqllm: dict, learning: dict,
    designs: Sequence[str] = (), bits: Sequence[float] = (),
) -> list[dict]:  # fmt: skip
    known = [label for make in (published, since) for label in make(vqllm, learning["sink_tokens"], 0)]
    if unknown := set(systems) - set(known):
        raise UnknownNameError("system", min(unknown), known)
    wanted = [label for label in known if label in (systems or known)]
    listed = [(label, 0) for label in sorted(wanted, key=lambda label: label not in vqllm)]
    listed += [(design, rate) for rate, design in itertools.product(bits, designs) if exists(design, rate)]
    return [
        {"subject": each, "system": label, "bits": rate} for each in subject.each(seed=seeds) for label, rate in listed
    ]


@experiment(_cases)
def frontier(
    subject: Subject, system: str, bits: float, facts: dict[str, int], chunk_size: int, vqllm: dict[str, list[int]],
    learning: dict, tuned: dict[str, dict] | None = None,
) -> list[dict]:  # fmt: skip
    """Published ``systems`` (by default all) and the ``designs`` of ``designs.every`` at all nominal ``bits``: a
    row per seed and system, ``chunked`` protocol, the same ``sink_tokens`` exact everywhere. A seed draws the text and
    starts k-means. ``learning``: ``codebook_size`` and ``kmeans_iterations`` of residual VQ in designs,
    ``sink_tokens``. ``tuned``: what ``tuning`` chose.

    ``bits_CONTEXT_x1``: with side information and sinks, of a sequence of so many tokens. ``kl_each``: one
    number for each held-out window, the same windows for all systems. ``facts``: see ``facts_answered``, of as many
    facts, tokens and texts as ``facts`` says; {} for none. ``evr``: explained variance of what is stored of one window.
    """
    compressor = fitted_system(subject, system, bits, vqllm, learning, tuned)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    row |= facts_answered(subject, compressor, **facts) if facts else {}
    row |= total_bits(row, subject.about, tokens_kept_exact(compressor))
    row["evr"] = math.nan if compressor.joint else _explained(subject, compressor)
    return [{"model": subject.name, "seed": subject.seed, "system": system, "nominal_bits": bits} | row]


def fitted_system(
    subject: Subject, system: str, bits: float, vqllm: dict, learning: dict, tuned: dict | None = None
) -> Compressor:
    """A published system or a design, fitted."""
    if system in vqllm:
        return _residual(subject, system, vqllm, learning["sink_tokens"], tuned or {})
    arguments = vqllm, learning["sink_tokens"], subject.seed, tuned
    known = published(*arguments) | since(*arguments)
    return fitted(
        known.get(system) or presets.crossed(**every()[system], bits=bits, seed=subject.seed, **learning), subject
    )


def _residual(subject: Subject, system: str, vqllm: dict, sink_tokens: int, tuned: dict) -> Compressor:
    """Residual VQ of so many stages, cut out of the deepest with codebooks of that size."""
    depth, size = vqllm[system]
    label = max((label for label, other in vqllm.items() if other[1] == size), key=lambda label: vqllm[label][0])
    return shallower(_deepest(subject=subject, label=label, vqllm=vqllm, sink_tokens=sink_tokens, tuned=tuned), depth)


@per_process(maxsize=1)
def _deepest(subject: Subject, label: str, vqllm: dict, sink_tokens: int, tuned: dict) -> Compressor:
    preset = published(vqllm, sink_tokens, subject.seed, tuned)[label]
    return calibrate(subject.model, subject.train, preset, min(BATCH, subject.train_size[0]), progress=False)


def fitted(preset: presets.Preset, subject: Subject) -> Compressor:
    """Calibrate in batches that do not grow with the text."""
    return subject.calibrated(preset, min(BATCH, subject.train_size[0]))


def total_bits(row: dict, about: dict, exact_tokens: float) -> dict[str, float]:
    """Bits of a value, side information included, by context length of a single sequence (``x1``)."""
    return {f"bits_{at}_x1": bits_with_side(row, about, tokens, exact_tokens) for at, tokens in CONTEXTS.items()}


def _explained(subject: Subject, compressor) -> float:
    """EVR of what is stored, mean over layers, keys and values, on one sequence."""
    ratios = explained_by_layer(subject, compressor, subject.test[:1]).values()
    return sum(ratios) / len(ratios)
