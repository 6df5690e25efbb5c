"""Notebook 11: every system and the unpublished crosses on one harness, with searches among both on other text."""

import ast
import itertools
import math
import statistics
from collections.abc import Sequence

import pandas as pd

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import UnknownNameError
from vqkv.study.experiments.common import bits_with_side, by_window, exact_tokens, explained_by_layer, facts_answered
from vqkv.study.experiments.designs import every, exists, factorial, published
from vqkv.study.experiments.residual_vq import shallower
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

CONTEXTS = {"1k": 1024, "2k": 2048, "8k": 8192, "32k": 32768, "128k": 131072}
BATCH = 16  # sequences at a time in calibration, so that memory does not grow with the text
SMALLEST_KL, BROKEN_KL = 1e-9, 1e3  # nats: a system that broke is ranked last, not left out


@experiment(
    lambda designs, bits: [
        case for case in product(design=designs or factorial(), bits=bits) if exists(case["design"], case["bits"])
    ]
)
def design_search(
    subject: Subject, design: str, bits: float, contexts: list[str], chunk_size: int, learning: dict
) -> list[dict]:
    """Score ``designs`` (by default all of ``designs.factorial``) on the validation split: a row per design and bits.

    ``equivalent_bits_CONTEXT``, for each of ``contexts`` (of ``CONTEXTS``): stored bits of a value at so many tokens,
    side information included, plus log2(KL) / 2, as at high rates every bit makes the KL four times smaller.
    """
    compressor = fitted(presets.crossed(**factorial()[design], bits=bits, seed=subject.seed, **learning), subject)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    totals = total_bits(row, subject.about, exact_tokens(compressor))
    label = {"model": subject.name, "design": design, "bits": bits}
    label |= {f"equivalent_bits_{at}": equivalent_bits(totals[f"bits_{at}_x1"], row["kl_mean"]) for at in contexts}
    columns = ("bits_per_value", "kl_mean", "kl_floor", "top1", "side_bytes", "kl_each")
    return [label | {name: row[name] for name in columns}]


def equivalent_bits(bits: float, kl: float) -> float:
    """Return the bits that give a KL of 1 nat if each divides it by four; ``BROKEN_KL`` where it is no number."""
    return bits + math.log2(max(SMALLEST_KL, kl) if math.isfinite(kl) else BROKEN_KL) / 2


def _cases(
    subject: Subject, seeds: list[int], systems: list[str], vqllm: dict, learning: dict,
    designs: Sequence[str] = (), bits: Sequence[float] = (),
) -> list[dict]:  # fmt: skip
    labels = [*published(vqllm, learning["sink_tokens"], 0)]
    if unknown := set(systems) - set(labels):
        raise UnknownNameError("system", min(unknown), labels)
    wanted = [label for label in labels if label in (systems or labels)]
    listed: list[tuple[str, float]] = [(label, 0) for label in sorted(wanted, key=lambda label: label not in vqllm)]
    listed += [(design, rate) for rate, design in itertools.product(bits, designs) if exists(design, rate)]
    subjects = subject.each(seed=seeds)
    return [{"subject": each, "system": label, "bits": rate} for each in subjects for label, rate in listed]


@experiment(_cases)
def frontier(
    subject: Subject, system: str, bits: float, facts: dict[str, int], chunk_size: int, vqllm: dict[str, list[int]],
    learning: dict, tuned: dict[str, dict] | None = None,
) -> list[dict]:  # fmt: skip
    """Measure published ``systems`` ([] for all) and ``designs`` at all ``bits``, ``chunked``: a row each and per seed.

    Only ``sink_tokens`` stay exact. ``bits_CONTEXT_x1``: with side information and sinks, of so many tokens.
    ``kl_each``: a number for each window, the same for all systems. ``facts``: of ``facts_answered``, {} for none.
    ``evr``: mean of what is stored of one window. ``learning``: of designs; ``tuned``: what ``tuning`` chose.
    """
    compressor = fitted_system(subject, system, bits, vqllm, learning, tuned)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    row |= facts_answered(subject, compressor, **facts) if facts else {}
    row |= total_bits(row, subject.about, exact_tokens(compressor))
    one = None if compressor.joint else explained_by_layer(subject, compressor, subject.test[:1])
    row["evr"] = statistics.mean(one.values()) if one else math.nan
    return [{"model": subject.name, "seed": subject.seed, "system": system, "nominal_bits": bits} | row]


def fitted_system(
    subject: Subject, system: str, bits: float, vqllm: dict, learning: dict, tuned: dict | None = None
) -> Compressor:
    """Fit a published system or a design; residual VQ is cut out of the deepest with codebooks of its size."""
    if system in vqllm:
        depth, size = vqllm[system]
        label = max((name for name, other in vqllm.items() if other[1] == size), key=lambda name: vqllm[name][0])
        settings = {"vqllm": vqllm, "sink_tokens": learning["sink_tokens"], "tuned": tuned or {}}
        return shallower(_deepest(subject=subject, label=label, **settings), depth)
    preset = published(vqllm, learning["sink_tokens"], subject.seed, tuned).get(system)
    return fitted(preset or presets.crossed(**every()[system], bits=bits, seed=subject.seed, **learning), subject)


@per_process(maxsize=1)
def _deepest(subject: Subject, label: str, vqllm: dict, sink_tokens: int, tuned: dict) -> Compressor:
    preset = published(vqllm, sink_tokens, subject.seed, tuned)[label]
    return calibrate(subject.model, subject.train, preset, min(BATCH, subject.train_size[0]), progress=False)


def fitted(preset: presets.Preset, subject: Subject) -> Compressor:
    """Calibrate in batches that do not grow with the text."""
    return subject.calibrated(preset, min(BATCH, subject.train_size[0]))


def total_bits(row: dict, about: dict, exact_tokens: float) -> dict[str, float]:
    """Return bits of a value, side information included, by context length of a single sequence (``x1``)."""
    return {f"bits_{at}_x1": bits_with_side(row, about, tokens, exact_tokens) for at, tokens in CONTEXTS.items()}


AQUA: list[dict] = product(predictor=["linear", "gptq"], first_layer_bits=[4, 2])
AQUA += [{"predictor": "reduced_rank", "rank": 64, "first_layer_bits": 4}]
TRIALS = {
    "quanto 2": [{"group_size": 64}, {"group_size": 32}, {"group_size": 16}],
    "kivi": [{"block_tokens": 128}, {"block_tokens": 64}, {"block_tokens": 32}],
    "kvquant": [
        {"outliers": 0.01, "fisher": False},
        *product(outliers=[0.01, 0.005, 0.0025], fisher=[True]),
        {"outliers": 0.01, "fisher": True, "norm": True},
    ],
    "higgs": [{"group_size": 1024}, {"group_size": 64}, {"group_size": 32}],
    "vqq product": [{"block_tokens": 32}, {"block_tokens": 64}, {"block_tokens": 16}],
    "vqllm": [  # at equal bits, which its labels tell
        {"key_grouping": "strided", "value_grouping": "contiguous"},
        {"key_grouping": "contiguous", "value_grouping": "contiguous"},
        {"key_grouping": "strided", "value_grouping": "strided"},
    ],
    **{f"aqua higgs {bits}": AQUA for bits in (2, 3, 4)},
    "turboquant": [{"pre_rope": False}, {"pre_rope": None}],
    "kvarn": [{"block_tokens": 128}, {"block_tokens": 64}],
    "cachegen": [{"group": group, "block_tokens": 128} for group in (16, 8, 32, 64)],
    "nsnquant": [{"block_tokens": 64}, {"block_tokens": 32}, {"block_tokens": 128}],
    "aatc": [{"block_tokens": 32}, {"block_tokens": 128}],
    "oscar": [{"key_clip": 0.96, "value_clip": 0.92}, {"key_clip": 0.92, "value_clip": 0.88}, {"group_size": 32}],
    "nova": [{"clip": 0.92}, {"clip": 0.96}],
}
WORTH = 0.05  # equivalent bits by which a setting must beat the default to replace it: less is noise
RATES = {"vqq product": "vqq product", "kvarn": "kvarn 2+2", "aatc": "aatc 0.9"}
RATES |= {name: name for name in ("quanto 2", *(f"aqua higgs {bits}" for bits in (2, 3, 4)))}  # others at 2 bits


def _with_chosen(rows: list[dict]) -> list[dict]:
    """Add ``chosen`` to rows; the default, which comes first in its family, has ``WORTH`` of its own taken off."""
    bits = pd.DataFrame(rows).set_index(["family", "settings"])["equivalent_bits"]
    bits[bits.groupby("family").head(1).index] -= WORTH
    best = set(bits.sort_values(kind="stable").groupby("family").head(1).index)
    return [row | {"chosen": (row["family"], row["settings"]) in best} for row in rows]


@experiment(
    lambda families: [case for name in families or TRIALS for case in product(family=[name], arguments=TRIALS[name])],
    finish=_with_chosen,
)
def tuning(
    subject: Subject, family: str, arguments: dict, chunk_size: int, vqllm: dict[str, list[int]], sink_tokens: int,
    context: str,
) -> list[dict]:  # fmt: skip
    """Try each of ``families`` of systems ([] for all) with its ``TRIALS``, the first being page 11's default.

    A row per family and ``settings``, of which ``arguments`` are the literal, at one rate on the validation split, on
    which no table reports. ``equivalent_bits``: as in ``design_search``, with the bits of ``context``, exact tokens and
    side information included. ``chosen``: the least within a family, or its default if that is not worse by ``WORTH``.
    """
    label = next(iter(vqllm)) if family == "vqllm" else RATES.get(family, f"{family} 2")
    compressor = fitted(published(vqllm, sink_tokens, subject.seed, {family: arguments})[label], subject)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    bits = total_bits(row, subject.about, exact_tokens(compressor))[f"bits_{context}_x1"]
    words = ", ".join(f"{name} {value}" for name, value in arguments.items())
    about = {"model": subject.name, "family": family, "settings": words, "arguments": repr(arguments)}
    about |= {name: row[name] for name in ("bits_per_value", "side_bytes", "kl_mean", "kl_floor")}
    return [about | {f"bits_{context}_x1": bits, "equivalent_bits": equivalent_bits(bits, row["kl_mean"])}]


def chosen_settings(table: pd.DataFrame) -> dict[str, dict]:
    """Family -> the arguments that were chosen for it, as ``frontier`` takes them."""
    kept = table[table["chosen"]].drop_duplicates("family")
    return {family: ast.literal_eval(each) for family, each in zip(kept["family"], kept["arguments"], strict=True)}
