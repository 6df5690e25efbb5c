"""Time that a cache adds to generation, as page 08 has it.

A random Llama generates greedily, prefill and decoding timed apart, all systems in one process: prefills in turn, then
``TURN`` tokens of each system in turn, so that a busy machine slows all of them alike. Milliseconds of wall time.
"""

import time

import numpy as np
import torch
from tqdm import tqdm

from vqkv.study.bench.caches import (
    PEER,
    REFERENCE,
    prepared,
    random_llama,
    random_tokens,
    stored_bytes,
)
from vqkv.study.bench.timing import num_threads
from vqkv.study.provenance import device_name, versions

TURN = 3  # tokens
PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq", "vqkv")


def latency(
    runs: list[list[int]], rounds: int, systems: list[str], geometry: str, codebook_sizes: list[int], seed: int,
    threads: int, dtype: str, device: str, attention: str = "sdpa",
) -> list[dict]:  # fmt: skip
    """Time every system in each run of ``runs``: [batch size, tokens of context, generated tokens]. ``attention``: the
    model's.

    One row per run and system of ``systems`` (all if it is empty; ``DynamicCache`` and transformers' quanto cache of 4
    bits are always among them). ``prefill_ms``: median of ``rounds``. ``decode_ms``: median over the generated tokens,
    with quartiles ``decode_q1`` and ``decode_q3``; ``mean_ms``: their mean, which has the steps that pack a block, too.
    ``added_prefill_ms``, ``added_ms`` and ``added_mean_ms``: median, median and mean of the differences from
    ``DynamicCache``'s time for the same prefill or token of the same turn, which a machine that is busy now and then
    disturbs less than the difference of medians. ``added_vs_quanto`` and ``added_mean_vs_quanto``: those over what
    transformers' quanto cache adds in the same run (NaN without it). ``slowdown``, ``slowdown_q1``, ``slowdown_q3``:
    median and quartiles over tokens of a system's time over ``DynamicCache``'s; ``prefill_slowdown``: of prompts.
    ``stored_bytes``: what the cache holds in the end; ``fit_s``: seconds of calibration (NaN: none). Presets that
    learn are fitted on random text, which changes no time but those of ``vqq_product`` and entropy codes: how many of
    its blocks stay in fp16, and what escapes from their tables, depends on the data.
    Raises ``UnknownNameError`` for other systems.
    """
    with num_threads(threads):
        model = random_llama(geometry, dtype, device, seed)
        model.set_attn_implementation(attention)
        seconds: dict[str, float] = {}
        compared = prepared(model, systems and [REFERENCE, PEER, *systems], codebook_sizes, seed, seconds)
        shared = {"geometry": geometry, "dtype": dtype, "device": device_name(model.device), "threads": threads}
        rows = []
        going = {label: Generation(model, system) for label, system in compared.items()}
        for batch, context, generated in tqdm(runs, desc="runs", leave=False, disable=None):
            label = {"batch": batch, "context": context, "generated": generated}
            found = timed_run(going, random_tokens(model, batch, context, seed), generated, rounds)
            shared |= {"versions": versions(*PACKAGES)}
            rows += [label | row | {"fit_s": seconds.get(row["system"])} | shared for row in found]
    return rows


def timed_run(going: dict[str, "Generation"], tokens: torch.Tensor, generated: int, rounds: int) -> list[dict]:
    """Prefill ``tokens`` (batch, context) and generate ``generated`` more with each system in turn; a row a system."""
    for generation in going.values():  # warms up
        generation.prefill(tokens[:, : max(1, tokens.shape[1] // 8)])
        generation.step()
    prefills: dict[str, list[float]] = {label: [] for label in going}
    for _ in range(rounds):
        for label, generation in going.items():
            prefills[label].append(generation.prefill(tokens))
    steps = {label: [] for label in going}
    for done in tqdm(range(0, generated, TURN), desc="tokens", unit="turn", leave=False, disable=None):
        for label, generation in going.items():
            steps[label] += [generation.step() for _ in range(min(TURN, generated - done))]
    added = {label: _added(prefills, steps, label) for label in going}
    return [
        {"system": label}
        | _times(prefills[label], steps[label])
        | added[label]
        | _beside_peer(added[label], added.get(PEER))
        | _slowdown(prefills, steps, label)
        | {"stored_bytes": generation.stored_bytes}
        for label, generation in going.items()
    ]


class Generation:
    """One system that generates greedily; every call returns its milliseconds."""

    def __init__(self, model, system):
        self.model, self.system = model, system

    def prefill(self, tokens: torch.Tensor) -> float:
        """Start again with a prompt (batch, seq_len)."""
        self.cache = self.system.new_cache(self.model)
        return self.feed(tokens)

    def step(self) -> float:
        """Generate one token."""
        return self.feed(self.last)

    @torch.no_grad()
    def feed(self, tokens: torch.Tensor) -> float:
        """Go on with tokens (batch, seq_len), and choose the next."""
        start = self.now()
        logits = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.last = logits[:, -1:].argmax(-1)
        return (self.now() - start) * 1e3

    @property
    def stored_bytes(self) -> int:
        """Bytes that the cache holds now."""
        return stored_bytes(self.cache, self.system)

    def now(self) -> float:
        """Seconds, when everything asked for has been computed."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def _times(prefills: list[float], steps: list[float]) -> dict[str, float]:
    first, middle, third = np.percentile(steps, (25, 50, 75)).tolist()
    return {
        "prefill_ms": float(np.median(prefills)),
        "decode_ms": middle,
        "decode_q1": first,
        "decode_q3": third,
        "mean_ms": float(np.mean(steps)),
    }


def _added(prefills: dict, steps: dict, label: str) -> dict[str, float]:
    """Times that a system adds to the uncompressed cache's."""
    prefill, step = (np.subtract(times[label], times[REFERENCE]) for times in (prefills, steps))
    return {"added_prefill_ms": np.median(prefill), "added_ms": np.median(step), "added_mean_ms": np.mean(step)}


def _slowdown(prefills: dict, steps: dict, label: str) -> dict[str, float]:
    """Times over the uncompressed cache's."""
    prefill, step = (np.divide(times[label], times[REFERENCE]) for times in (prefills, steps))
    first, middle, third = np.percentile(step, (25, 50, 75)).tolist()
    found = {"slowdown": middle, "slowdown_q1": first, "slowdown_q3": third}
    return found | {"prefill_slowdown": float(np.median(prefill))}


def _beside_peer(added: dict, peer: dict | None) -> dict[str, float]:
    of = {"added_vs_quanto": "added_ms", "added_mean_vs_quanto": "added_mean_ms"}
    return {name: added[which] / peer[which] if peer else float("nan") for name, which in of.items()}
