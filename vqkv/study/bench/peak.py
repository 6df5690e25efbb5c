"""Memory that generation takes at its peak.

Every system generates in a process of its own, which has loaded the model (random weights) and the codebooks before
the measuring starts. On a CPU: resident memory, and glibc is told to keep nothing that was freed; on a GPU: allocated
memory.
"""

import multiprocessing
import os
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from tqdm import tqdm

from vqkv.cache.compressor import Compressor
from vqkv.study.allocator import give_back
from vqkv.study.bench.caches import THEIRS, KeepingDecoded, prepared, random_llama, random_tokens
from vqkv.study.bench.generation import PACKAGES, Generation
from vqkv.study.bench.timing import num_threads
from vqkv.study.provenance import device_name, versions

FIRST_CHUNKS = 4  # before measuring: torch sets up and compiles what packs and reads, once a process
CLEAR_PEAK = Path("/proc/self/clear_refs")  # Linux: writing 5 forgets the peak so far


def peak_memory(
    sizes: list[int], chunk_size: int, systems: list[str], geometry: str, codebook_sizes: list[int], seed: int,
    threads: int, dtype: str, device: str,
) -> list[dict]:  # fmt: skip
    """Prefill, ``chunk_size`` tokens at a time, and generate, each system in a process of its own; a row a system (all
    if ``systems`` is empty), in units of 10^6 bytes. ``sizes``: [batch size, tokens of context, generated tokens].

    ``prefill_mb`` and ``decode_mb``: the largest memory in each phase, less what the process took with model and
    codebooks loaded; freed memory is given back in between. ``stored_mb``: what the cache holds in the end;
    ``resident_mb``: with side information and the tables made from it (``Report.resident_bytes``).
    ``beyond_stored_mb``: ``decode_mb`` less that, which comes and goes in every step: activations, and the history
    that a layer has decoded to read it. Raises ``UnknownNameError`` for other systems.
    """
    how = {"random": [geometry, dtype, device, seed], "sizes": sizes, "chunk_size": chunk_size, "threads": threads}
    with num_threads(threads), tempfile.TemporaryDirectory() as folder:
        model = random_llama(*how["random"])
        made = prepared(model, systems, codebook_sizes, seed)
        requests = {label: {"label": label, **how, **_saved(system, folder, label)} for label, system in made.items()}
        named = {"geometry": geometry, "dtype": dtype, "device": device_name(model.device), "threads": threads}
        del model, made
        found = _each_in_a_process(requests)
    about = dict(zip(("batch", "context", "generated"), sizes, strict=True)) | {"chunk_size": chunk_size}
    return [{"system": label, **about, **row, **named, "versions": versions(*PACKAGES)} for label, row in found.items()]


def _saved(system, folder: str, label: str) -> dict:
    """Save a fitted compressor for another process, and say where; nothing for what needs none."""
    if label in THEIRS:
        return {}
    kept = isinstance(system, KeepingDecoded)
    path = Path(folder) / label.replace(" ", "_")
    (system.compressor if kept else system).save_pretrained(path)
    return {"folder": str(path), "kept": kept}


def _each_in_a_process(requests: dict[str, dict]) -> dict[str, dict]:
    """Every process is forked from one that has imported this module and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with _freed_at_once(), ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        bar = tqdm(requests.items(), desc="peak", leave=False, disable=None)
        return {label: pool.submit(generate_once, request).result() for label, request in bar}


@contextmanager
def _freed_at_once():
    """glibc gives large blocks that processes started inside free back to the system at once: else it keeps some, by
    chance up to twice what is in use."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("MALLOC_")]:
        del os.environ[name]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)  # where it begins; told so, glibc does not raise it
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def generate_once(request: dict) -> dict[str, float]:
    """In a fresh process: load, generate, and say how much memory it took in between."""
    batch, context, generated = request["sizes"]
    with num_threads(request["threads"]):
        model = random_llama(*request["random"])
        system, tokens = _system(request, model.device), random_tokens(model, batch, context)
        _prefilled(model, system, tokens[:1], request["chunk_size"], FIRST_CHUNKS).step()
        before = _start_measuring(model.device)
        generation = _prefilled(model, system, tokens, request["chunk_size"])
        prefill = _peak(model.device) - before
        _start_measuring(model.device)
        for _ in range(generated):
            generation.step()
        decode, stored = _peak(model.device) - before, generation.stored_bytes
    found = {"stored": stored, "resident": generation.cache.report().resident_bytes, "prefill": prefill}
    found |= {"decode": decode, "beyond_stored": decode - stored}
    return {f"{name}_mb": size / 1e6 for name, size in found.items()}


def _prefilled(model, system, tokens: torch.Tensor, chunk_size: int, most: int | None = None) -> Generation:
    """With the first ``most`` chunks of a prompt, or all."""
    generation = Generation(model, system)
    for number, chunk in enumerate(tokens.split(chunk_size, dim=1)[:most]):
        (generation.feed if number else generation.prefill)(chunk)
    return generation


def _system(request: dict, device):
    if "folder" not in request:
        return THEIRS[request["label"]]()
    compressor = Compressor.from_pretrained(request["folder"]).to(device)
    return KeepingDecoded(compressor) if request["kept"] else compressor


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
    """The most bytes in use so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
