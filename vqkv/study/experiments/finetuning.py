"""Notebook 10: what fine-tuning a model together with residual VQ's codes gives back of what these cost."""

import copy
from typing import Any

import pandas as pd
import torch

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.finetune import finetune
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.load import kv_width
from vqkv.study.experiments.residual_vq import first_stages
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment

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
    """A fine-tuned copy of the model, and the compressor that it has read through, if it has. The first batch only
    initialises codebooks. Few tokens at a time: a large model is to fit with its copy."""
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
