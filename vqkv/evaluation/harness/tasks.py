"""Tasks that the published results rest on, with their shots and metrics, under the names of lm_eval 0.4.13."""

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lm_eval.tasks import TaskManager

from vqkv.errors import UnknownNameError

LOCAL_FOLDER = Path(__file__).parent / "local"


@dataclass(frozen=True)
class Entry:
    """A task, or a group of tasks, of lm_eval. ``num_fewshot``: None leaves the task's own. ``metrics``: the ones that
    are reported, as lm_eval calls them (``metric,filter``), the published one first; empty for all."""

    task: str
    num_fewshot: int | None = None
    metrics: tuple[str, ...] = ()


LONGBENCH = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en",
)  # fmt: skip
NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
DISTANCES = (16, 64, 256)

SUITES = {
    # Open LLM Leaderboard v1, which residual VQ's paper reports. Its GSM8K number was the strict match of "#### 42".
    "old-leaderboard": (
        Entry("arc_challenge", 25, ("acc_norm,none", "acc,none")),
        Entry("hellaswag", 10, ("acc_norm,none", "acc,none")),
        Entry("mmlu", 5, ("acc,none",)),
        Entry("truthfulqa_mc2", 0, ("acc,none",)),  # its acc is MC2: the share of probability on true answers
        Entry("winogrande", 5, ("acc,none",)),
        Entry("gsm8k", 5, ("exact_match,strict-match", "exact_match,flexible-extract")),
    ),
    # The 14 English tasks that AQUA-KV averages over, each with LongBench's own metric.
    "longbench": tuple(Entry(f"longbench_{name}", 0, ("score,none",)) for name in LONGBENCH),
    "ruler": tuple(Entry(f"niah_{name}") for name in NEEDLES),
    "wikitext": (Entry("wikitext", None, ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none")),),
    # This package's own: offline, small enough for the bundled models.
    "local": tuple(Entry(f"vqkv_recall_{distance}", 0, ("acc,none",)) for distance in DISTANCES),
}


def entries(tasks) -> list[Entry]:
    """``tasks``: suites, tasks or groups of lm_eval, or ``Entry``s. Raises ``UnknownNameError`` for any other."""
    found: list[Entry] = []
    for task in [tasks] if isinstance(tasks, (str, Entry)) else tasks:
        found += [task] if isinstance(task, Entry) else SUITES.get(task, [Entry(task)])
    for entry in found:
        if entry.task not in _local_names() and entry.task not in known_names():
            close = difflib.get_close_matches(entry.task, known_names(), n=5)
            raise UnknownNameError("task", entry.task, [*SUITES, *close])
    return found


def manager(task: str, metadata: dict) -> TaskManager:
    """The manager that finds ``task``; ``metadata`` (plain values) goes to tasks that make their own data."""
    found = _manager(task not in _local_names(), "{}")
    if "custom_dataset" not in (found.task_index[task].cfg or {"custom_dataset": None}):
        return found
    return _manager(task not in _local_names(), json.dumps(metadata, sort_keys=True))


def known_names() -> list[str]:
    """Every task, group and tag of lm_eval and of this package."""
    return _manager(True, "{}").all_tasks


def _local_names() -> list[str]:
    return _manager(False, "{}").all_tasks


@cache
def _manager(include_defaults: bool, metadata: str) -> TaskManager:
    """Reading the names of lm_eval's own 14,000 tasks takes some seconds."""
    return TaskManager(include_path=str(LOCAL_FOLDER), include_defaults=include_defaults, metadata=json.loads(metadata))
