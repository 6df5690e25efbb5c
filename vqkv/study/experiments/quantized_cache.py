"""Page 08: what transformers' quantized cache loses by residual length, and greedy text with each cache."""

import dataclasses

import pandas as pd
import torch

from vqkv import presets
from vqkv.evaluation.evaluate import evaluate
from vqkv.evaluation.exact import RoundedCache
from vqkv.models.load import describe, load_model
from vqkv.study.bench.caches import chosen
from vqkv.study.experiments.common import all_told, calibrated, frame, subject
from vqkv.study.experiments.generation import fitted_contender
from vqkv.study.peers import TransformersQuantized
from vqkv.study.sweep import per_process, sweep

THEIRS = "transformers "
MEASURED = ("num_seqs", "scored_tokens", "ppl", "ppl_exact", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1",
            "exact_neighbours", "bits_per_value")  # fmt: skip
BITS_AT = {"bits_1k": 1024, "bits_8k": 8192}
EXACT = "exact"
FP16 = "fp16"  # a cache of everything, rounded: the floor


def residual_lengths(
    models: list[str], corpus: str, swept: list[str], lengths: list[int], systems: list[str], length: int,
    prompt_len: int, seq_len: int, num_seqs: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Loss and bits by the number of recent tokens that are kept exact until they are quantized as one block: ``swept``
    with every one of ``lengths``, ``systems`` with ``length``; a row per model, system and length.

    Systems: ``quanto 4`` and the like are presets with that ``flush_block``, ``transformers hqq 8`` and the like its
    own cache with that ``residual_length`` (0, which it does not tell from 1). ``snapshot`` protocol, token by token,
    as ``generate`` does: ``prompt_len`` tokens are read exact and stored packed, and every later one up to
    ``seq_len`` reads them. ``held``: exact tokens before it that a scored one reads on average. ``bits_per_value``: of
    packed tokens, scales in 16 bits; ``bits_1k`` and ``bits_8k``: with the held ones, in caches of 1,024 and 8,192
    tokens. ``ppl_increase`` is in percent.
    """
    who = {"corpus": corpus, "train": [1, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {"who": who | {"dtype": dtype, "device": device}, "prompt_len": prompt_len}
    listed = [(label, each) for label in swept for each in lengths] + [(label, length) for label in systems]
    cases = [{"model": name, "label": label, "length": each} for name in models for label, each in listed]
    return frame(*sweep(_residual_row, cases, settings, "residual length"))


def _residual_row(model: str, label: str, length: int, who: dict, prompt_len: int):
    who = who | {"name": model}
    found, system = subject(**who), _system(label, max(1, length), who)
    how = {"protocol": "snapshot", "prompt_len": prompt_len, "reconstruction": False}
    row = evaluate(
        found.model, system, found.test, exact=found.exact, batch_size=2, **how
    )  # of which all logits are held
    row = {name: row[name] for name in MEASURED} | {"side_bytes": row["side_bytes"]}
    if label.startswith(THEIRS):
        short, few = _in_bfloat16(name=model, device=who["device"]), found.test[:1, : prompt_len + 2]
        row["bits_per_value"] = evaluate(short, system, few, **how)["bits_per_value"]
    row["held"] = row.pop("exact_neighbours") - 1  # itself
    row |= {name: all_told(row, describe(found.model), n, 1, row["held"]) for name, n in BITS_AT.items()}
    row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
    return [{"model": model, "system": label, "length": length} | row], found.sources


def _system(label: str, length: int, who: dict):
    name, bits = label.removeprefix(THEIRS).rsplit(" ", 1)
    if label.startswith(THEIRS):
        return TransformersQuantized(name, int(bits), residual_length=length)
    return calibrated(dataclasses.replace(presets.make(name, bits=int(bits)), flush_block=length), who)


def greedy_text(
    models: list[str], corpus: str, systems: list[str], train_seqs: int, seq_len: int, prompts: int, prompt_len: int,
    new_tokens: int, shown: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Greedy continuations of held-out text, ``new_tokens`` after the first ``prompt_len`` of each of ``prompts``
    sequences; a row per model, system and prompt.

    Systems: labels of ``bench.caches``; before them ``exact``, the model's own cache, and ``fp16``, the same rounded,
    whose changes no quantizer is to blame for. ``same``: tokens equal to the exact ones before the first that differs
    (``new_tokens`` if none does). ``text`` and ``prompt_text`` (the prompt's end): of the first ``shown`` prompts.
    """
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [prompts, prompt_len], "seed": seed}
    settings = {
        "who": who | {"dtype": dtype, "device": device}, "new_tokens": new_tokens, "shown": shown, "seed": seed,
    }  # fmt: skip
    labels = [EXACT, FP16, *chosen(systems, [256])]
    cases = [{"model": name, "label": label} for name in models for label in labels]
    return frame(*sweep(_greedy_rows, cases, settings, "greedy"))


def _greedy_rows(model: str, label: str, who: dict, new_tokens: int, shown: int, seed: int):
    """None for transformers' cache with a package that is missing."""
    who = who | {"name": model}
    found, rows = subject(**who), []
    prompts = found.test.to(found.model.device)
    held = {EXACT: None, FP16: RoundedCache(found.model, torch.float16)}
    if label not in held:
        systems = fitted_contender(found, label, who, {"codebook_sizes": [256], "seed": seed})
        held = {name: system.new_cache(found.model) for name, system in systems.items()}
    if label in held:
        expected, told = _greedy(found.model, None, prompts, new_tokens), found.tokenizer.decode
        for number, text in enumerate(_greedy(found.model, held[label], prompts, new_tokens)):
            same = (text == expected[number]).cumprod(0).sum().item()
            row = {"model": model, "system": label, "prompt": number, "same": same, "new_tokens": new_tokens}
            texts = {"prompt_text": told(prompts[number, -48:]), "text": told(text)} if number < shown else {}
            rows.append(row | {"prompt_text": None, "text": None} | texts)
    return rows, found.sources


@torch.inference_mode()
def _greedy(model, cache, tokens: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The likeliest tokens (batch, new_tokens), one after another."""
    chosen_tokens = []
    for _ in range(new_tokens):
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        chosen_tokens.append(tokens)
    return torch.cat(chosen_tokens, 1)


def first_difference(greedy: pd.DataFrame) -> pd.DataFrame:
    """Equal tokens before the first that differs, by model and system: quartiles over prompts, and ``never``, the share
    of prompts without one."""
    rows = greedy.assign(never=greedy["same"] == greedy["new_tokens"])
    groups = rows.groupby(["model", "system"], sort=False)
    quartiles = groups["same"].quantile([0.25, 0.5, 0.75]).unstack().set_axis(["q1", "median", "q3"], axis=1)
    return quartiles.join(groups["never"].mean())


@per_process(maxsize=1)
def _in_bfloat16(name: str, device: str):
    """The model in the type whose scales take 16 bits, to weigh transformers' caches."""
    return load_model(name, "bfloat16", device)[0]
