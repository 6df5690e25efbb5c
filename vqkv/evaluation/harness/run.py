"""Model + compressor + tasks -> rows of a table."""

import os
import random

import numpy as np
import torch
from lm_eval import evaluate

from vqkv.errors import DataError
from vqkv.evaluation.harness.model import VqkvLM
from vqkv.evaluation.harness.quiet import quiet
from vqkv.evaluation.harness.reader import Tally
from vqkv.evaluation.harness.tasks import Entry, entries, manager
from vqkv.models.load import load_model
from vqkv.runtime.checks import check_whole

BOOTSTRAP_ITERS = 100  # only a few metrics of text are bootstrapped; accuracies have a formula
MOST = 10**9
UNREACHABLE = ("ConnectionError", "OfflineModeIsEnabled", "DatasetNotFoundError", "LocalEntryNotFoundError")


def run_tasks(
    model,
    tokenizer=None,
    compressor=None,
    tasks="local",
    num_fewshot: int | None = None,
    limit: int | None = None,
    protocol: str = "chunked",
    chunk_size: int = 32,
    batch_size: int | str = 8,
    seed: int = 1234,
    metadata: dict | None = None,
    **arguments,
) -> list[dict]:
    """Run leaderboard tasks on ``model`` reading a compressed cache (see ``VqkvLM`` for the arguments).

    ``tasks``: names of ``SUITES``, of tasks or groups of lm_eval, or ``Entry``s. ``num_fewshot`` overrides the shots of
    a suite; ``limit``: only the first documents of each task. ``metadata``: for tasks that make their own data
    (``max_seq_lengths`` of RULER's). Nothing is printed; the same arguments give the same rows.

    One row a metric: task, metric, filter, value, stderr (NaN where there is no formula), n (documents), num_fewshot,
    protocol, and the caches' bits_per_value, ratio, side_bytes, packed_share and truncated (see ``Tally``). In a run of
    several processes only the first has rows, and its bytes are those of its own share of the documents. Raises
    ``UnknownNameError`` for a task that does not exist and ``DataError`` for one whose data cannot be reached.
    """
    wanted = entries(tasks)
    for name, count, least in (("limit", limit, 1), ("num_fewshot", num_fewshot, 0)):
        if count is not None:
            check_whole(name, count, least, MOST)
    if isinstance(model, str):
        model, tokenizer = load_model(model)
    lm = VqkvLM(model, compressor, protocol, chunk_size, batch_size, tokenizer=tokenizer, **arguments)
    metadata = {"tokenizer": lm.tokenizer.name_or_path} | (metadata or {})
    rows = []
    for entry in wanted:
        lm.reader.tally = Tally()
        found = _evaluate(lm, entry, num_fewshot, limit, seed, metadata)
        shared = {"protocol": protocol, **lm.tally.as_dict()}
        rows += [row | shared for row in _rows(found, entry)]
    return rows


def _evaluate(lm: VqkvLM, entry: Entry, num_fewshot: int | None, limit: int | None, seed: int, metadata: dict) -> dict:
    """lm_eval's results of one entry, as of ``simple_evaluate``; empty in all processes but the first."""
    for begin in (random.seed, np.random.seed, torch.manual_seed):
        begin(seed)
    with quiet():
        found = _load(entry.task, metadata)
        for task in found["tasks"].values():
            shots, own = entry.num_fewshot if num_fewshot is None else num_fewshot, task.get_config("num_fewshot")
            if own != 0:  # a task that says 0 means it: its examples, if any, are in its prompt
                task.set_config("num_fewshot", (own or 0) if shots is None else shots)
            task.set_fewshot_seed(seed)
        results = evaluate(lm, found, limit=limit, bootstrap_iters=BOOTSTRAP_ITERS, log_samples=False)
    return results or {}


def _load(name: str, metadata: dict) -> dict:
    """A task, or a group's or tag's tasks, with their data. Raises ``DataError`` if these cannot be had."""
    tasks = manager(name, metadata)
    try:
        return tasks.load([name])
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) or type(error).__name__ in UNREACHABLE:
            raise DataError(_unreachable(name, tasks.task_index[name].cfg or {}, error)) from error
        raise


def _unreachable(task: str, config: dict, error: Exception) -> str:
    """Remedy for a data set that cannot be had."""
    path = config.get("dataset_path") or "its data set"
    return (
        f"task {task!r}: {path} cannot be reached ({type(error).__name__}: {str(error)[:200]}). On a machine with "
        f"network access: `hf download {path} --repo-type dataset --local-dir {path}`; then run in the folder "
        f"that holds {path}{os.sep}, here {os.getcwd()!r}"
    )


def _rows(found: dict, entry: Entry) -> list[dict]:
    """One row a metric: of the entry itself, or of each task of a tag, which has no result of its own."""
    results = found.get("results", {})
    rows = []
    for task in [entry.task] if entry.task in results else results:
        leaves = _leaves(found, task)
        values = {name: value for name, value in results[task].items() if "," in name and "_stderr," not in name}
        for name in entry.metrics or values:
            metric, filtered = name.split(",", 1)
            stderr = results[task].get(f"{metric}_stderr,{filtered}")
            stderr = float("nan") if stderr in (None, "N/A") else float(stderr)
            row = {"task": task, "metric": metric, "filter": filtered, "value": float(values[name]), "stderr": stderr}
            row["n"] = sum(found["n-samples"].get(leaf, {}).get("effective", 0) for leaf in leaves)
            rows.append(row | {"num_fewshot": found["n-shot"].get(leaves[0], 0)})
    return rows


def _leaves(found: dict, task: str) -> list[str]:
    """The tasks of a group; a task is its own."""
    members = found.get("group_subtasks", {}).get(task) or []
    return [leaf for member in members for leaf in _leaves(found, member)] or [task]
