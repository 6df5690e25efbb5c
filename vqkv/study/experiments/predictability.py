"""Notebook 04: what linear probes predict of keys and values, and how much of it is algebra, not language."""

import copy
import itertools
import re
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vqkv import presets
from vqkv.models.layers import kv_layers
from vqkv.models.rope import rotates
from vqkv.study.experiments.probes import Gram, Probe, explained_variance, probe_sums, reconstructed, shuffled
from vqkv.study.metrics import bits_saved
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment

# What a predictor could use at inference: V from its layer's K, AQUA-KV's predictors, and V without waiting for K.
QUANTISED = [("V", "K"), ("V", "V-1+K"), ("V", "K-1+V-1"), ("K", "K-1")]


@experiment()
def predictability(subject: Subject, reach: int, skip: int, strength: float, seeds: list[int]) -> list[dict]:
    """Measure held-out EVR of keys and values from every source of ``catalogue(reach)``, by streamed ridge regression.

    A row per variant (``trained``, ``after RoPE``, ``untrained`` for each of ``seeds``), target, sources and layer.
    Group ``shuffled`` has nothing to predict, drawn from one random sequence for all variants, which are one case.
    """
    group_of = {probe: group for group, probes in catalogue(reach).items() for probe in probes}
    settings: dict[str, Any] = {"skip": skip, "forms": {"shuffled": shuffled(subject.seed)}}
    rows: list[dict] = []
    variants = [("trained", 0), *([("after RoPE", 0)] if rotates(subject.model) else [])]
    for variant, seed in tqdm([*variants, *(("untrained", seed) for seed in seeds)], "variants", disable=None):
        model = untrained(subject.model, seed) if variant == "untrained" else subject.model
        texts, pre_rope = (subject.train, subject.test), variant != "after RoPE"
        train, test = (probe_sums(model, x, [*group_of], pre_rope=pre_rope, **settings) for x in texts)
        label = {"model": subject.name, "variant": variant, "seed": seed}
        for probe, group in group_of.items():
            explained = explained_variance(train, test, [probe], len(kv_layers(model)), strength)
            rows += [label | {"group": group} | row for row in explained]
    return rows


def untrained(model, seed: int):
    """Make a model of the same shape, dtype and device with random weights, as ``transformers`` draws them to train."""
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        fresh = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.dtype)
    return fresh.to(model.device).eval()


@experiment()
def algebra(subject: Subject, input_bits: list[int], skip: int, strengths: list[float]) -> list[dict]:
    """Measure what quantised inputs predict: a row per layer, target, sources, inputs and ridge strength.

    ``inputs``: ``exact``, or what HIGGS of so many bits gives back (the target is exact). Where ``sources`` is the
    target itself nothing is fitted: what the quantizer alone explains.
    """
    inputs = {"": "exact"} | {f"higgs{bits}": f"{bits} bits" for bits in input_bits}
    ends = {form: form and f"~{form}" for form in inputs}
    probes = {
        form: [Probe(target, plain.replace("+", f"{end}+") + end) for target, plain in QUANTISED]
        for form, end in ends.items()
    }
    alone = {form: [Probe(role, f"{role}~{form}") for role in "KV"] for form in inputs if form}
    every = [probe for group in (*probes.values(), *alone.values()) for probe in group]
    forms = {f"higgs{bits}": reconstructed(presets.higgs(bits)) for bits in input_bits}
    train, test = (probe_sums(subject.model, x, every, skip, forms=forms) for x in (subject.train, subject.test))
    count, rows = len(kv_layers(subject.model)), []
    for form, strength in itertools.product(inputs, strengths):
        explained = explained_variance(train, test, probes[form], count, strength)
        rows += [{"inputs": inputs[form], "strength": strength} | row for row in explained]
    for form, quantizers in alone.items():
        rows += [{"inputs": inputs[form]} | row for row in _unfitted(test, quantizers, count)]
    rows = [row | {"sources": re.sub(r"~\w+", "", row["sources"])} for row in rows]
    return [{"model": subject.name} | row for row in rows]


def catalogue(reach: int) -> dict[str, list[Probe]]:
    """List probes of page 04 by group, up to ``reach`` layers and tokens back, for K (own K, other V) and for V."""
    groups: dict[str, list[Probe]] = {}
    for own, other in ("KV", "VK"):
        layers = [f"{own}-{back}" for back in range(1, reach + 1)]
        pairs = [f"K-{back}+V-{back}" for back in range(1, reach + 1)]
        tokens = [f"{own}@T-{back}" for back in range(1, reach + 1)]
        sources_of = {
            "between layers": [*layers, f"{other}-1", pairs[0], "+".join(layers), "+".join(pairs)],
            "between tokens": [*tokens, f"{other}@T-1", "K@T-1+V@T-1", "+".join(tokens)],
            "within a layer": [other],
            "combined": [
                f"{own}-1+{own}@T-1", f"{pairs[0]}+K@T-1+V@T-1", f"{own}-1+{other}", f"{pairs[0]}+{other}",
            ],
        }  # fmt: skip
        for group, sources in sources_of.items():
            groups.setdefault(group, []).extend(Probe(own, source) for source in dict.fromkeys(sources))
    groups["shuffled"] = [Probe("K~shuffled", "K-1"), Probe("V~shuffled", "V-1+K")]
    return groups


def _unfitted(sums: Gram, probes: list[Probe], num_layers: int) -> list[dict]:
    """Return the EVR of each probe's only source as the target's prediction, without a map."""
    rows = []
    for probe, layer in itertools.product(probes, range(num_layers)):
        sources, target = probe.blocks(layer)
        evr = sums.explained(torch.eye(len(sums.mean(target))).to(sums.mean(target)), sources, target)
        about = {"target": probe.target, "sources": probe.sources, "layer": layer}
        rows.append(about | {"evr": evr, "bits": bits_saved(evr)})
    return rows
