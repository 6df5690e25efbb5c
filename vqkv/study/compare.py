"""``vqkv compare MODEL``: which cache for this model? A table, and the notebook and the HTML page that show it."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from vqkv import presets
from vqkv.calibration.effort import passes, seconds_per_token
from vqkv.data.corpus import load_corpus
from vqkv.errors import DataError, FormatError
from vqkv.evaluation.recommend import compared
from vqkv.models.layers import max_positions
from vqkv.models.load import describe, kv_width, load_model
from vqkv.study.bench.caches import REFERENCE, Uncompressed
from vqkv.study.bench.generation import Generation, timed_run
from vqkv.study.experiments.common import bits_with_side, by_window, exact_tokens, facts_answered
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment
from vqkv.study.tables import write_atomically

TEMPLATE = Path(__file__).parent / "templates/compare.ipynb"
FACTS, QUESTION = 4, 40  # in each text, and tokens that a question takes
READING = 3  # passes over what is scored: exact, compressed, and what reading packed tokens adds
WIDEST = 12_000  # channels of all layers whose covariance KVTC can be fitted with in memory
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
SIZES = [  # the largest that fits the minutes: (sequences, tokens) to calibrate on and to score, texts, their tokens
    ((16, 2048), (16, 2048), 25, (640, 2048)),
    ((16, 1024), (8, 1024), 15, (512, 1024)),
    ((8, 512), (8, 512), 10, (384, 512)),
    ((4, 256), (4, 256), 5, (384, 448)),
]
SHOWN = ["system", "bits", "bits_with_side", "kl", "kl_low", "kl_high", "facts_short", "facts_short_exact"]
SHOWN += ["facts_long", "facts_long_exact", "resident_mb", "resident_mb_exact", "ms", "ms_exact"]


@dataclass(frozen=True)
class Plan:
    """Sizes of texts, seconds that each system is expected to take, and why others are left out."""

    train: tuple[int, int]
    test: tuple[int, int]
    num_texts: int
    text_lens: tuple[int, int]
    seconds: dict[str, float]
    left_out: dict[str, str]

    def __str__(self):
        (n, length), (m, scored) = self.train, self.test
        return (
            f"{'; '.join(self.seconds)}: each calibrated on {n} x {length:,} tokens and measured on "
            f"{m} x {scored:,}, and asked {self.num_texts} x {FACTS} facts in {self.text_lens[0]:,} and in "
            f"{self.text_lens[1]:,} tokens: about {sum(self.seconds.values()) / 60:.1f} minutes"
        )


def compare(
    model: str,
    text: str = "prose",
    minutes: float = 15,
    context: int = 8192,
    dtype: str = "",
    device: str = "cpu",
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Measure ``SYSTEMS`` on ``model`` with ``text``, as much as fits into the minutes.

    Writes ``compare.csv``, ``compare.ipynb`` and ``compare.html`` into the folder ``out`` (by default ``compare-`` and
    the model's name). Rows that an interrupted call has finished are kept there. ``recommend`` uses the table.
    Raises ``DataError`` for too few minutes, and for a model or a text that is too small.
    """
    folder = Path(out or f"compare-{Path(model).name}")
    loaded, tokenizer = load_model(model, dtype or None, device)
    plan = planned(loaded, minutes, [size for size in SIZES if _holds(text, tokenizer, size)])
    say(f"{model}: {plan}")
    for system, reason in plan.left_out.items():
        say(f"left out: {system} ({reason})")
    del loaded, tokenizer
    subject = Subject(model, text, list(plan.train), list(plan.test), dtype=dtype, device=device)
    asked: dict[str, Any] = {"context": context, "step_size": max(16, plan.test[1] // 16), "num_facts": FACTS}
    asked |= {"text_lens": list(plan.text_lens), "num_texts": plan.num_texts, "subject": subject}
    about = {"model": model, "text": text, "plan": str(plan)}
    began, left_out = time.monotonic(), dict(plan.left_out)
    tables: list[pd.DataFrame] = []
    for system, seconds in plan.seconds.items():
        try:
            if tables and time.monotonic() - began + seconds > 1.5 * 60 * minutes:
                raise DataError("the minutes were over")
            tables.append(comparison.run(asked | {"systems": [system]}, folder / "rows"))
        except (DataError, FormatError) as error:
            left_out[system] = str(error).split(" (in comparison")[0]
            say(f"left out: {system} ({left_out[system]})")
        if tables:
            table = pd.concat(tables, ignore_index=True)
            write_atomically(folder / "compare.csv", table.to_csv(index=False).encode())
            write_atomically(folder / "compare.json", json.dumps(about | {"left_out": left_out}, indent=1).encode())
    if not tables:
        raise DataError(f"none of the presets can be calibrated on {model}: {'; '.join(left_out.values())}")
    compared(model).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(compared(model), table.to_csv(index=False).encode())
    show(folder)
    return table


def _holds(text: str, tokenizer, size: tuple) -> bool:
    """Tell whether a text is long enough for a size. Raises ``DataError`` where it is too short for the smallest."""
    (n, length), (m, scored), num_texts, text_lens = size
    try:
        for split, seq_len, num_seqs in (("train", length, n), ("test", scored, m), ("test", text_lens[1], num_texts)):
            load_corpus(text, tokenizer, split, seq_len, num_seqs)
    except DataError:
        if size is SIZES[-1]:
            raise
        return False
    return True


def planned(model, minutes: float, sizes: list[tuple]) -> Plan:
    """Choose the largest of ``sizes`` that fits by a first pass' time, or fewer systems, or raise ``DataError``."""
    longest, about = max_positions(model), describe(model)
    channels, left_out = kv_width(about) * about["num_layers"], {}
    if channels > WIDEST:
        left_out["KVTC 2"] = f"a covariance of {channels:,} channels takes {8 * channels**2 / 1e9:.0f} GB"
    pace = seconds_per_token(model)
    fitting = [size for size in sizes if max(size[0][1], size[1][1], size[3][1] + QUESTION * FACTS) <= longest]
    if not fitting:
        raise DataError(f"the model has {longest} positions: {SIZES[-1][3][1] + QUESTION * FACTS} or more are needed")
    for size in fitting:
        seconds = {system: pace * _tokens(system, size, channels) for system in SYSTEMS if system not in left_out}
        if sum(seconds.values()) <= 60 * minutes:
            return Plan(size[0], size[1], size[2], size[3], seconds, left_out)
    enough = math.ceil(sum(seconds.values()) / 60)
    for system in reversed([*seconds]):
        left_out[system] = f"about {seconds.pop(system) / 60:.1f} minutes; --minutes {enough} is enough for all"
        if seconds and sum(seconds.values()) <= 60 * minutes:
            return Plan(size[0], size[1], size[2], size[3], seconds, left_out)
    fewest = pace * _tokens("int4", size, channels) / 60
    raise DataError(f"{minutes:g} minutes are too few for anything: int4 alone takes {fewest:.1f}")


def _tokens(system: str, size: tuple, channels: int) -> float:
    """Return tokens through the model that take as long as a system."""
    (n, length), (m, scored), texts, lens = size
    read = READING * (m * scored + texts * (sum(lens) + 2 * QUESTION * FACTS)) + 2 * lens[1] + 40 * STEPS
    return passes(SYSTEMS[system][0]) * n * length + read + (channels / 1000) ** 3 * (system == "KVTC 2")


def show(folder: Path) -> None:
    """Run the notebook of the table in ``folder``, and render it as a page."""
    import papermill
    from nbconvert import HTMLExporter

    notebook = folder / "compare.ipynb"
    papermill.execute_notebook(
        str(TEMPLATE),
        str(notebook),
        {"folder": str(folder.resolve())},
        kernel_name="python3",
        progress_bar=False,
        cwd=str(folder),  # not the user's, where a clone's folder would hide the package
        extra_arguments=["--log-level=ERROR"],
    )
    page = HTMLExporter(exclude_input=True).from_filename(str(notebook))[0]
    write_atomically(folder / "compare.html", page.encode())


@experiment(cases=lambda systems: [{"system": system} for system in systems])
def comparison(
    subject: Subject, system: str, context: int, step_size: int, num_facts: int, text_lens: list[int], num_texts: int
) -> dict:
    """Return a row for each way to store the model's cache.

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
    row["bits_with_side"] = bits_with_side(measured, subject.about, context, exact_tokens(compressor))
    row |= {"side_mb": measured["side_bytes"] / 1e6, "kl": measured["kl_mean"]}
    row |= {name: measured[name] for name in ("kl_low", "kl_high", "kl_floor", "ppl", "ppl_exact")}
    for label, text_len in zip(("short", "long"), text_lens, strict=True):
        answers = facts_answered(subject, compressor, num_facts, text_len, num_texts)
        row |= {name.replace("facts", f"facts_{label}", 1): share for name, share in answers.items()}
    return row | _generated(subject, compressor, text_lens[1])


def _generated(subject: Subject, compressor, text_len: int) -> dict:
    """Time of a token, read in place where that can be, and memory after a text, next to an uncompressed cache's."""
    tokens = subject.text("test", [1, text_len], subject.seed).to(subject.model.device)
    own, exact = (Generation(subject.model, system) for system in (compressor, Uncompressed()))
    attention = subject.model.config._attn_implementation
    subject.model.set_attn_implementation("vqkv_packed" if attention == "sdpa" else attention)
    try:
        ms, ms_exact = (row["decode_ms"] for row in timed_run({"": own, REFERENCE: exact}, tokens, STEPS, rounds=1))
    finally:  # the next system's losses are not measured in place
        subject.model.set_attn_implementation(attention)
    report = own.cache.report()
    memory = {"resident_mb": report.resident_bytes / 1e6, "resident_mb_exact": 2 * report.dynamic_values / 1e6}
    return {"ms": ms, "ms_exact": ms_exact} | memory
