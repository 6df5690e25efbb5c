"""Notebooks 08 and 09: caches in use, transformers' by residual length, greedy text with each, and kernels."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from vqkv.evaluation.evaluate import evaluate
from vqkv.evaluation.exact import RoundedCache
from vqkv.models.load import load_model
from vqkv.study.bench.caches import Uncompressed, chosen, contenders
from vqkv.study.bench.formats import bits_per_value
from vqkv.study.bench.generation import Generation, latency
from vqkv.study.bench.speed import ROOFLINE
from vqkv.study.bench.stored import ATTENTION, DECODED, SDPA
from vqkv.study.experiments.common import bits_with_side
from vqkv.study.peers import TransformersQuantized
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product
from vqkv.study.tables import with_numbers

OURS = "vqkv"


def against_ours(table: pd.DataFrame) -> pd.DataFrame:
    """Return others' times over our kernel's: a row per operation and format (its largest problem), attention aside."""
    rows = table[~table["operation"].isin([ROOFLINE, ATTENTION])]
    keys = ["operation", "format"]
    rows = rows[rows["bound_ms"] == rows.groupby(keys)["bound_ms"].transform("max")]
    rows = rows.assign(implementation=rows["implementation"].str.replace(r" \(.*| beam \d+", "", regex=True))
    times = rows.pivot_table(index=keys, columns="implementation", values="median", sort=False)
    if OURS not in times:
        return times
    ratios = times.drop(columns=OURS).div(times[OURS], axis=0)
    ratios.insert(0, f"{OURS}, ms", times[OURS])
    return ratios


def trade(table: pd.DataFrame) -> pd.DataFrame:
    """Return savings and costs of each format at the longest context of one sequence.

    Times of a token's attention over fp16 SDPA's: ``packed``, ``decoded`` first, ``possible`` by the roofline.
    """
    rows = with_numbers(table[table["operation"] == ATTENTION], "batch", "context")
    rows = rows[rows["batch"] == 1]
    rows = rows[rows["context"] == rows["context"].max()]
    exact = rows[(rows["format"] == "fp16") & (rows["implementation"] == SDPA)]
    bound = exact["bound_ms"].iloc[0] if len(exact) else float("nan")
    packed = rows[rows["implementation"].str.startswith(OURS)].set_index("format")
    decoded = rows[rows["implementation"] == DECODED].set_index("format")
    bits = pd.Series({name: bits_per_value(name) for name in packed.index}, dtype=float)
    columns = {"bits": bits, "smaller": 16 / bits, "packed": packed["ratio_to_fp16"]}
    columns |= {"decoded": decoded["ratio_to_fp16"], "possible": packed["bound_ms"] / bound}
    return pd.DataFrame(columns, index=packed.index)


def read_in_place(geometries: list[str], **settings) -> pd.DataFrame:
    """``bench.generation.latency`` of several shapes, where attention reads packed tokens in place, if kernels can."""
    runs = [latency(geometry=geometry, attention="vqkv_packed", **settings) for geometry in geometries]
    return pd.concat(runs, ignore_index=True)


MEASURED = ("ppl", "ppl_exact", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1", "exact_neighbours", "side_bytes")
BITS_AT = {"bits_1k": 1024, "bits_8k": 8192}
EXACT, FP16 = "exact", "fp16"  # the latter: a cache of everything, rounded: the floor


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
    """Return the model in the type whose scales take 16 bits, to weigh transformers' caches."""
    return load_model(name, "bfloat16", device)[0]


@experiment(lambda systems: product(label=[EXACT, FP16, *chosen(systems)]))
def greedy_text(subject: Subject, label: str, new_tokens: int) -> list[dict]:
    """Go on greedily for ``new_tokens`` after each held-out prompt; a row per system (of ``bench.caches``) and prompt.

    ``same``: tokens equal to the exact cache's before the first that differs. ``fp16`` is the exact cache, rounded.
    """
    model, prompts, rows = subject.model, subject.test.to(subject.model.device), []
    systems = {} if label in (EXACT, FP16) else fitted_contender(subject, label)
    caches = {EXACT: Uncompressed().new_cache(model), FP16: RoundedCache(model, torch.float16)}
    caches |= {name: system.new_cache(model) for name, system in systems.items()}
    if label not in caches:
        return []
    texts = {}
    for name in dict.fromkeys((EXACT, label)):
        going = Generation(model, systems.get(name))
        going.cache = caches[name]
        going.feed(prompts)
        texts[name] = going.answer(new_tokens)
    for number, (text, expected) in enumerate(zip(texts[label], texts[EXACT], strict=True)):
        same = (text == expected).cumprod(0).sum().item()
        about = {"model": subject.name, "system": label, "prompt": number}
        rows.append(about | {"same": same, "new_tokens": new_tokens})
    return rows


def fitted_contender(subject: Subject, label: str) -> dict:
    """The system of this label by its name, fitted; nothing for transformers' cache with a package that is missing."""
    fit = partial(subject.calibrated, batch_size=len(subject.train))
    return contenders(fit, [label], subject.seed)


def first_difference(greedy: pd.DataFrame) -> pd.DataFrame:
    """Return quartiles of equal tokens before the first that differs; ``never``: the share of prompts without."""
    rows = greedy.assign(never=greedy["same"] == greedy["new_tokens"])
    groups = rows.groupby(["model", "system"], sort=False)
    quartiles = groups["same"].quantile(np.array([0.25, 0.5, 0.75])).unstack().set_axis(["q1", "median", "q3"], axis=1)
    return quartiles.join(groups["never"].mean())
