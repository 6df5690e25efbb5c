"""``vqkv compare``: some ways to store a cache, measured on one model."""

import statistics
from typing import Any

from vqkv import presets
from vqkv.models.load import kv_width
from vqkv.study.bench.caches import Uncompressed
from vqkv.study.bench.generation import Generation
from vqkv.study.experiments.common import bits_with_side, by_window, facts_answered, tokens_kept_exact
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment

# A preset without its recent window, so that all keep four tokens exact at most; and what ``recommend`` calls it.
SYSTEMS: dict[str, tuple[str, dict, str]] = {
    "int4": ("quanto", {"bits": 4}, "quanto 4"),
    "HIGGS 3": ("higgs", {"bits": 3, "recent_window": 0}, "higgs 3"),
    "live 2.25": ("live", {"bits": 2.25}, "live 2.25"),
    "AQUA-KV, HIGGS 2": ("aqua", {"backbone": "higgs", "recent_window": 0}, "aqua higgs 2"),
    "best 1.8": ("best", {"bits": 1.8}, "best-.* 1.8"),
    "KVTC 2": ("kvtc", {"bits": 2.0, "recent_window": 0}, "kvtc 2"),
}
STEPS = 16  # tokens that are timed, after as many as a long text has


@experiment(cases=lambda systems: [{"system": system} for system in systems])
def comparison(
    subject: Subject, system: str, context: int, step_size: int, num_facts: int, text_lens: list[int], num_texts: int
) -> dict:
    """A row for each way to store the model's cache.

    ``bits``: of a value, without side information; ``bits_with_side``: with it and exact tokens, in a cache of
    ``context`` tokens. ``kl``: on the second halves of the held-out text's windows, with its 95% interval.
    ``facts_short`` and ``facts_long``: share of ``num_facts`` in each of ``num_texts`` texts of ``text_lens`` tokens
    that are answered, ``_exact`` by the uncompressed cache. ``resident_mb`` and ``ms``: memory and time of a token
    after the long text, ``_exact`` of the uncompressed cache, which takes turns with this one.
    """
    name, arguments, like = SYSTEMS[system]
    if name == "best":
        arguments = arguments | {"context": context, "kv_width": kv_width(subject.about)}
    compressor = subject.calibrated(presets.make(name, **arguments), min(8, subject.train_size[0]))
    # The same tokens, whatever a block holds.
    half: dict[str, Any] = {"protocol": "snapshot", "prompt_len": subject.test_size[1] // 2}
    measured = by_window(subject, compressor, **half, step_size=step_size, reconstruction=False)
    call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    row = {"system": system, "like": like, "preset": f"presets.{name}({call})", "bits": measured["bits_per_value"]}
    row["bits_with_side"] = bits_with_side(measured, subject.about, context, tokens_kept_exact(compressor))
    row |= {"side_mb": measured["side_bytes"] / 1e6, "kl": measured["kl_mean"]}
    row |= {name: measured[name] for name in ("kl_low", "kl_high", "kl_floor", "ppl", "ppl_exact")}
    for label, text_len in zip(("short", "long"), text_lens, strict=True):
        answers = facts_answered(subject, compressor, num_facts, text_len, num_texts)
        row |= {name.replace("facts", f"facts_{label}", 1): share for name, share in answers.items()}
    return row | _generated(subject, compressor, text_lens[1])


def _generated(subject: Subject, compressor, text_len: int) -> dict:
    """Time of a token and resident memory after a text, next to those of an uncompressed cache."""
    tokens = subject.text("test", [1, text_len], subject.seed).to(subject.model.device)
    both = {"": compressor, "_exact": Uncompressed()}
    going = {suffix: Generation(subject.model, system) for suffix, system in both.items()}
    times: dict[str, list[float]] = {suffix: [] for suffix in both}
    for generation in going.values():
        generation.prefill(tokens)
        generation.step()
    for _ in range(STEPS):
        for suffix, generation in going.items():
            times[suffix].append(generation.step())
    row = {f"ms{suffix}": statistics.median(taken) for suffix, taken in times.items()}
    report = going[""].cache.report()
    uncompressed = 2 * report.dynamic_values  # in 16 bits
    return row | {"resident_mb": report.resident_bytes / 1e6, "resident_mb_exact": uncompressed / 1e6}
