"""Notebook 10: the residual VQ paper's three tables on tasks of lm-evaluation-harness, fine-tuning included."""

import copy

import pandas as pd
import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.finetune import finetune
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.load import describe, kv_width
from vqkv.study.experiments.common import Subject, calibrated, check_enough, exact_compressor, frame, paired, subject
from vqkv.study.experiments.depth import shallower
from vqkv.study.sweep import per_process, sweep

EXACT, BOTH, FINE_TUNED = "exact", "key + value", ", fine-tuned"
ROLES = {  # Table 1's rows without training: how key channels are grouped, if keys are quantised; whether values are
    "key (contiguous)": ("contiguous", False),
    "key (strided)": ("strided", False),
    "value": (None, True),
    BOTH: ("strided", True),
}
TRAINED = {  # whether codes were read in training, and whether they are read now
    BOTH + FINE_TUNED: (True, True),
    "control: trained without codes": (False, False),
    "control, then key + value": (False, True),
}
TABLE_1 = (EXACT, *ROLES, *TRAINED)
TABLE_4 = (BOTH, *(label for label, (_, reads_codes) in TRAINED.items() if reads_codes))
TEXT = "held-out text"
PUBLISHED = ("arc_25", "hellaswag_10", "mmlu_5", "truthfulqa_0", "winogrande_5", "gsm8k_5")


def leaderboard(
    models: list[str], corpus: str, tasks: list[str], limit: int | None, tell_apart: float, protocol: str,
    codebook_sizes: list[int],
    depths: list[int], codebook_size: int, group_size: int, kmeans_iterations: int, train_seqs: int, seq_len: int,
    num_seqs: int, tuned_depths: list[int], tuning_steps: int, tuning_seqs: int, tuning_len: int,
    learning_rate: float, batch_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """One row per table of the paper, system and task, and one for the perplexity of ``num_seqs`` held-out sequences.

    Table 1, on the first of ``models``: what is quantised, with max(``depths``) codebooks of ``codebook_size``
    codes; fine-tuned for ``tuning_steps`` steps of ``tuning_seqs`` sequences of ``tuning_len`` tokens; and the control,
    the same steps without codes. "Table 4": the rows with codes again, for every other number of codebooks in
    ``tuned_depths``, without tasks. Table 2: every other codebook size and number of codebooks, the smaller ones cut
    out of the deepest. Table 3: each other model. ``tasks`` and ``protocol`` as in ``harness.run_tasks``, the first
    metric of each task; ``limit``: documents a task, None for all;
    ``tell_apart``: points that so many must be able to tell apart, or it raises ``DataError``.
    """
    for task in tasks if limit else ():
        check_enough(task, limit, tell_apart)
    text = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": text | {"dtype": dtype, "device": device},
        "scoring": {"tasks": tasks, "limit": limit, "protocol": protocol, "batch_size": batch_size},
        "tuning": {"steps": tuning_steps, "size": [tuning_seqs, tuning_len], "lr": learning_rate},
    }
    depth, largest = max(depths), {"codebook_size": codebook_size, "group_size": group_size}
    largest |= {"kmeans_iterations": kmeans_iterations}
    cases = [(1, models[0], label, largest | {"num_quantizers": depth}) for label in TABLE_1]
    cases += [
        (4, models[0], label, largest | {"num_quantizers": count})
        for count in tuned_depths if count != depth for label in TABLE_4
    ]  # fmt: skip
    cases += [
        (2, models[0], BOTH, largest | {"num_quantizers": count, "codebook_size": size})
        for size in sorted(codebook_sizes) for count in sorted(depths) if (size, count) != (codebook_size, depth)
    ]  # fmt: skip
    cases += [(3, name, label, largest | {"num_quantizers": depth}) for name in models[1:] for label in (EXACT, BOTH)]
    names = ("table", "model", "label", "quantizer")
    return frame(*sweep(_rows, [dict(zip(names, case)) for case in cases], settings | {"depth": depth}, "tasks"))


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
    tuned, control = (label for label, (_, reads_codes) in TRAINED.items() if reads_codes)
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


def _rows(table: int, model: str, label: str, quantizer: dict, depth: int, who: dict, scoring: dict, tuning: dict):
    from vqkv.evaluation.harness import run_tasks  # seconds, which the other experiments need not spend

    who = who | {"name": model}
    found, (read, compressor) = subject(**who), _system(label, quantizer, depth, who, tuning)
    protocol, batch_size = scoring["protocol"], scoring["batch_size"]
    exact = found.exact if read is found.model else None
    score = evaluate(read, compressor, found.test, protocol, batch_size=batch_size, reconstruction=False, exact=exact)
    text = {"task": TEXT, "metric": "perplexity", "value": score["ppl"], "n": len(found.test), "num_fewshot": 0}
    tasks = [] if table == 4 else run_tasks(read, found.tokenizer, None if label == EXACT else compressor, **scoring)
    about = {"table": table, "model": model, "label": label, "side_bytes": score["side_bytes"]}
    about |= {name: quantizer[name] for name in ("num_quantizers", "codebook_size")}
    about["bits_per_value"] = score["bits_per_value"]
    columns = ("task", "metric", "value", "stderr", "n", "num_fewshot")
    first_metrics = {row["task"]: row for row in reversed(tasks)}  # the last word is the first row's
    rows = [text | {"stderr": float("nan")}, *reversed(first_metrics.values())]
    return [about | {name: row[name] for name in columns} for row in rows], found.sources


def _system(label: str, quantizer: dict, depth: int, who: dict, tuning: dict):
    """The model that is to read, and the compressor that it reads through."""
    found = subject(**who)
    if label in TRAINED:
        with_codes, reads_codes = TRAINED[label]
        if not reads_codes:
            model = _tuned_without(who=who, tuning=tuning)
            return model, exact_compressor(found, model)
        return _tuned(quantizer, with_codes, who=who, tuning=tuning)
    if label == EXACT:
        return found.model, exact_compressor(found)
    return found.model, _quantised(*ROLES[label], quantizer, depth, who)


def _quantised(key_grouping: str | None, values: bool, quantizer: dict, depth: int, who: dict) -> Compressor:
    """Keys, values or both as residual VQ stores them; what is not quantised is exact."""
    found, deepest = subject(**who), quantizer | {"num_quantizers": depth}
    exact = exact_compressor(found)
    fitted = _fitted(who=who, quantizer=deepest, key_grouping=key_grouping or "strided")
    cut = shallower(fitted, quantizer["num_quantizers"])
    return paired(cut if key_grouping else exact, cut if values else exact, like=cut)


@per_process(maxsize=2)
def _fitted(who: dict, quantizer: dict, key_grouping: str) -> Compressor:
    found = subject(**who)
    preset = presets.vqllm(**quantizer, key_grouping=key_grouping, seed=who["seed"])
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


def beside_published(table: pd.DataFrame, published: pd.DataFrame, number: int) -> pd.DataFrame:
    """The paper's table ``number`` (its CSV) and ours, a row for each system: accuracies in percent, perplexity of the
    held-out text. Columns have two levels: whose they are, and the task. A row that one side lacks is empty there."""
    ours = _wide(table[table["table"].isin((1, number))], number)
    theirs = published[[*PUBLISHED]].set_axis(_names(published, number), axis=0)
    joined = pd.concat({"published": theirs, "here": ours}, axis=1)
    return joined.loc[[*dict.fromkeys([*theirs.index, *ours.index])]].rename_axis("system")


def _names(published: pd.DataFrame, number: int) -> list[str]:
    """Our names for the rows of the paper's table."""
    if number == 1:
        return [EXACT, *ROLES, BOTH + FINE_TUNED]
    if number == 2:
        sizes = published[["codebook_size", "num_quantizers"]].itertuples(index=False)
        return [EXACT if pd.isna(size) else f"{count:g} x {size:g} codes" for size, count in sizes]
    cached = published["quantised"].map({"no": EXACT, "yes": BOTH})
    return list(published["model"] + ", " + cached)


def _wide(rows: pd.DataFrame, number: int) -> pd.DataFrame:
    """Systems by tasks."""
    names = rows["label"]
    if number == 2:
        rows = pd.concat([rows[rows["label"] == EXACT], _by_size(rows)])
        sizes = rows["num_quantizers"].astype(str) + " x " + rows["codebook_size"].astype(str) + " codes"
        names = sizes.where(rows["label"] != EXACT, EXACT)
    if number == 3:
        rows = rows[rows["label"].isin((EXACT, BOTH))]
        names = rows["model"] + ", " + names
    names = names.loc[rows.index]
    shown = rows["value"].where(rows["task"] == TEXT, 100 * rows["value"])
    wide = rows.assign(system=names, shown=shown).pivot(index="system", columns="task", values="shown")
    return wide.loc[names.unique(), rows["task"].unique()]


def _by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Table 2's rows by codebook size and number of codebooks; one of the systems stands in Table 1."""
    found = rows[(rows["table"] == 2) | ((rows["table"] == 1) & (rows["label"] == BOTH))]
    return found.sort_values(["codebook_size", "num_quantizers"], kind="stable")


def given_back(table: pd.DataFrame) -> pd.DataFrame:
    """``finetuning``'s trained rows with ``given_back``: of what codes add to the perplexity of the untrained model,
    the share (%) that training takes away again."""
    keys, untrained = ["num_quantizers", "seed"], table["label"] == BOTH
    before = table.loc[untrained, [*keys, "ppl", "ppl_exact"]]
    rows = table[~untrained].merge(before, how="left", on=keys, suffixes=("", "_before"))
    share = 100 * (rows["ppl_before"] - rows["ppl"]) / (rows["ppl_before"] - rows["ppl_exact_before"])
    return rows.assign(given_back=share)


def changes(table: pd.DataFrame) -> pd.DataFrame:
    """Table 1 as changes of accuracy from the exact cache in percentage points. ``error`` is that of a difference of
    two independent accuracies: too wide, as both come from the same documents."""
    rows = table[(table["table"] == 1) & (table["task"] != TEXT)]
    exact = rows[rows["label"] == EXACT].set_index("task")
    change = 100 * (rows["value"] - rows["task"].map(exact["value"]))
    error = 100 * (rows["stderr"] ** 2 + rows["task"].map(exact["stderr"]) ** 2) ** 0.5
    return rows.assign(change=change, error=error)[rows["label"] != EXACT].reset_index(drop=True)


def published_changes(published: pd.DataFrame) -> pd.DataFrame:
    """The same of the paper's Table 1: systems by tasks."""
    wide = published[[*PUBLISHED]].set_axis(_names(published, 1), axis=0)
    return (wide - wide.loc[EXACT]).drop(EXACT)


def depth_changes(table: pd.DataFrame) -> pd.DataFrame:
    """Table 2 as percent of perplexity above the exact cache's: num_quantizers, codebook_size, change."""
    text = table[table["task"] == TEXT]
    exact = text.loc[(text["table"] == 1) & (text["label"] == EXACT), "value"].item()
    rows = _by_size(text)
    return rows[["num_quantizers", "codebook_size"]].assign(change=100 * (rows["value"] / exact - 1))


def published_depth_changes(published: pd.DataFrame) -> pd.DataFrame:
    """The paper's Table 2 as points of mean accuracy below the exact cache's."""
    means = published[[*PUBLISHED]].mean(axis=1)
    sizes = published[["num_quantizers", "codebook_size"]]
    return sizes.assign(change=means - means[sizes["codebook_size"].isna()].item()).dropna()
