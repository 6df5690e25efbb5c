"""Page 08: what transformers' quantized cache loses by residual length, and greedy text with each cache."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from vqkv.evaluation.evaluate import evaluate
from vqkv.evaluation.exact import RoundedCache
from vqkv.models.load import load_model
from vqkv.study.bench.caches import chosen, contenders
from vqkv.study.experiments.common import bits_with_side
from vqkv.study.peers import TransformersQuantized
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

MEASURED = ("ppl", "ppl_exact", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1", "exact_neighbours", "side_bytes")
BITS_AT = {"bits_1k": 1024, "bits_8k": 8192}
EXACT = "exact"
FP16 = "fp16"  # a cache of everything, rounded: the floor


@experiment(
    lambda swept, lengths, systems, length: (
        product(label=swept, length=lengths) + product(label=systems, length=[length])
    )
)
def residual_lengths(subject: Subject, label: str, length: int, prompt_len: int) -> dict:
    """Measure transformers' caches by tokens that wait, exact, to be quantized as a block; a row per system and length.

    ``swept`` with all ``lengths`` (0: as 1), ``systems`` with ``length``; ``snapshot`` protocol, token by token.
    ``held``: exact tokens that a scored one reads. ``bits_per_value``: packed; ``bits_1k``, ``bits_8k``: held ones too.
    """
    name, bits = label.removeprefix("transformers ").rsplit(" ", 1)
    system, test = TransformersQuantized(name, int(bits), residual_length=max(1, length)), subject.test
    how: dict[str, Any] = {"protocol": "snapshot", "prompt_len": prompt_len, "reconstruction": False}
    row = evaluate(subject.model, system, test, exact=subject.exact, batch_size=2, **how)  # of which logits are held
    row = {name: row[name] for name in MEASURED}
    short, few = _in_bfloat16(name=subject.name, device=subject.device), test[:1, : prompt_len + 2]
    row["bits_per_value"] = evaluate(short, system, few, **how)["bits_per_value"]
    row["held"] = row.pop("exact_neighbours") - 1  # itself
    row |= {name: bits_with_side(row, subject.about, n, row["held"]) for name, n in BITS_AT.items()}
    row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
    return {"model": subject.name, "system": label, "length": length} | row


@per_process(maxsize=1)
def _in_bfloat16(name: str, device: str):
    """The model in the type whose scales take 16 bits, to weigh transformers' caches."""
    return load_model(name, "bfloat16", device)[0]


@experiment(lambda systems: product(label=[EXACT, FP16, *chosen(systems)]))
def greedy_text(subject: Subject, label: str, new_tokens: int) -> list[dict]:
    """Go on greedily for ``new_tokens`` after each held-out prompt; a row per system (of ``bench.caches``) and prompt.

    ``same``: tokens equal to the exact cache's before the first that differs. ``fp16`` is the exact cache, rounded.
    """
    model, prompts, rows = subject.model, subject.test.to(subject.model.device), []
    caches = {EXACT: None, FP16: RoundedCache(model, torch.float16)}
    if label not in caches:
        systems = fitted_contender(subject, label)
        caches = {name: system.new_cache(model) for name, system in systems.items()}
    if label in caches:
        expected = _greedy(model, None, prompts, new_tokens)
        for number, text in enumerate(_greedy(model, caches[label], prompts, new_tokens)):
            same = (text == expected[number]).cumprod(0).sum().item()
            about = {"model": subject.name, "system": label, "prompt": number}
            rows.append(about | {"same": same, "new_tokens": new_tokens})
    return rows


def fitted_contender(subject: Subject, label: str) -> dict:
    """The system of this label by its name, fitted; nothing for transformers' cache with a package that is missing."""
    fit = partial(subject.calibrated, batch_size=len(subject.train))
    return contenders(fit, [label], subject.seed)


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
    """Return quartiles of equal tokens before the first that differs; ``never``: the share of prompts without."""
    rows = greedy.assign(never=greedy["same"] == greedy["new_tokens"])
    groups = rows.groupby(["model", "system"], sort=False)
    quartiles = groups["same"].quantile(np.array([0.25, 0.5, 0.75])).unstack().set_axis(["q1", "median", "q3"], axis=1)
    return quartiles.join(groups["never"].mean())
