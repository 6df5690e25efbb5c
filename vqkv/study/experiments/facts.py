"""Notebook 10: what is answered of what an exact cache answers, and what fine-tuning with codes gives back."""

import copy
from typing import Any

import pandas as pd
import torch

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.finetune import finetune
from vqkv.errors import DataError
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.models.load import kv_width
from vqkv.study.experiments.common import COPY_FROM, exact_compressor, facts_answered
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.experiments.residual_vq import first_stages
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

EXACT = "fp16"


@experiment(
    lambda systems, designs, bits: (
        [{"system": EXACT, "bits": 16.0}] + product(system=systems, bits=[0.0]) + product(system=designs, bits=bits)
    )
)
def retrieval(
    subject: Subject, system: str, bits: float, episodes: list[list[int]], passage: int, least_exact: float,
    vqllm: dict, learning: dict,
) -> list[dict]:  # fmt: skip
    """Ask about a text through each way to store a cache: a row per system and task.

    ``facts``: ``episodes`` of [facts, tokens of a text, texts]. ``copy``: a ``passage`` comes again at the end.
    ``told`` and ``told_exact`` are shares, ``lost`` their difference in points with its 95% interval. Raises
    ``DataError`` where the exact cache tells less than ``least_exact``: such a task says nothing of caches.
    """
    exact = system == EXACT
    compressor = exact_compressor(subject) if exact else fitted_system(subject, system, bits, vqllm, learning)
    rows = [_copy(subject, compressor, passage)]
    for count, text_len, texts in episodes:
        answers = facts_answered(subject, compressor, count, text_len, texts)
        answers = {name.replace("facts", "told").replace("told_lost", "lost"): each for name, each in answers.items()}
        rows.append({"task": "facts", "num_facts": count, "text_len": text_len, "questions": count * texts} | answers)
    for row in rows:
        if row["told_exact"] < least_exact:
            raise DataError(
                f"{subject.name} itself tells {100 * row['told_exact']:.0f}% of {row['task']}, {row['num_facts']} in "
                f"{row['text_len']} tokens: ask for fewer facts, in shorter text, or take a larger model"
            )
    return [{"model": subject.name, "system": system, "nominal_bits": bits} | row for row in rows]


def _copy(subject: Subject, compressor, passage: int) -> dict:
    tokens, answers = passages(subject.test, passage)
    read: dict[str, Any] = {"chunk_size": passage, "reconstruction": False, "per_sequence": True}
    row = evaluate(subject.model, compressor, tokens, answers=answers, exact=subject.exact, **read)
    names = ("recall_each", "recall_exact_each")
    each, exact = (torch.tensor(row[name]).double().view(len(tokens), -1) for name in names)
    low, high = bootstrap_interval(100 * (exact - each).mean(1))
    shares = {"told": row["recall"], "told_exact": row["recall_exact"]}
    lost = {"lost": 100 * (shares["told_exact"] - shares["told"]), "lost_low": low, "lost_high": high}
    about = {"task": "copy", "num_facts": 0, "text_len": tokens.shape[1], "questions": each.numel()}
    return about | shares | lost


def passages(text: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``text`` with its second ``size`` tokens again as its last, and where these are asked for (bool)."""
    tokens = torch.cat([text[:, :-size], text[:, size : 2 * size]], dim=1)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, COPY_FROM - size :] = True
    return tokens, answers


BOTH = "key + value"
TUNED, CONTROL = f"{BOTH}, fine-tuned", f"control, then {BOTH}"  # codes read in training, or only afterwards


def _cases(subject: Subject, num_quantizers: list[int], rates: list[float], seeds: list[int]) -> list[dict]:
    kinds = [(BOTH, 0.0), *((TUNED, rate) for rate in rates), (CONTROL, max(rates))]
    return [
        {"subject": each, "label": label, "rate": rate, "count": count}
        for each in subject.each(seed=seeds) for label, rate in kinds for count in num_quantizers
    ]  # fmt: skip


@experiment(_cases)
def finetuning(
    subject: Subject, label: str, rate: float, count: int, num_quantizers: list[int], quantizer: dict, steps: int,
    size: list[int], protocol: str,
) -> dict:  # fmt: skip
    """Fine-tune for ``steps`` steps of ``size`` tokens, by ``seeds`` and ``rates``, with a control at the highest.

    A row per seed, codebooks, label and rate (0: not trained). ``quantizer``: of ``presets.vqllm``.
    """
    tuning: dict[str, Any] = {"steps": steps, "size": size, "rate": rate}
    preset = presets.vqllm(count, **quantizer, seed=subject.seed)
    vectors = kv_width(subject.about) // quantizer["group_size"] * subject.train_size[1]  # of a sequence
    batch_size = max(8, -(-16 * quantizer["codebook_size"] // vectors))  # k-means wants 16 for each code
    if label == BOTH:
        deepest = quantizer | {"num_quantizers": max(num_quantizers)}
        model, compressor = subject.model, first_stages(subject, count, deepest, batch_size)
    elif label == TUNED:
        model, compressor = _trained(subject, preset, **tuning)
    else:
        model = _control(subject=subject, tuning=tuning)
        compressor = calibrate(model, subject.train, preset, batch_size, progress=False)
    score = evaluate(model, compressor, subject.test, protocol, reconstruction=False)
    about = {"model": subject.name, "seed": subject.seed, "label": label, "learning_rate": rate}
    about["num_quantizers"] = count
    return about | {name: score[name] for name in ("bits_per_value", "ppl", "ppl_exact")}


@per_process(maxsize=1)
def _control(subject: Subject, tuning: dict):
    return _trained(subject, None, **tuning)[0]


def _trained(subject: Subject, preset: presets.Preset | None, steps: int, size: list[int], rate: float):
    """Return a fine-tuned copy of the model, and the compressor that it has read through, if it has. The first batch
    only initialises codebooks. Few tokens at a time: a large model is to fit with its copy."""
    count, seq_len = size
    tokens = subject.text("train", [count * (steps + 1), seq_len], subject.seed)
    with torch.inference_mode(False):
        model = copy.deepcopy(subject.model)
    at_once = max(1, 8192 // seq_len)
    tuned = finetune(model, tokens, preset, lr=rate, batch_size=count, micro_batch=at_once, progress=False)
    return model, tuned.compressor


def given_back(table: pd.DataFrame) -> pd.DataFrame:
    """Add ``given_back`` to trained rows: of what codes add to perplexity, the share (%) that training takes away."""
    keys, untrained = ["num_quantizers", "seed"], table["label"] == BOTH
    before = table.loc[untrained, [*keys, "ppl", "ppl_exact"]]
    rows = table[~untrained].merge(before, how="left", on=keys, suffixes=("", "_before"))
    share = 100 * (rows["ppl_before"] - rows["ppl"]) / (rows["ppl_before"] - rows["ppl_exact_before"])
    return rows.assign(given_back=share)
