"""Leaderboard tasks through lm-evaluation-harness: ``run_tasks`` from Python, ``vqkv tasks`` on the command line.

lm_eval's own command line with a compressed cache: ``python -m vqkv.evaluation.harness --model vqkv --model_args
pretrained=MODEL,compressor=FOLDER --tasks wikitext``.
"""

import difflib
import json
import math
import sys
from contextlib import redirect_stdout
from functools import cache

import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.cache.compressor import Compressor
from vqkv.cache.generating import compressed
from vqkv.cache.meter import Report, tensor_bytes, total
from vqkv.data.recall import recall_questions
from vqkv.errors import DataError, UnknownNameError
from vqkv.models.load import load_model
from vqkv.models.plain import evaluating

try:
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ImportError("tasks need lm-evaluation-harness: pip install 'vqkv[peers]'") from error

PROTOCOLS = ("in_place", "chunked")
BOOTSTRAP_ITERS = 100  # only a few metrics of text are bootstrapped; accuracies have a formula
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


LONGBENCH = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en",
)  # fmt: skip
NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
LOCAL = {f"vqkv_recall_{distance}": (distance, num_docs) for distance, num_docs in ((16, 200), (64, 200), (256, 100))}
SUITES: dict[str, dict[str, int | None]] = {  # tasks, or groups of them, of lm_eval 0.4.13 -> shots; None: its own
    # Open LLM Leaderboard v1, which residual VQ's paper reports: acc_norm of the first two, GSM8K's strict match.
    "old-leaderboard": {
        "arc_challenge": 25, "hellaswag": 10, "mmlu": 5, "truthfulqa_mc2": 0, "winogrande": 5, "gsm8k": 5,
    },
    "longbench": {f"longbench_{name}": 0 for name in LONGBENCH},  # AQUA-KV's mean is that of these 14 scores
    "ruler": {f"niah_{name}": None for name in NEEDLES},
    "wikitext": {"wikitext": None},
    "local": dict.fromkeys(LOCAL, 0),  # offline, small enough for the bundled models
}  # fmt: skip


class CompressedLM(HFLM):
    """lm_eval's ``HFLM`` on a model that reads a compressed cache, one text at a time, unpadded: what a text's cache
    holds does not depend on its company. ``run_tasks`` has the arguments; others are HFLM's.

    ``reports``: the byte meter's, of each cache that was filled. ``read`` tokens, ``read_packed`` of them with packed
    ones behind them: where these are few, a task says little about a codec.
    """

    def __init__(self, model, tokenizer, compressor=None, protocol="chunked", chunk_size=32, **of_hflm):
        if protocol not in PROTOCOLS:
            raise UnknownNameError("protocol", protocol, PROTOCOLS)
        super().__init__(evaluating(model), backend="causal", tokenizer=tokenizer, batch_size=1, **of_hflm)
        self.compressor, self.in_place, self.chunk_size = compressor, protocol == "in_place", chunk_size
        self.reports = []
        self.read = self.read_packed = 0
        self._new_cache()  # refuses a compressor of another model

    def measured(self) -> dict:
        """Columns of a table; of an uncompressed cache ``bits_per_value`` is that of all values."""
        whole = total(self.reports)
        columns = {name: getattr(whole, name) for name in ("bits_per_value", "ratio", "side_bytes")}
        return columns | {"packed_share": self.read_packed / self.read if self.read else math.nan}

    @torch.no_grad()
    def _model_call(self, inps: Tensor, *_, **__) -> Tensor:
        """Logits (1, tokens, vocabulary) of a text (1, tokens)."""
        cache, logits = self._new_cache(), []
        for piece in inps.split(inps.shape[1] if self.in_place else self.chunk_size, dim=1):
            self._count(piece.shape[1], cache)
            logits.append(self.model(piece, past_key_values=cache, use_cache=True).logits)
        self.reports.append(report(cache))
        return torch.cat(logits, dim=1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments) -> Tensor:
        cache = self._new_cache()
        arguments |= {"past_key_values": cache, "prefill_chunk_size": None if self.in_place else self.chunk_size}
        out = super()._model_generate(context, max_length, stop, **arguments)
        self.reports.append(report(cache))
        self._count(out.shape[1] - context.shape[1], cache)
        return out

    def _new_cache(self):
        if self.compressor is None:
            return DynamicCache(config=self.model.config)
        return self.compressor.new_cache(self.model, in_place=self.in_place)

    def _count(self, tokens: int, cache) -> None:
        """Count tokens that are read with ``cache`` as it is."""
        self.read += tokens
        if self.compressor is not None and (self.in_place or report(cache).packed_values):
            self.read_packed += tokens


@register_model("vqkv")
class CompressedHF(HFLM):
    """lm_eval's ``HFLM`` as it is, whose model makes compressed caches and reads its own tokens from them."""

    def __init__(
        self, pretrained: str, compressor: str, device: str | None = None, dtype: str | None = None, **of_hflm
    ):
        device = (device or "cpu") if torch.cuda.is_available() else "cpu"  # lm_eval says cuda:0 where there is none
        model, tokenizer = load_model(pretrained, dtype, device)
        super().__init__(evaluating(model), backend="causal", tokenizer=tokenizer, **of_hflm)
        self._compressing = compressed(self.model, Compressor.from_pretrained(compressor), in_place=True)
        self._compressing.__enter__()  # until the process ends


def report(cache) -> Report:
    """The byte meter's report of a cache; transformers' uncompressed one holds each value as it is."""
    if hasattr(cache, "report"):
        return cache.report()
    held = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    size, count = tensor_bytes(held), sum(x.numel() for x in held)
    return Report({"exact": size}, size, count, count, cache.get_seq_length(), 1, 0, count)


def run_tasks(
    model,
    tokenizer,
    compressor=None,
    tasks: str | list[str] = "local",
    num_fewshot: int | None = None,
    limit: int | None = None,
    protocol: str = "chunked",
    chunk_size: int = 32,
    seed: int = 1234,
    metadata: dict | None = None,
    **of_hflm,
) -> list[dict]:
    """Run leaderboard tasks on ``model`` reading a compressed cache; the same arguments give the same rows.

    ``compressor``: a ``Compressor`` or a peer (``vqkv.study.peers``); None leaves the cache as it is. ``tasks``: names
    of ``SUITES``, or of tasks or groups of lm_eval. ``num_fewshot`` overrides the shots of a suite; ``limit``: only the
    first documents of each task. ``protocol``: ``chunked`` (a text's tokens come ``chunk_size`` at a time and read
    packed history) or ``in_place`` (one pass that reads its own tokens packed). ``metadata``: for tasks that make their
    own data (``max_seq_lengths`` of RULER's).

    One row a metric: task, metric, filter, value, stderr (NaN where there is no formula), n (documents), num_fewshot,
    protocol, and the caches' bits_per_value, ratio, side_bytes and packed_share (see ``CompressedLM``). Raises
    ``UnknownNameError`` for a task that does not exist and ``DataError`` for one whose data cannot be reached.
    """
    rows, about = [], json.dumps({"tokenizer": tokenizer.name_or_path} | (metadata or {}), sort_keys=True)
    for name, shots in _spelt_out(tasks, about).items():
        task, known = (
            (_local(name, tokenizer), TaskManager(include_defaults=False))
            if name in LOCAL
            else (name, _lm_eval_tasks(about))
        )
        how = {"limit": limit, "bootstrap_iters": BOOTSTRAP_ITERS, "log_samples": False} | dict.fromkeys(SEEDS, seed)
        how |= {"num_fewshot": shots if num_fewshot is None else num_fewshot, "task_manager": known}
        lm = CompressedLM(model, tokenizer, compressor, protocol, chunk_size, **of_hflm)
        try:
            with redirect_stdout(sys.stderr):  # where lm_eval and its tasks print
                found = simple_evaluate(lm, tasks=[task], **how)
        except OSError as error:
            raise DataError(
                f"task {name!r}: {str(error)[:200]}. On a machine with network access: `hf download DATA_SET "
                "--repo-type dataset --local-dir DATA_SET`; then run in the folder that holds it"
            ) from error
        rows += [row | {"protocol": protocol, **lm.measured()} for row in _rows(found, name)]
    return rows


def _spelt_out(tasks: str | list[str], metadata: str) -> dict[str, int | None]:
    """Tasks and their shots. Raises ``UnknownNameError`` for one that does not exist."""
    found: dict[str, int | None] = {}
    for task in [tasks] if isinstance(tasks, str) else tasks:
        found |= SUITES.get(task, {task: None})
    for task in found.keys() - LOCAL.keys():
        if task not in (known := _lm_eval_tasks(metadata).all_tasks):
            raise UnknownNameError("task", task, [*SUITES, *difflib.get_close_matches(task, known, n=5)])
    return found


@cache
def _lm_eval_tasks(metadata: str) -> TaskManager:
    """lm_eval's 14,000 tasks, whose names take ten seconds to read; ``metadata``: JSON."""
    return TaskManager(metadata=json.loads(metadata))


def _local(name: str, tokenizer) -> dict:
    """A list of keys and values, then a key again: which of four values of the list is its own?"""
    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(recall_questions(tokenizer, *LOCAL[name]))},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
        "num_fewshot": 0,
    }


def _rows(found: dict, name: str) -> list[dict]:
    """One row a metric: of the task or group itself, or of each task of a tag, which has no result of its own."""
    rows, results, counts = [], found["results"], found["n-samples"]
    for task in [name] if name in results else results:
        members = [task] if task in counts else [*counts]  # a group counts the documents of all its tasks
        about = {"n": sum(counts[each]["effective"] for each in members), "num_fewshot": found["n-shot"][members[0]]}
        for key in (key for key in results[task] if "," in key and "_stderr," not in key):
            metric, chosen = key.split(",", 1)
            stderr = results[task].get(f"{metric}_stderr,{chosen}", "N/A")
            row = {"task": task, "metric": metric, "filter": chosen, "value": float(results[task][key])}
            rows.append(row | {"stderr": math.nan if stderr == "N/A" else float(stderr)} | about)
    return rows


if __name__ == "__main__":
    cli_evaluate()
