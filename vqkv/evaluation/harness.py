"""Leaderboard tasks through lm-evaluation-harness: ``run_tasks`` from Python, ``vqkv evaluate -t`` on the command line.

lm_eval's own command line with a compressed cache: ``python -m vqkv.evaluation.harness --model vqkv --model_args
pretrained=MODEL,compressor=FOLDER --tasks wikitext``.
"""

import difflib
import sys
from contextlib import redirect_stdout
from functools import cache

import torch
from torch import Tensor

from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import Report, total
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.questions import recall_questions
from vqkv.models.layers import evaluating
from vqkv.models.load import load_model

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


@register_model("vqkv")
class CompressedLM(HFLM):
    """lm_eval's ``HFLM`` on a model that reads a compressed cache, one text at a time, unpadded: what a text's cache
    holds does not depend on the other texts. ``run_tasks`` has the arguments; others are HFLM's. Names of a model and
    of a compressor, which lm_eval's command line has, are loaded.

    ``reports``: the byte meter's, of each cache that was filled. ``read`` tokens, ``read_packed`` of them with packed
    ones before them: where these are few, a task says little about a codec.
    """

    def __init__(
        self, pretrained, tokenizer=None, compressor=None, protocol: str = "chunked", chunk_size: int = 32,
        device: str | None = None, dtype: str | None = None, batch_size: int | str = 1, **of_hflm,
    ):  # fmt: skip
        if protocol not in PROTOCOLS:
            raise UnknownNameError("protocol", protocol, PROTOCOLS)
        if isinstance(pretrained, str):
            device = device if device and torch.cuda.is_available() else "cpu"  # lm_eval says cuda:0 without a GPU
            pretrained, tokenizer = load_model(pretrained, dtype, device)
        super().__init__(evaluating(pretrained), backend="causal", tokenizer=tokenizer, batch_size=1, **of_hflm)
        self.compressor = Compressor.from_pretrained(compressor) if isinstance(compressor, str) else compressor
        self.in_place, self.chunk_size = protocol == "in_place", chunk_size
        self.reports: list[Report] = []
        self.read = self.read_packed = 0
        if self.compressor is not None:
            self._new_cache()  # refuses a compressor of another model

    def measured(self) -> dict:
        """Return columns of a table, if the cache is compressed."""
        if self.compressor is None:
            return {}
        report = total(self.reports)
        columns = {name: getattr(report, name) for name in ("bits_per_value", "ratio", "side_bytes")}
        return columns | {"packed_share": self.read_packed / self.read}

    @torch.no_grad()
    def _model_call(self, inps: Tensor, *args, **kwargs) -> Tensor:
        """Compute logits (1, tokens, vocabulary) of a text (1, tokens)."""
        if self.compressor is None:
            return super()._model_call(inps, *args, **kwargs)
        cache, logits = self._new_cache(), []
        for piece in inps.split(inps.shape[1] if self.in_place else self.chunk_size, dim=1):
            self._count(piece.shape[1], cache)
            logits.append(self.model(piece, past_key_values=cache, use_cache=True).logits)
        self.reports.append(cache.report())
        return torch.cat(logits, dim=1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments) -> Tensor:
        if self.compressor is None:
            return super()._model_generate(context, max_length, stop, **arguments)
        cache, pieces = self._new_cache(), None if self.in_place else self.chunk_size
        arguments |= {"past_key_values": cache, "prefill_chunk_size": pieces}
        out = super()._model_generate(context, max_length, stop, **arguments)
        self.reports.append(cache.report())
        self._count(out.shape[1] - context.shape[1], cache)
        return out

    def _new_cache(self):
        return self.compressor.new_cache(self.model, in_place=self.in_place)

    def _count(self, tokens: int, cache) -> None:
        """Count tokens that are read with ``cache`` as it is."""
        self.read += tokens
        if self.in_place or cache.report().packed_values:
            self.read_packed += tokens


def run_tasks(
    model,
    tokenizer,
    compressor=None,
    tasks: str | list[str] = "local",
    limit: int | None = None,
    protocol: str = "chunked",
    chunk_size: int = 32,
    **of_hflm,
) -> list[dict]:
    """Run leaderboard tasks on ``model`` reading a compressed cache; the same arguments give the same rows.

    ``compressor``: a ``Compressor`` or a peer (``vqkv.study.peers``); None leaves the cache as it is. ``tasks``: names
    of ``SUITES``, or of tasks or groups of lm_eval. ``limit``: only the first documents of each task. ``protocol``:
    ``chunked`` (a text's tokens come ``chunk_size`` at a time and read packed history) or ``in_place`` (one pass that
    reads its own tokens packed).

    Returns a dict a task, and for a group: ``task``, what lm_eval reports ("acc,none": metric and filter), ``n``
    (documents; None for a group), ``num_fewshot``, ``protocol`` and, of compressed caches, bits_per_value, ratio,
    side_bytes and packed_share (see ``CompressedLM``). Raises ``UnknownNameError`` for a task that does not exist and
    ``DataError`` for one whose data cannot be reached.
    """
    shots: dict[str, int | None] = {}
    for name in [tasks] if isinstance(tasks, str) else tasks:
        shots |= SUITES.get(name, {name: None})
    for name in shots.keys() - LOCAL.keys():
        if name not in (names := _lm_eval_tasks(tokenizer.name_or_path).all_tasks):
            raise UnknownNameError("task", name, [*SUITES, *difflib.get_close_matches(name, names, n=5)])
    rows = []
    for name, count in shots.items():
        task = _local(name, tokenizer) if name in LOCAL else name
        manager = TaskManager(include_defaults=False) if name in LOCAL else _lm_eval_tasks(tokenizer.name_or_path)
        how = {"limit": limit, "bootstrap_iters": BOOTSTRAP_ITERS, "log_samples": False}
        how |= {"num_fewshot": count, "task_manager": manager}
        lm = CompressedLM(model, tokenizer, compressor, protocol, chunk_size, **of_hflm)
        try:
            with redirect_stdout(sys.stderr):  # where lm_eval and its tasks print
                results = simple_evaluate(lm, tasks=[task], **how)
        except OSError as error:
            raise DataError(
                f"task {name!r}: {str(error)[:200]}. On a machine with network access: `hf download DATA_SET "
                "--repo-type dataset --local-dir DATA_SET`; then run in the folder that holds it"
            ) from error
        for task, scores in results["results"].items():  # a group, or a tag, has several
            documents, shown = results["n-samples"].get(task, {}).get("effective"), results["n-shot"].get(task)
            row = {"task": task, **scores, "n": documents, "num_fewshot": shown, "protocol": protocol}
            rows.append(row | lm.measured())
    return rows


@cache
def _lm_eval_tasks(tokenizer: str) -> TaskManager:
    """List lm_eval's 14,000 tasks, whose names take ten seconds to read; RULER's make their data with ``tokenizer``."""
    return TaskManager(metadata={"tokenizer": tokenizer})


def _local(name: str, tokenizer) -> dict:
    """Make a task: a list of keys and values, then a key again: which of four values of the list is its own?"""
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


if __name__ == "__main__":
    cli_evaluate()
