"""What a cache costs while a random Llama generates greedily, as page 08 has it: time, all systems taking turns in one
process, and memory at its peak, each system in a process of its own."""

import ctypes
import multiprocessing
import re
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.benchmark import timer
from torch.utils.benchmark.utils.common import set_torch_threads as num_threads
from tqdm import tqdm

from vqkv.cache.meter import tensor_bytes
from vqkv.study.bench.caches import PEER, REFERENCE, prepared, random_llama, random_tokens
from vqkv.study.provenance import device_name, versions
from vqkv.study.shared import M_MMAP_MAX, give_back

TURN = 3  # tokens
PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq", "vqkv")
FIRST_CHUNKS = 4  # before measuring: torch sets up and compiles what packs and reads, once a process
CLEAR_PEAK, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # Linux: writing 5 forgets the peak
M_MMAP_THRESHOLD = -3  # of malloc.h


def latency(
    runs: list[list[int]], rounds: int, systems: list[str], geometry: str, seed: int, threads: int, dtype: str,
    device: str, attention: str = "sdpa",
) -> pd.DataFrame:  # fmt: skip
    """Time every system in each of ``runs``, [batch size, context, generated tokens]: a row per run and system.

    Prefills take turns, then ``TURN`` tokens of each system: a busy machine slows all alike. ``DynamicCache`` and
    transformers' quanto cache of 4 bits are always among ``systems`` ([] for all). ``attention``: the model's.

    Milliseconds: ``prefill_ms``, median of ``rounds``; ``decode_ms``, median of tokens, with quartiles; ``mean_ms``,
    with steps that pack a block. ``added_ms`` and ``added_mean_ms``: median and mean of differences from
    ``DynamicCache`` for the same token. ``slowdown``: of ratios. ``stored_bytes``: at the end.
    """
    with num_threads(threads):
        model = random_llama(geometry, dtype, device, seed)
        model.set_attn_implementation(attention)
        compared = prepared(model, systems and [REFERENCE, PEER, *systems], seed)
        shared, rows = _machine(geometry, dtype, device, threads), []
        going = {label: Generation(model, system) for label, system in compared.items()}
        for batch, context, generated in tqdm(runs, desc="runs", leave=False, disable=None):
            run = {"batch": batch, "context": context, "generated": generated}
            times = timed_run(going, random_tokens(model, batch, context, seed), generated, rounds)
            rows += [run | row | shared for row in times]
    return pd.DataFrame(rows)


def _machine(geometry: str, dtype: str, device: str, threads: int) -> dict:
    machine = {"device": device_name(device), "threads": threads, "versions": versions(*PACKAGES)}
    return {"geometry": geometry, "dtype": dtype} | machine


def timed_run(going: dict[str, "Generation"], tokens: torch.Tensor, generated: int, rounds: int) -> list[dict]:
    """Prefill ``tokens`` (batch, context) and generate ``generated`` more with each system in turn; a row a system."""
    for generation in going.values():  # warms up
        generation.prefill(tokens[:, : max(1, tokens.shape[1] // 8)])
        generation.step()
    prefills: dict[str, list[float]] = {label: [] for label in going}
    for _ in range(rounds):
        for label, generation in going.items():
            prefills[label].append(generation.prefill(tokens))
    steps: dict[str, list[float]] = {label: [] for label in going}
    for done in tqdm(range(0, generated, TURN), desc="tokens", unit="turn", leave=False, disable=None):
        for label, generation in going.items():
            steps[label] += [generation.step() for _ in range(min(TURN, generated - done))]
    return [
        {"system": label, "prefill_ms": float(np.median(prefills[label]))}
        | _times(np.array(steps[label]), np.array(steps[REFERENCE]))
        | {"stored_bytes": generation.stored_bytes}
        for label, generation in going.items()
    ]


def _times(steps: np.ndarray, uncompressed: np.ndarray) -> dict[str, float]:
    summary, added = {"mean_ms": steps.mean()}, steps - uncompressed
    for name, values in (("decode", steps), ("slowdown", steps / uncompressed)):
        middle = "decode_ms" if name == "decode" else name
        summary |= zip((f"{name}_q1", middle, f"{name}_q3"), np.percentile(values, (25, 50, 75)).tolist(), strict=True)
    return summary | {"added_ms": np.median(added), "added_mean_ms": added.mean()}


class Generation:
    """One system that generates greedily; every call returns its milliseconds."""

    now = staticmethod(timer)  # seconds, when everything asked for has been computed

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
        """Bytes of every tensor that the cache holds now and its system (codebooks, predictors) does not."""
        return tensor_bytes(self.cache, self.system) - tensor_bytes(self.system)

    def answer(self, count: int) -> torch.Tensor:
        """Choose the next ``count`` tokens (batch, count), which the cache then holds."""
        tokens = []
        for _ in range(count):
            tokens.append(self.last)
            self.step()
        return torch.cat(tokens, 1)


def peak_memory(
    sizes: list[int], chunk_size: int, systems: list[str], geometry: str, seed: int, threads: int, dtype: str,
    device: str,
) -> pd.DataFrame:  # fmt: skip
    """Prefill, ``chunk_size`` tokens at a time, and generate, each system in a process of its own; a row a system.

    ``prefill_mb``, ``decode_mb``: most memory (10^6 bytes) in each phase beyond model and codebooks. ``stored_mb``:
    what the cache holds at the end; ``resident_mb``: with side information and tables. ``sizes``: as one of ``runs``.
    """
    random = geometry, dtype, device, seed
    with num_threads(threads):
        model = random_llama(*random)
        made = prepared(model, systems, seed)
    about = dict(zip(("batch", "context", "generated"), sizes, strict=True)) | {"chunk_size": chunk_size}
    about |= _machine(geometry, dtype, device, threads)
    del model
    fresh, rows = multiprocessing.get_context("spawn"), []
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        for label, system in tqdm(made.items(), desc="peak", leave=False, disable=None):
            sizes_mb = pool.submit(generate_once, random, system, sizes, chunk_size, threads).result()
            rows.append({"system": label} | sizes_mb | about)
    return pd.DataFrame(rows)


def generate_once(random: tuple, system, sizes: list[int], chunk_size: int, threads: int) -> dict[str, float]:
    """In a fresh process: load, generate, and say how much memory it took in between."""
    with suppress(OSError, AttributeError):  # glibc gives large freed blocks back at once: else it keeps some
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 1 << 16)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)  # where large begins; if set, glibc does not raise it
    batch, context, generated = sizes
    with num_threads(threads):
        model = random_llama(*random)
        chunks = random_tokens(model, batch, context).split(chunk_size, dim=1)
        _prefilled(model, system, [chunk[:1] for chunk in chunks[:FIRST_CHUNKS]]).step()
        before = _start_measuring(model.device)
        generation = _prefilled(model, system, chunks)
        prefill = _peak(model.device) - before
        _start_measuring(model.device)
        for _ in range(generated):
            generation.step()
        decode = _peak(model.device) - before
    stored, report = generation.stored_bytes, getattr(generation.cache, "report", None)
    nbytes = {"stored": stored, "resident": report().resident_bytes if report else stored}
    return {f"{name}_mb": size / 1e6 for name, size in (nbytes | {"prefill": prefill, "decode": decode}).items()}


def _prefilled(model, system, chunks: list[torch.Tensor]) -> Generation:
    generation = Generation(model, system)
    generation.prefill(chunks[0])
    for chunk in chunks[1:]:
        generation.feed(chunk)
    return generation


def _start_measuring(device: torch.device) -> int:
    """Give freed memory back and forget the peak so far; bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    give_back()
    with suppress(OSError):
        CLEAR_PEAK.write_text("5")
    return _peak(device)


def _peak(device: torch.device) -> int:
    """Return the most bytes in use so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # of a process that exec started, ru_maxrss begins with its parent's
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+)", STATUS.read_text())[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
