"""Notebook 10: what fine-tuning a model together with residual VQ's codes gives back of what these cost."""

import copy

import pandas as pd
import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.finetune import finetune
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.load import describe, kv_width
from vqkv.study.experiments.common import Subject, calibrated, frame, subject
from vqkv.study.experiments.depth import shallower
from vqkv.study.sweep import per_process, sweep

BOTH = "key + value"
TRAINED = {  # whether codes were read in training; all are read through codes afterwards
    f"{BOTH}, fine-tuned": True,
    f"control, then {BOTH}": False,
}


def finetuning(
    model: str, corpus: str, num_quantizers: list[int], codebook_size: int, group_size: int, kmeans_iterations: int,
    train_seqs: int, seq_len: int, num_seqs: int, steps: int, size: list[int], rates: list[float], seeds: list[int],
    protocol: str, dtype: str, device: str,
):  # fmt: skip
    """Fine-tuning with several ``seeds``, which draw its text and start k-means, at each of ``rates`` (constant), for
    ``steps`` steps of ``size`` (num_seqs, seq_len) tokens; the control is trained at the highest rate.

    One row per seed, number of codebooks, label and rate (0: not trained): ``ppl`` of the same ``num_seqs`` held-out
    sequences read packed, and ``ppl_exact``, what the model, trained or not, makes of them exact.
    """
    text = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "test_seed": 0}
    settings = {
        "who": text | {"name": model, "dtype": dtype, "device": device},
        "quantizer": {"codebook_size": codebook_size, "group_size": group_size, "kmeans_iterations": kmeans_iterations},
        "depth": max(num_quantizers), "tuning": {"steps": steps, "size": size}, "protocol": protocol,
    }  # fmt: skip
    tuned, control = TRAINED
    kinds = [(BOTH, 0.0), *((tuned, rate) for rate in rates), (control, max(rates))]
    cases = [
        {"seed": seed, "label": label, "rate": rate, "count": count}
        for seed in seeds for label, rate in kinds for count in num_quantizers
    ]  # fmt: skip
    return frame(*sweep(_tuned_row, cases, settings, "fine-tuning"))


def _tuned_row(
    seed: int, label: str, rate: float, count: int, who: dict, quantizer: dict, depth: int, tuning: dict, protocol: str
):
    who, quantizer = who | {"seed": seed}, quantizer | {"num_quantizers": count}
    found, (read, compressor) = subject(**who), _system(label, quantizer, depth, who, tuning | {"lr": rate})
    score = evaluate(read, compressor, found.test, protocol, reconstruction=False)
    about = {"model": who["name"], "seed": seed, "label": label, "learning_rate": rate, "num_quantizers": count}
    return [about | {name: score[name] for name in ("bits_per_value", "ppl", "ppl_exact")}], found.sources


def _system(label: str, quantizer: dict, depth: int, who: dict, tuning: dict):
    """The model that is to read, and the compressor that it reads through."""
    if label in TRAINED:
        return _tuned(quantizer, TRAINED[label], who=who, tuning=tuning)
    deepest = _fitted(who=who, quantizer=quantizer | {"num_quantizers": depth})
    return subject(**who).model, shallower(deepest, quantizer["num_quantizers"])


@per_process(maxsize=1)
def _fitted(who: dict, quantizer: dict) -> Compressor:
    found = subject(**who)
    preset = presets.vqllm(**quantizer, seed=who["seed"])
    return calibrated(preset, who, _batch_size(found, quantizer))


def _batch_size(found: Subject, quantizer: dict) -> int:
    """Sequences of at least 16 vectors a code, which k-means wants of the first batch."""
    about = describe(found.model)
    vectors = kv_width(about) // quantizer["group_size"] * found.train.shape[1]
    return max(8, -(-16 * quantizer["codebook_size"] // vectors))


def _tuned(quantizer: dict, with_codes: bool, **how):
    """A fine-tuned copy of the model, and the compressor fitted to it: while it was trained, or afterwards."""
    if with_codes:
        return _tuned_with_codes(quantizer=quantizer, **how)
    found, model = subject(**how["who"]), _tuned_without(**how)
    preset = presets.vqllm(**quantizer, seed=how["who"]["seed"])
    return model, calibrate(model, found.train, preset, _batch_size(found, quantizer), progress=False)


@per_process(maxsize=1)
def _tuned_with_codes(who: dict, quantizer: dict, tuning: dict):
    model, tokens = _copy_and_tokens(who, tuning)
    preset = presets.vqllm(**quantizer, seed=who["seed"])
    return model, finetune(model, tokens, preset, **_training(model, tuning)).compressor


@per_process(maxsize=1)
def _tuned_without(who: dict, tuning: dict):
    model, tokens = _copy_and_tokens(who, tuning)
    finetune(model, tokens, None, **_training(model, tuning))
    return model


def _training(model, tuning: dict) -> dict:
    """Few tokens at a time, and on a GPU layers computed twice: a model of 8B parameters is to fit beside its copy."""
    count, seq_len = tuning["size"]
    at_once = {"micro_batch": max(1, 8192 // seq_len), "gradient_checkpointing": model.device.type != "cpu"}
    return {"lr": tuning["lr"], "batch_size": count, "progress": False} | at_once


def _copy_and_tokens(who: dict, tuning: dict):
    """The tokens of all steps; the first batch only initialises codebooks."""
    count, seq_len = tuning["size"]
    tokens = subject(**who | {"train": [count * (tuning["steps"] + 1), seq_len]}).train
    with torch.inference_mode(False):
        return copy.deepcopy(subject(**who).model), tokens


def given_back(table: pd.DataFrame) -> pd.DataFrame:
    """``finetuning``'s trained rows with ``given_back``: of what codes add to the perplexity of the untrained model,
    the share (%) that training takes away again."""
    keys, untrained = ["num_quantizers", "seed"], table["label"] == BOTH
    before = table.loc[untrained, [*keys, "ppl", "ppl_exact"]]
    rows = table[~untrained].merge(before, how="left", on=keys, suffixes=("", "_before"))
    share = 100 * (rows["ppl_before"] - rows["ppl"]) / (rows["ppl_before"] - rows["ppl_exact_before"])
    return rows.assign(given_back=share)
