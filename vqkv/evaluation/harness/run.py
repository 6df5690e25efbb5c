"""Model + compressor + tasks -> rows of a table."""

import os

from lm_eval import simple_evaluate

from vqkv.errors import DataError
from vqkv.evaluation.harness.model import Tally, VqkvLM
from vqkv.evaluation.harness.quiet import quiet
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
    seed: int = 1234,
    metadata: dict | None = None,
    **arguments,
) -> list[dict]:
    """Run leaderboard tasks on ``model`` reading a compressed cache (see ``VqkvLM`` for the arguments).

    ``tasks``: names of ``SUITES``, of tasks or groups of lm_eval, or ``Entry``s. ``num_fewshot`` overrides the shots of
    a suite; ``limit``: only the first documents of each task. ``metadata``: for tasks that make their own data
    (``max_seq_lengths`` of RULER's). Nothing is printed; the same arguments give the same rows.

    One row a metric: task, metric, filter, value, stderr (NaN where there is no formula), n (documents), num_fewshot,
    protocol, and the caches' bits_per_value, ratio, side_bytes and packed_share (see ``Tally``). Raises
    ``UnknownNameError`` for a task that does not exist and ``DataError`` for one whose data cannot be reached.
    """
    wanted = entries(tasks)
    for name, count, least in (("limit", limit, 1), ("num_fewshot", num_fewshot, 0)):
        if count is not None:
            check_whole(name, count, least, MOST)
    if isinstance(model, str):
        model, tokenizer = load_model(model)
    lm = VqkvLM(model, compressor, protocol, chunk_size, tokenizer=tokenizer, **arguments)
    metadata = {"tokenizer": lm.tokenizer.name_or_path} | (metadata or {})
    rows = []
    for entry in wanted:
        lm.tally = Tally()
        found = _evaluate(lm, entry, num_fewshot, limit, seed, metadata)
        rows += [row | {"protocol": protocol, **lm.tally.as_dict()} for row in _rows(found, entry)]
    return rows


def _evaluate(lm: VqkvLM, entry: Entry, num_fewshot: int | None, limit: int | None, seed: int, metadata: dict) -> dict:
    """lm_eval's results of one entry. Raises ``DataError`` if its data cannot be had."""
    tasks, shots = manager(entry.task, metadata), entry.num_fewshot if num_fewshot is None else num_fewshot
    names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    how = {"limit": limit, "bootstrap_iters": BOOTSTRAP_ITERS, "log_samples": False} | dict.fromkeys(names, seed)
    try:
        with quiet():
            return simple_evaluate(lm, tasks=[entry.task], num_fewshot=shots, task_manager=tasks, **how)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) or type(error).__name__ in UNREACHABLE:
            path = (tasks.task_index[entry.task].cfg or {}).get("dataset_path") or "its data set"
            raise DataError(
                f"task {entry.task!r}: {path} cannot be reached ({type(error).__name__}: {str(error)[:200]}). On a "
                f"machine with network access: `hf download {path} --repo-type dataset --local-dir {path}`; then run "
                f"in the folder that holds {path}{os.sep}, here {os.getcwd()!r}"
            ) from error
        raise


def _rows(found: dict, entry: Entry) -> list[dict]:
    """One row a metric: of the entry itself, or of each task of a tag, which has no result of its own."""
    results = found["results"]
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
