"""Notebook 11: every system and the unpublished crosses, on one harness, and the search for the latter."""

import itertools
import math
import warnings

import numpy as np
import pandas as pd

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.load import describe
from vqkv.study.experiments.common import (
    Subject,
    all_told,
    by_window,
    calibrated,
    explained_by_layer,
    facts_told,
    frame,
    kept_exact,
    subject,
    written,
)
from vqkv.study.experiments.depth import shallower
from vqkv.study.experiments.designs import every, exists, factorial, first_layers, published, since
from vqkv.study.sweep import per_process, sweep

CONTEXTS = {"1k": 1024, "2k": 2048, "8k": 8192, "32k": 32768, "128k": 131072}
BATCHES = (1, 16)
DRAWS = 1000  # of a bootstrap
BATCH = 16  # sequences at a time in calibration, so that memory does not grow with the text
LEAST, MOST = 1e-9, 1e3  # nats: a system that broke is ranked last, not left out


def halving_search(
    models: list[str], corpus: str, rungs: list[dict], contexts: list[str], seq_len: int, chunk_size: int,
    codebook_size: int, kmeans_iterations: int, seed: int, dtype: str, device: str,
):  # fmt: skip
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
    designs, rows, sources = list(dict.fromkeys(rungs[0].get("designs") or factorial())), [], {}
    for number, rung in enumerate(rungs, 1):
        text = {"train": [rung["train_seqs"], seq_len], "test": [rung["num_seqs"], seq_len], "seed": seed}
        settings = {
            "who": text | {"corpus": corpus, "dtype": dtype, "device": device, "held_out": "validation"},
            "chunk_size": chunk_size,
            "learning": {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations},
            "contexts": contexts,
        }  # fmt: skip
        cases = [
            {"model": name, "design": design, "bits": bits}
            for name, design, bits in itertools.product(models[: rung["models"]], designs, rung["bits"])
            if exists(design, bits)
        ]
        found, drawn = sweep(_tried, cases, settings, f"rung {number}")
        if not found:
            raise DataError(f"rung {number}: no design that is left works with {models} at {rung['bits']} bits")
        ranks = {name: _ranks(found, f"equivalent_bits_{name}") for name in contexts}
        errors = {name: _rank_errors(found, f"equivalent_bits_{name}") for name in contexts}
        designs = [name for name in designs if min(rank.get(name, math.inf) for rank in ranks.values()) <= rung["keep"]]
        for row in found:
            design = row["design"]
            places = {f"rank_{name}": rank[design] for name, rank in ranks.items()}
            places |= {f"rank_{name}_se": error[design] for name, error in errors.items()}
            rows.append({"rung": number, "kept": design in designs} | places | row)
        sources |= drawn
    return frame(rows, sources)


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


def _tried(model: str, design: str, bits: float, who: dict, chunk_size: int, learning: dict, contexts: list[str]):
    who = who | {"name": model}
    found = subject(**who)
    preset = presets.crossed(**factorial()[design], bits=bits, seed=who["seed"], **learning)
    try:
        compressor = fitted(preset, who)
    except DataError as error:
        return without(model, design, error), found.sources
    settings = {"chunk_size": chunk_size, "exact": found.exact, "per_sequence": True}
    row = evaluate(found.model, compressor, found.test, reconstruction=False, **settings)
    totals = total_bits(row, describe(found.model), kept_exact(compressor))
    label = {"model": model, "design": design, "bits": bits}
    label |= {
        f"equivalent_bits_{name}": equivalent_bits(totals[f"bits_{name}_x1"], row["kl_mean"]) for name in contexts
    }
    label |= {name: row[name] for name in ("bits_per_value", "kl_mean", "kl_floor", "top1", "side_bytes")}
    return [label | {"kl_each": written(row["kl_each"])}], found.sources


def equivalent_bits(bits: float, kl: float) -> float:
    """What is left of ``bits`` when every one makes the KL four times smaller; ``MOST`` nats where it is no number."""
    return bits + math.log2(max(LEAST, kl) if math.isfinite(kl) else MOST) / 2


def frontier(
    models: list[str], corpus: str, designs: list[str], bits: list[float], seeds: list[int], train_seqs: int,
    seq_len: int, num_seqs: int, facts: dict[str, int], chunk_size: int, vqllm: dict[str, list[int]],
    codebook_size: int, kmeans_iterations: int, sink_tokens: int, systems: list[str], tuned: dict[str, dict],
    dtype: str, device: str, test_len: int | None = None, held_out: str = "test",
):  # fmt: skip
    """Published ``systems`` (by default all) and the ``designs`` of ``designs.every`` at all nominal ``bits``: a
    row per model, seed and system, ``chunked`` protocol, the same ``sink_tokens`` exact everywhere. A seed draws the
    text and starts k-means. ``tuned``: what ``tuning`` chose.

    ``bits_CONTEXT_xBATCH``: with side information and sinks, of so many sequences of so many tokens. ``kl_each``: one
    number for each held-out window of ``test_len`` (by default ``seq_len``) tokens, the same windows for all systems.
    ``held_out``: their split, ``validation`` for what chooses among systems. ``facts``: see ``facts_told``, of as many
    facts, tokens and texts as ``facts`` says; {} for none. ``evr``: explained variance of what is stored of one window.
    """
    text = {"train": [train_seqs, seq_len], "test": [num_seqs, test_len or seq_len], "corpus": corpus}
    learning = {"codebook_size": codebook_size, "kmeans_iterations": kmeans_iterations, "sink_tokens": sink_tokens}
    settings = {
        "who": text | {"dtype": dtype, "device": device, "held_out": held_out}, "vqllm": vqllm, "learning": learning,
        "facts": facts, "chunk_size": chunk_size, "tuned": tuned,
    }  # fmt: skip
    known = [label for make in (published, since) for label in make(vqllm, sink_tokens, 0)]
    if unknown := set(systems) - set(known):
        raise UnknownNameError("system", min(unknown), known)
    wanted = [label for label in known if label in (systems or known)]
    cases = [{"systems": [*vqllm], "bits": 0}] * any(label in vqllm for label in wanted)  # one calibration for all
    cases += [{"systems": [label], "bits": 0} for label in wanted if label not in vqllm]
    cases += [
        {"systems": [design], "bits": nominal}
        for nominal, design in itertools.product(bits, designs)
        if exists(design, nominal)
    ]
    cases = [{"model": name, "seed": seed} | case for name, seed, case in itertools.product(models, seeds, cases)]
    return frame(*sweep(_rows, cases, settings, "frontier"))


def _rows(model: str, seed: int, systems: list[str], bits: float, who: dict, **settings):
    who = who | {"name": model, "seed": seed}
    label = {"model": model, "seed": seed}
    found = subject(**who)
    rows = []
    for system in systems:
        try:
            rows.append(label | _row(found, system, bits, who, **settings))
        except DataError as error:
            rows += without(model, system, error)
    return rows, found.sources


def without(model: str, system: str, error: DataError) -> list[dict]:
    """No row: eviction of a model that shows no attention probabilities, groups that do not divide its heads."""
    warnings.warn(f"{model} goes without {system}: {error}", stacklevel=2)
    return []


def _row(
    found: Subject, system: str, bits: float, who: dict, vqllm: dict, learning: dict, tuned: dict,
    facts: dict[str, int], chunk_size: int,
) -> dict:  # fmt: skip
    compressor = fitted_system(found, system, bits, who, vqllm, learning, tuned)
    return {"system": system, "nominal_bits": bits} | measured(found, compressor, who, facts, chunk_size)


def measured(found: Subject, compressor, who: dict, facts: dict[str, int], chunk_size: int) -> dict[str, float | str]:
    """Columns of ``frontier`` but for the names."""
    row = by_window(found, compressor, found.test, chunk_size=chunk_size, reconstruction=False)
    row |= facts_told(found, compressor, who["corpus"], seed=who["seed"], **facts) if facts else {}
    row |= total_bits(row, describe(found.model), kept_exact(compressor))
    return row | {"evr": math.nan if compressor.joint else _explained(found, compressor)}


def fitted_system(
    found: Subject, system: str, bits: float, who: dict, vqllm: dict, learning: dict, tuned: dict | None = None
):
    """A published system or a design, fitted."""
    if system in vqllm:
        return _residual(system, who, vqllm, learning, tuned or {})
    if system in (known := _known(vqllm, learning["sink_tokens"], who["seed"], tuned)):
        return fitted(known[system], who)
    return fitted(presets.crossed(**every()[system], bits=bits, seed=who["seed"], **learning), who)


def _known(vqllm: dict, sink_tokens: int, *more) -> dict[str, presets.Preset]:
    arguments = vqllm, sink_tokens, *more
    return published(*arguments) | since(*arguments) | first_layers(sink_tokens)


def _residual(system: str, who: dict, vqllm: dict, learning: dict, tuned: dict) -> Compressor:
    """Residual VQ of so many stages, cut out of the deepest with codebooks of that size."""
    depth, size, *_ = vqllm[system]
    label = max((label for label, other in vqllm.items() if other[1] == size), key=lambda label: vqllm[label][0])
    sinks = learning["sink_tokens"]
    return shallower(_fitted(label=label, who=who, vqllm=vqllm, sink_tokens=sinks, tuned=tuned), depth)


@per_process(maxsize=1)
def _fitted(label: str, who: dict, vqllm: dict, sink_tokens: int, tuned: dict) -> Compressor:
    """On the text of ``subject(**who)`` or, if it is told, on more of the same corpus, batch by batch."""
    preset, (_, _, *more) = published(vqllm, sink_tokens, who["seed"], tuned)[label], vqllm[label]
    found = subject(**who | {"train": [*more, who["train"][1]]} if more else who)
    return calibrate(found.model, found.train, preset, min(BATCH, len(found.train)), progress=False)


def fitted(preset: presets.Preset, who: dict) -> Compressor:
    return calibrated(preset, who, min(BATCH, who["train"][0]))


def total_bits(row: dict, about: dict, exact_tokens: float) -> dict[str, float]:
    """Bits of a value, side information included, by context length and number of sequences that share it."""
    return {
        f"bits_{name}_x{batch}": all_told(row, about, tokens, batch, exact_tokens)
        for name, tokens in CONTEXTS.items()
        for batch in BATCHES
    }


def _explained(found: Subject, compressor) -> float:
    """EVR of what is stored, mean over layers, keys and values, on one sequence."""
    ratios = explained_by_layer(found, compressor, found.test[:1]).values()
    return sum(ratios) / len(ratios)
