"""Notebook 11: every system and the unpublished crosses, on one harness, and the search among the latter."""

import itertools
import math
import statistics
from collections.abc import Sequence

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import UnknownNameError
from vqkv.study.experiments.common import (
    bits_with_side,
    by_window,
    explained_by_layer,
    facts_answered,
    tokens_kept_exact,
)
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
    """``designs`` (by default all of ``designs.factorial``) at all nominal ``bits``, scored on the validation split, on
    which no table reports: a row per design and bits.

    ``equivalent_bits_CONTEXT``, for each of ``contexts`` (of ``CONTEXTS``): stored bits of a value at so many tokens,
    side information included, plus log2(KL) / 2: the bits when every bit makes the KL four times smaller, as at high
    rates it does; lower is better.
    """
    compressor = fitted(presets.crossed(**factorial()[design], bits=bits, seed=subject.seed, **learning), subject)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    totals = total_bits(row, subject.about, tokens_kept_exact(compressor))
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
    return [
        {"subject": each, "system": label, "bits": rate} for each in subject.each(seed=seeds) for label, rate in listed
    ]


@experiment(_cases)
def frontier(
    subject: Subject, system: str, bits: float, facts: dict[str, int], chunk_size: int, vqllm: dict[str, list[int]],
    learning: dict, tuned: dict[str, dict] | None = None,
) -> list[dict]:  # fmt: skip
    """Measure published ``systems`` (by default all) and ``designs`` at all ``bits``: a row per seed and system,
    ``chunked``.

    Only ``sink_tokens`` stay exact. ``bits_CONTEXT_x1``: with side information and sinks, of so many tokens.
    ``kl_each``: a number for each window, the same for all systems. ``facts``: of ``facts_answered``, {} for none.
    ``evr``: mean of what is stored of one window. ``learning``: of designs; ``tuned``: what ``tuning`` chose.
    """
    compressor = fitted_system(subject, system, bits, vqllm, learning, tuned)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    row |= facts_answered(subject, compressor, **facts) if facts else {}
    row |= total_bits(row, subject.about, tokens_kept_exact(compressor))
    one = None if compressor.joint else explained_by_layer(subject, compressor, subject.test[:1])
    row["evr"] = statistics.mean(one.values()) if one else math.nan
    return [{"model": subject.name, "seed": subject.seed, "system": system, "nominal_bits": bits} | row]


def fitted_system(
    subject: Subject, system: str, bits: float, vqllm: dict, learning: dict, tuned: dict | None = None
) -> Compressor:
    """A published system or a design, fitted."""
    if system in vqllm:
        return _residual(subject, system, vqllm, learning["sink_tokens"], tuned or {})
    preset = published(vqllm, learning["sink_tokens"], subject.seed, tuned).get(system)
    return fitted(preset or presets.crossed(**every()[system], bits=bits, seed=subject.seed, **learning), subject)


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
